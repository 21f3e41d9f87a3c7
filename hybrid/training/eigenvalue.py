"""`eigenvalue`: how sharply the loss bends along each block, every few steps: the largest eigenvalue of the block's Hessian.

FSDP2's hooks are in the graph, and are run through twice: while everything stays gathered and nothing is reduced they only pass
gradients on, and those of gradients as well. The graph is that of the forward that is trained on, and it is left as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from hybrid import sharding
from hybrid.mesh import Mesh
from hybrid.training.config.sections import EigenvalueConfig
from hybrid.training.config.top import TrainingConfig
from hybrid.training.curvature import Eigenvalue, top_eigenvalue
from hybrid.training.precision import dtypes_of

_LISTS = nn.ModuleList | nn.Sequential
_EXACT = (torch.float32, torch.float64, None)


class EigenvalueMonitor:
    """Of the Hessian of the loss of a step's last micro-batch, mean over ranks, with respect to the trained parameters of one
    block; of largest magnitude, with its sign. The step's gradients, weights and random numbers are untouched.

    Costs, at a step where it is due: the whole model gathered, the graph of its gradients, and for each block and iteration two
    backwards and an all-reduce of the block's size.
    """

    def __init__(self, module: nn.Module, settings: TrainingConfig, mesh: Mesh, log: logging.Logger) -> None:
        """Before sharding. Raises ValueError for a list that is not there, blocks without trained parameters, and weights that
        are not computed with in fp32."""
        self._settings, self._stage = settings.eigenvalue, settings.zero_optimization.stage
        self._mesh, self._log = mesh, log
        self._blocks = find_blocks(module, self._settings)
        dtypes = dtypes_of(module, settings.precision())
        for name, child in module.named_modules():
            if dtypes[child].compute not in _EXACT:
                raise ValueError(f"eigenvalue: {name or type(child).__name__} computes in {dtypes[child].compute}, in which "
                                 "products with a Hessian have no digits left; allowed: fp32; or switch it off")  # fmt: skip
        self.found: dict[str, Eigenvalue] = {}  # by block, of the last step at which it was due
        self.step: int | None = None  # that step
        self._trusted: set[str] = set()  # functions of others in the graph, as far as they were told

    def due(self, step: int) -> bool:
        """Whether optimizer step `step`, from 1, is one, and not done."""
        return step % self._settings.gas_boundary_resolution == 0 and step != self.step

    def measure(self, root: nn.Module, loss: Tensor, step: int) -> None:
        """Collective. `loss` with its graph, before its backward. What was gathered for it is left to that backward to free.
        Raises RuntimeError for a loss that cannot be differentiated twice."""
        with sharding.held(root, self._stage):
            blocks = {name: _trained(block) for name, block in self._blocks.items()}
            derived = _derivatives(loss.sum(), [p for found in blocks.values() for p in found])
            self._look_through(derived)
            gradients = iter(derived)
            self.found = {
                name: self._of_block(index, name, parameters, [next(gradients) for _ in parameters])
                for index, (name, parameters) in enumerate(blocks.items())
            }
        self.step = step
        if self._mesh.rank == 0:
            self._log.info("step=%d, eigenvalues: %s", step, ", ".join(map(_in_words, self.found, self.found.values())))
            for name, one in self.found.items():
                if one.trouble:
                    self._log.warning("step=%d: no eigenvalue of %s: %s", step, name, one.trouble)

    def scalars(self, step: int) -> dict[str, float]:
        """What is logged of optimizer step `step`: each block's value, under its place in the list and under its name."""
        if step != self.step:
            return {}
        places = {f"Train/Eigenvalues/ModelBlockParam_{i}": one.value for i, one in enumerate(self.found.values())}
        return places | {f"Train/Eigenvalues/{name}": one.value for name, one in self.found.items()}

    def _of_block(self, index: int, name: str, parameters: list[nn.Parameter], gradients: list[Tensor | None]) -> Eigenvalue:
        settings = self._settings
        sizes = [p.numel() for p in parameters]
        # on the host: the same on every rank and device, and the random numbers of training stay where they are
        start = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(index)).to(parameters[0])

        def product(vector: Tensor) -> Tensor:
            given = [piece.view_as(p).to(p) for piece, p in zip(vector.split(sizes), parameters, strict=True)]
            bent = [(g, v) for g, v in zip(gradients, given, strict=True) if g is not None and g.requires_grad]
            got = _derivatives([g for g, _ in bent], parameters, [v for _, v in bent])
            whole = torch.cat(
                [torch.zeros_like(v).flatten() if h is None else h.flatten() for h, v in zip(got, given, strict=True)]
            )
            if self._mesh.world_size > 1:
                dist.all_reduce(whole)
                whole /= self._mesh.world_size
            return whole

        return top_eigenvalue(
            product,
            start,
            max_iter=settings.max_iter,
            tol=settings.tol,
            stability=settings.stability,
            agree=self._agree,
            note=self._note(name),
        )

    def _look_through(self, gradients: Sequence[Tensor | None]) -> None:
        """What autograd does not follow is missing in its products without a word: told here. Raises RuntimeError."""
        nodes = _nodes(gradients)
        if any(node.name() == "torch::autograd::Error" for node in nodes):
            raise RuntimeError(_refusal("a function in it is marked once_differentiable"))
        own = {type(n)._forward_cls for n in nodes if isinstance(n, torch.autograd.function.BackwardCFunction)}  # type: ignore[attr-defined]
        told = {cls.__name__ for cls in own if not cls.__module__.startswith("torch.distributed.fsdp")} - self._trusted
        self._trusted |= told
        if told and self._mesh.rank == 0:
            self._log.warning("eigenvalues are right only if the backward of %s can be differentiated", ", ".join(sorted(told)))

    def _agree(self, numbers: list[float]) -> list[float]:
        return [number / self._mesh.world_size for number in self._mesh.sum(numbers)]

    def _note(self, name: str) -> Callable[[int, float, float], None]:
        if not self._settings.verbose or self._mesh.rank != 0:
            return lambda iteration, value, residual: None
        return lambda iteration, value, residual: self._log.info(
            "eigenvalue of %s, iteration %d: %.6g, residual %.2g", name, iteration, value, residual
        )


