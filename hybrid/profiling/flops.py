"""How many floating-point operations a module really runs, by submodule, forward and backward.

Counted are products: a multiply and an add are two operations and one MAC. So a linear layer is exactly 2 B in out; norms,
activations, biases and softmaxes count nothing (of a transformer, about a hundredth). Attention counts the whole rectangle of
queries and keys, also where a mask leaves half of it out, as torch does. torch's FlopCounterMode sees the operations of torch;
formulas.py adds those that it does not know; the project's C++ kernels tell of themselves (inference_v2/kernels/flops.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode

from hybrid.mesh import get_world_size
from hybrid.profiling.formulas import formulas
from hybrid.profiling.modes import on_top
from hybrid.profiling.spans import PHASES, ModuleSpans
from hybrid.profiling.table import number_text, profile_text
from inference_v2.kernels.flops import listen, unlisten


class _LocalMode(_FlopCounterMode):
    """Leaves DTensors to themselves, so that what this rank runs on its parts is counted; not the fake tensors on which they try
    an operation's shapes, unless the module is `fake` itself."""

    def __init__(self, counter: FlopCounterMode, fake: bool) -> None:
        super().__init__(counter)
        self._fake = fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if not self._fake and any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Counter(FlopCounterMode):
    """torch's counter, with our formulas, and with `spans` in place of its own hooks, which every module of the process gets."""

    def __init__(self, spans: ModuleSpans, fake: bool) -> None:
        super().__init__(display=False, custom_mapping=formulas())
        self._fake = fake
        self.mod_tracker = spans  # type: ignore[assignment]

    def __enter__(self) -> _Counter:
        self.mod_tracker.__enter__()
        self.mode = _LocalMode(self, self._fake)
        self.mode.__enter__()
        return self


