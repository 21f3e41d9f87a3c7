"""Where shards come from: `fully_shard` by layer and dtype, the ZeRO stages, and the questions one may ask of a sharded module.

The stages, on FSDP2 (the parameters' shards live on the mesh dimension "shard"):
    0   mesh (W, 1): every rank holds everything; gradients are all-reduced at the last micro-batch
    1   shards; gathered once per step and kept; one reduce-scatter at the last micro-batch
    2   shards; gathered once per step and kept; a reduce-scatter each micro-batch
    3   shards; a layer is gathered for its forward and again for its backward; a reduce-scatter each micro-batch
Gradients are sums over ranks: the caller divides, the loss before backward or the gradients after it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hybrid.config import HybridConfig
from hybrid.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """How the parts of a module are sharded and in which dtypes they travel."""

    stage: int
    gather_dtype: Callable[[nn.Module], torch.dtype | None]  # of the parameters a module itself holds; None: as shards are
    reduce_dtype: torch.dtype = torch.float32  # gradients are summed over ranks in it
    cast_inputs: bool = True  # what goes into a unit is cast to what its weights are gathered in
    offload: OffloadPolicy = field(default_factory=OffloadPolicy)
    kept_over: int | None = None  # stage 3: after its forward a layer stays spread over so many ranks only; None: over all
    unsharded: Collection[nn.Parameter] = ()  # left alone: not sharded, not gathered, gradients not reduced
    prepare: Callable[[nn.Module], None] = lambda unit: None  # called on each unit before it is sharded

    @classmethod
    def of(cls, config: HybridConfig) -> Layout:
        """One dtype computes everywhere."""
        compute = getattr(torch, config.compute_dtype)
        return cls(stage=config.zero_stage, gather_dtype=lambda _: compute)


def shard(
    module: nn.Module,
    *,
    layers: Sequence[nn.Module],
    apart: Sequence[nn.Module] = (),
    head: nn.Module | None = None,
    mesh: Mesh,
    layout: Layout,
) -> None:
    """Shard `module` in place, in units: each of `layers`; each of `apart` (towers that text never runs); the untied `head`; and
    the rest (embedding, final norm, tied head) with the root. Inside a unit each dtype is one group of its own.

    The root and the head stay gathered between their forward and backward, which follow each other; layers as the stage says.
    """
    free_layers = _frees_layers(layout.stage)
    grid = mesh.device_mesh if mesh.device_mesh.size(0) > 1 or layout.stage == 0 else mesh.device_mesh["shard"]
    after = layout.kept_over if free_layers and layout.kept_over else free_layers
    for unit in layers:
        _shard_unit(unit, grid, layout, after)
    for unit in apart:
        _shard_unit(unit, grid, layout, True)
    if head is not None:
        _shard_unit(head, grid, layout, False)
    _shard_unit(module, grid, layout, False)
    for group in groups(module):
        group.set_reshard_after_backward(free_layers, recurse=False)
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)


def _frees_layers(stage: int) -> bool:
    """Whether a layer is freed after its forward and its backward. Stage 0 frees its compute copy too: making it again costs no
    communication."""
    return stage in (0, 3)


def divide_gradients(module: nn.Module, by: float) -> None:
    """Let every gradient be the sum over ranks, divided by that; after `let_parts_be_called`. (FSDP2's own factor does it before,
    after or twice, by the dtype that is sent and by whether weights are cut: torch 2.13.)"""
    if by == 1.0:
        return

    def divide(reduced: Tensor) -> None:
        reduced /= by

    for group in groups(module):
        for parameters in group._get_fsdp_state()._fsdp_param_groups:
            # On another stream than the reduce-scatter's its buffer could be used again before it has been read.
            stream = None if parameters._is_hsdp else parameters.comm_ctx.reduce_scatter_stream
            group.set_all_reduce_hook(divide, stream=stream)


def _shard_unit(unit: nn.Module, grid: DeviceMesh, layout: Layout, reshard_after_forward: bool | int) -> None:
    """One group per pair of dtypes (of the shards, gathered) among the trained parameters of `unit` that no group holds yet; the
    commonest goes with `unit` itself, as do frozen ones, of any dtype, that are gathered in the same."""
    layout.prepare(unit)
    unsharded = {*layout.unsharded}
    owners: dict[tuple[torch.dtype | None, torch.dtype | None], list[nn.Module]] = {}
    sizes: dict[tuple[torch.dtype | None, torch.dtype | None], int] = {}
    for child in unit.modules():
        held = [p for p in child.parameters(recurse=False) if not isinstance(p, DTensor) and p not in unsharded]
        dtypes = {p.dtype for p in held if p.requires_grad}
        if len(dtypes) > 1:
            raise ValueError(
                f"{type(child).__name__} holds parameters of {sorted(map(str, dtypes))}; allowed: one dtype per module "
                "(they are gathered together); cast them or move some into a submodule"
            )
        if not held:
            continue
        key = (next(iter(dtypes), None), layout.gather_dtype(child))
        owners.setdefault(key, []).append(child)
        sizes[key] = sizes.get(key, 0) + sum(p.numel() for p in held)
    for frozen in [key for key in owners if key[0] is None]:  # with trained ones that are gathered alike, or as they are
        home = next((key for key in owners if key[0] is not None and frozen[1] in (key[1], None)), None)
        if home is not None:
            owners[home] += owners.pop(frozen)
            sizes[home] += sizes.pop(frozen)
    main = max(sizes, key=lambda key: sizes[key], default=(None, None))
    for key, modules in owners.items():
        if key == main:
            continue
        if unit in modules:
            raise ValueError(f"{type(unit).__name__} itself holds {key[0]} parameters while most of it is {main[0]}; cast them")
        fully_shard(modules, **_options(grid, layout, reshard_after_forward, key[1], unsharded))  # type: ignore[call-overload]
    fully_shard(unit, **_options(grid, layout, reshard_after_forward, main[1], unsharded))  # type: ignore[call-overload]


def _options(
    grid: DeviceMesh,
    layout: Layout,
    reshard_after_forward: bool | int,
    gathered: torch.dtype | None,
    unsharded: set[nn.Parameter],
) -> dict[str, object]:
    reduced = torch.float64 if gathered == torch.float64 else layout.reduce_dtype
    policy = MixedPrecisionPolicy(gathered, reduce_dtype=reduced, cast_forward_inputs=layout.cast_inputs)
    return {
        "mesh": grid,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": policy,
        "offload_policy": layout.offload,
        "ignored_params": unsharded,
    }


def groups(module: nn.Module) -> Iterator[FSDPModule]:
    """The sharded modules in module order (a group of several modules is listed once for each: the calls are idempotent)."""
    for child in module.modules():
        if isinstance(child, FSDPModule):
            yield child


def parameter_groups(module: nn.Module) -> Iterator[Any]:
    """FSDP2's own groups of parameters (FSDPParamGroup), each once."""
    states = dict.fromkeys(group._get_fsdp_state() for group in groups(module))
    return (parameters for state in states for parameters in state._fsdp_param_groups)