def find_blocks(module: nn.Module, settings: EigenvalueConfig) -> dict[str, nn.Module]:
    """The blocks by name. Raises ValueError, with the lists there are, where `layer_name` is none of them or layer_num is more
    than it holds; and where a block has nothing that is trained."""
    lists = {name: child for name, child in module.named_modules() if name and isinstance(child, _LISTS) and len(child)}
    there = ", ".join(f"{name} ({len(child)})" for name, child in lists.items()) or "none"
    path = settings.layer_name
    if not path:
        longest = [name for name, child in lists.items() if isinstance(child, nn.ModuleList)]
        if not longest:
            raise ValueError(f"eigenvalue.layer_name is empty and {type(module).__name__} has no nn.ModuleList; lists of blocks "
                             f"there are: {there}; name one")  # fmt: skip
        path = max(longest, key=lambda name: len(lists[name]))
    if path not in lists:
        raise ValueError(f"eigenvalue.layer_name={path!r}; lists of blocks in {type(module).__name__}: {there}; name one of them")
    number = settings.layer_num or len(lists[path])
    if number > len(lists[path]):
        raise ValueError(f"eigenvalue.layer_num={number}; allowed: at most {len(lists[path])}, the blocks of {path}")
    blocks = {f"{path}.{key}": child for key, child in [*lists[path].named_children()][:number]}
    frozen = [name for name, block in blocks.items() if not _trained(block)]
    if frozen:
        raise ValueError(f"eigenvalue: nothing in {', '.join(frozen)} is trained; allowed: blocks that are; give layer_name or "
                         "layer_num, or switch eigenvalue off")  # fmt: skip
    return blocks


def _trained(block: nn.Module) -> list[nn.Parameter]:
    return [p for p in block.parameters() if p.requires_grad and p.numel()]


def _derivatives(
    outputs: Tensor | Sequence[Tensor], parameters: list[nn.Parameter], vectors: Sequence[Tensor] | None = None
) -> Sequence[Tensor | None]:
    """By parameter, of one number to be derived once more, or of gradients along `vectors`; None: it does not depend on that."""
    assert not any(isinstance(p, DTensor) for p in parameters), "held gathers all"
    if isinstance(outputs, Sequence) and not outputs:
        return [None] * len(parameters)
    try:
        found = torch.autograd.grad(
            outputs, parameters, vectors, create_graph=vectors is None, retain_graph=True, allow_unused=True
        )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(_refusal(" ".join(str(error).split()))) from error
    return cast("Sequence[Tensor | None]", found)


def _refusal(why: str) -> str:
    return (f"eigenvalue: the loss cannot be differentiated twice ({why}); use operations that can be (attention: eager; "
            "torch.utils.checkpoint: use_reentrant=False), or switch eigenvalue off")  # fmt: skip


def _nodes(tensors: Sequence[Tensor | None]) -> set[Node]:
    """The graph below them."""
    seen: set[Node] = set()
    waiting = [x.grad_fn for x in tensors if x is not None]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [below for below, _ in node.next_functions]
    return seen


def _in_words(name: str, one: Eigenvalue) -> str:
    how = "" if one.converged else ", not converged"
    return f"{name} {one.value:.4g} ({one.iterations} iterations, residual {one.residual:.1%}{how})"


def open_eigenvalues(module: nn.Module, settings: TrainingConfig, mesh: Mesh, log: logging.Logger) -> EigenvalueMonitor | None:
    """None where the config does not enable it."""
    return EigenvalueMonitor(module, settings, mesh, log) if settings.eigenvalue.enabled else None


def values_of(monitor: EigenvalueMonitor | None) -> Mapping[str, float]:
    return {} if monitor is None else {name: one.value for name, one in monitor.found.items()}