class FlopsProfiler:
    """Counts what `module` runs between `start_profile` and `stop_profile`, also as `with FlopsProfiler(module):`.

    A backward inside counts as it runs: nothing is estimated from the forward, and what activation checkpointing recomputes is
    counted once more. What runs outside the module's forward and its backward (a loss, an optimizer, another model) is not
    counted. Two profilers may overlap. Of a sharded model operations are this rank's and parameters the whole model's.
    """

    def __init__(self, module: nn.Module, *, data_parallel_size: int | None = None) -> None:
        """data_parallel_size: for the report; None, where the mesh is not known: all ranks of the process group."""
        self._module = module
        self._data_parallel_size = data_parallel_size
        self._spans = ModuleSpans(module)
        self._counter: _Counter | None = None
        self._counts: dict[str, dict[str, int]] = {}  # PHASE:NAME -> operation -> flops

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Counts from zero. ignore_list: classes of modules that are left out, with all below them. Raises ValueError if it runs
        already."""
        if self._counter is not None:
            raise ValueError("start_profile() while a profile runs; call stop_profile() first")
        self._spans = ModuleSpans(self._module, tuple(ignore_list or ()))
        fake = any(isinstance(p, FakeTensor) for p in self._module.parameters())
        self._counter, self._counts = _Counter(self._spans, fake).__enter__(), {}
        listen(self._count)

    def stop_profile(self) -> None:
        """Ends counting and takes off every hook; the numbers stay. Nothing happens if no profile runs. Raises ValueError on
        another thread than start_profile's."""
        counter = self._counter
        if counter is None:
            return
        assert counter.mode is not None, "entered by start_profile"
        with on_top(counter.mode):
            counter.__exit__(None, None, None)
        self._counter = None
        unlisten(self._count)
        for owner, operations in counter.get_flop_counts().items():
            for operation, flops in operations.items():
                self._add(owner, str(operation), flops)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not counted."""
        if self._counter is None:
            yield
            return
        mode = self._counter.mode
        assert mode is not None, "entered by start_profile"
        with on_top(mode):
            mode.__exit__(None, None, None)
        try:
            yield
        finally:
            mode.__enter__()

    def end_profile(self) -> None:
        """Ends counting and forgets the numbers."""
        self.stop_profile()
        self._counts = {}
        self._spans = ModuleSpans(self._module)

    def __enter__(self) -> FlopsProfiler:
        self.start_profile()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop_profile()

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Floating-point operations, forward and backward. As all numbers, those of the last profile that was stopped."""
        flops = sum(sum(operations.values()) for operations in self._counts.values())
        return number_text(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Multiply-accumulates: half the operations, since products alone are counted."""
        macs = sum(sum(operations.values()) for operations in self._counts.values()) // 2
        return number_text(macs, "MACs") if as_string else macs

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Parameters, a shared one once and a sharded one whole."""
        count = _num_parameters(self._module)
        return number_text(count) if as_string else count

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Seconds in the module's forward, the counting included, which costs some microseconds an operation."""
        seconds = self._spans.seconds.get("", 0.0)
        return number_text(seconds, "s") if as_string else seconds

    def report(self) -> dict[str, Any]:
        """A node for the module, `data_parallel_size` beside it. A node: class, params, flops, macs, forward_flops,
        backward_flops, latency_s (of its forwards; None: did not run), operations {name: flops} run by itself, and `children`
        {attribute: node}. Numbers include those of the children."""
        size = get_world_size() if self._data_parallel_size is None else self._data_parallel_size
        return {**self._node("", self._module), "data_parallel_size": size}

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
    ) -> None:
        """The report as text, on the console or (written anew) in `output_file`.

        module_depth: how deep the summary by class goes, -1 to the end; top_modules: how many classes it names at each depth;
        detailed: also the tree of modules.
        """
        text = profile_text(
            self.report(), step=profile_step, module_depth=module_depth, top_modules=top_modules, detailed=detailed
        )
        if output_file is None:
            print(text)
        else:
            Path(output_file).write_text(f"{text}\n", encoding="utf-8")

    def _count(self, operation: str, flops: int) -> None:
        for owner in self._spans.parents:
            self._add(owner, operation, flops)

    def _add(self, owner: str, operation: str, flops: int) -> None:
        operations = self._counts.setdefault(owner, {})
        operations[operation] = operations.get(operation, 0) + flops

    def _node(self, name: str, module: nn.Module) -> dict[str, Any]:
        prefix = f"{name}." if name else ""
        children = {key: self._node(f"{prefix}{key}", child) for key, child in module.named_children()}
        own = {phase: self._counts.get(f"{phase}:{name}", {}) for phase in PHASES}
        flops = {
            phase: sum(own[phase].values()) + sum(child[f"{phase}_flops"] for child in children.values()) for phase in PHASES
        }
        total = sum(flops.values())
        operations: dict[str, int] = {}
        for counts in own.values():
            for operation, count in counts.items():
                operations[operation] = operations.get(operation, 0) + count
        return {
            "class": type(module).__name__,
            "params": _num_parameters(module),
            "flops": total,
            "macs": total // 2,
            **{f"{phase}_flops": count for phase, count in flops.items()},
            "latency_s": self._spans.seconds.get(name),
            "operations": operations,
            "children": children,
        }


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: Literal["forward", "generate"] = "forward",
) -> tuple[int | str, int | str, int | str]:
    """(flops, macs, params) of one forward, or one `generate`, in eval mode without gradients; the signature is DeepSpeed's.

    input_shape: of a first argument that is made here: random token ids where the model begins with an embedding, else random
    numbers in the dtype of its parameters. `args` and `kwargs` follow it, or are all there is. warm_up: calls before the counted
    one. The training flag of every submodule and the caller's random state come back, and every hook is taken off, also after an
    exception. Raises ValueError for an unknown mode, for a model that has no `generate`, and without any input.
    """
    if mode not in ("forward", "generate"):
        raise ValueError(f"mode={mode!r}; allowed: forward, generate")
    if mode == "generate" and not callable(getattr(model, "generate", None)):
        raise ValueError(f"mode='generate' for {type(model).__name__}, which has no generate(); use mode='forward'")
    if input_shape is None and not args and not kwargs:
        raise ValueError("get_model_profile without input; give input_shape, args or kwargs")
    if warm_up < 0:
        raise ValueError(f"warm_up={warm_up}; allowed: 0 or more")
    given = list(args) if input_shape is None else [_made_input(model, input_shape), *args]
    run: Any = model if mode == "forward" else model.generate
    profiler = FlopsProfiler(model)
    with _evaluating(model):
        for _ in range(warm_up):
            run(*given, **(kwargs or {}))
        profiler.start_profile(ignore_modules)
        try:
            run(*given, **(kwargs or {}))
        finally:
            profiler.stop_profile()
    if print_profile:
        profiler.print_model_profile(
            module_depth=module_depth, top_modules=top_modules, detailed=detailed, output_file=output_file
        )
    return profiler.get_total_flops(as_string), profiler.get_total_macs(as_string), profiler.get_total_params(as_string)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda" and p.device.index is not None})
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, flag in flags:
            module.training = flag


def _made_input(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """From a generator of its own."""
    generator = torch.Generator().manual_seed(0)
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    leaves = (module for module in model.modules() if next(module.children(), None) is None)
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    door = next(leaves) if embeddings is None else embeddings()
    if isinstance(door, nn.Embedding):
        return torch.randint(door.num_embeddings, tuple(shape), generator=generator).to(parameter.device)
    return torch.randn(tuple(shape), generator=generator).to(parameter.device, parameter.dtype)


def _num_parameters(module: nn.Module) -> int:
    return sum(prod(p.shape) for p in module.parameters())