def reshard(module: nn.Module) -> None:
    """Free every gathered weight. No communication."""
    for group in groups(module):
        group.reshard()


def gathered(module: nn.Module) -> list[str]:
    """Names of parameters that this rank holds whole at the moment (empty between phases)."""
    return [name for name, p in module.named_parameters() if not isinstance(p, DTensor)]


def gather_dtypes(module: nn.Module) -> dict[nn.Parameter, torch.dtype]:
    """In which dtype each shard is gathered to compute; those without an entry compute as they are."""
    dtypes: dict[nn.Parameter, torch.dtype] = {}
    for parameters in parameter_groups(module):
        if (dtype := parameters.mp_policy.param_dtype) is not None:
            dtypes |= dict.fromkeys((held.sharded_param for held in parameters.fsdp_params), dtype)
    return dtypes


def outside_inference_mode() -> AbstractContextManager[object]:
    """What is gathered in the caller's torch.inference_mode() could not be trained afterwards: leave it for a while."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def set_sync(module: nn.Module, stage: int, *, last: bool) -> None:
    """Say before a micro-batch's forward whether its backward reduces gradients (stages 0 and 1 wait for the last one)."""
    cast(FSDPModule, module).set_requires_gradient_sync(last or stage >= 2)


@contextmanager
def held(module: nn.Module, stage: int) -> Iterator[None]:
    """Between a forward and its backward: everything is gathered, and what runs backward inside frees and reduces nothing, so
    that it may run often (torch.autograd.grad, also of gradients; nothing that adds to .grad). Collective. At exit all stays
    gathered until the backward frees it; say set_sync before that."""
    root = cast(FSDPModule, module)
    with torch.no_grad():
        for group in groups(module):
            group.unshard()
    root.set_requires_gradient_sync(False)
    root.set_reshard_after_backward(False)
    root.set_is_last_backward(False)
    try:
        yield
    finally:
        root.set_reshard_after_backward(_frees_layers(stage))
        root.set_is_last_backward(True)


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor, sharing its memory; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_rows(rows: int, world_size: int, rank: int) -> slice:
    """The rows of dimension 0 that shard `rank` of `world_size` holds: ceil(rows / W) each, the last ranks fewer or none."""
    step = -(-rows // world_size)
    return slice(min(rank * step, rows), min((rank + 1) * step, rows))


def own_rows(tensor: DTensor) -> slice:
    """The rows of dimension 0 of a sharded parameter, or of a tensor cut like one, that this rank holds."""
    mesh = tensor.device_mesh
    shard_dim = mesh.ndim - 1  # of ("replicate", "shard"), or of ("shard",)
    return local_rows(tensor.shape[0], mesh.size(shard_dim), mesh.get_local_rank(shard_dim))


def shard_count(mesh: Mesh) -> int:
    """Into how many shards a weight is cut."""
    return mesh.device_mesh.size(1)


class ShardedSource:
    """The weights of a sharded module by HF name, in the compute dtype: a `WeightSource` for the generator.

    `scope(prefix)` gathers the groups below a layer's prefix ("": those outside the layers), once, and frees them at exit: a
    collective, so every rank opens the same scopes in the same order. `opened` counts them, `bytes_gathered` adds up.
    """

    def __init__(self, root: nn.Module, named: nn.Module, layers: dict[str, nn.Module], *, skipped: tuple[str, ...] = ()) -> None:
        self._owners = {}
        for path, child in named.named_modules():
            for attribute, _ in child.named_parameters(recurse=False):
                self._owners[f"{path}.{attribute}" if path else attribute] = (child, attribute)
        self._names = [name for name, _ in named.named_parameters() if not name.startswith(skipped)]
        apart = {id(m) for layer in layers.values() for m in layer.modules()}
        apart |= {id(m) for path, m in named.named_modules() if f"{path}.".startswith(skipped)}
        self._groups = {prefix: list(groups(layer)) for prefix, layer in layers.items()}
        self._groups[""] = [g for g in groups(root) if id(g) not in apart]
        self.opened = 0
        self.bytes_gathered = 0

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The layers' prefixes in order."""
        return tuple(prefix for prefix in self._groups if prefix)

    def names(self) -> list[str]:
        return self._names

    @contextmanager
    def scope(self, prefix: str) -> Iterator[None]:
        self.opened += 1
        held = self._groups[prefix]
        try:
            with outside_inference_mode(), torch.no_grad():
                for group in held:
                    group.unshard()
            whole = {id(p): p.nbytes for group in held for p in cast(nn.Module, group).parameters() if not isinstance(p, DTensor)}
            self.bytes_gathered += sum(whole.values())
            yield
        finally:
            for group in held:
                group.reshard()

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        """Raises KeyError for an unknown name, RuntimeError for one whose scope is not open."""
        child, attribute = self._owners[name]
        weight = getattr(child, attribute).detach()
        if isinstance(weight, DTensor):
            raise RuntimeError(f"{name}: asked for outside the scope of its layer")
        return weight if rows is None else weight[rows]
