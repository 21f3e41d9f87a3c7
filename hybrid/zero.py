"""Sharded parameters seen whole for a while, under DeepSpeed's names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from hybrid.in_flight import abandon, is_running, mark_gathered, root_parts
from hybrid.sharding import groups, local, own_rows, reshard

log = logging.getLogger(__name__)
_OWNERS = "hybrid_owners"  # attribute of an engine's parameter: the (module, name) that hold it
_FORWARDS = "hybrid_forwards"  # attribute of an engine's parameter: the engine's _Forwards
_STANDS_IN = "hybrid_whole"  # attribute of a plain tensor that stands in a module in place of a shard


def note_owners(module: nn.Module) -> None:
    """Let each parameter of the module know where it is held, what a forward gathers that it is no shard, and forwards what is
    whole at the time. Called once, after sharding."""
    forwards = _Forwards(module)
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            owners = parameter.__dict__.setdefault(_OWNERS, [])
            owners.append((child, name))
            parameter.__dict__[_FORWARDS] = forwards
    mark_gathered(module, _STANDS_IN)


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Collective. Inside, the modules that hold the parameters hold them whole (`layer.weight` is a plain tensor on every rank),
    and so does a parameter that the caller kept (a DTensor of the same memory); at the end they are the shards again, with what
    `modifier_rank` changed in place, or unchanged if that is None. Parameters that an engine does not shard (without a dimension,
    or without elements) follow the same rule; what is no engine's is left alone, and so is, with modifier_rank=None, what is
    whole already.

    Raises ValueError for a sharded parameter of something that no engine trains; and, given a modifier_rank, for one that is
    whole already (by a forward, or another GatheredParameters): the change would be lost. A forward inside with gradients is a
    RuntimeError.
    """
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    given = list(dict.fromkeys(listed)) if enabled else []
    if any(_is_sharded(p) and _OWNERS not in p.__dict__ for p in given):
        raise ValueError("GatheredParameters: a parameter was not sharded by hybrid.initialize; give those of engine.module")
    elsewhere = dict.fromkeys(p for p in given if _is_whole_elsewhere(p))
    if elsewhere and modifier_rank is not None:
        raise ValueError(
            f"GatheredParameters(modifier_rank={modifier_rank}): a parameter of shape {list(next(iter(elsewhere)).shape)} is "
            "gathered already, by a forward or another GatheredParameters, and a change would be lost; after the step's last "
            "engine.backward, or after engine(...) under torch.no_grad(), list engine.module's parameters anew"
        )
    taken = [p for p in given if _OWNERS in p.__dict__ and p not in elsewhere]
    whole = _Whole((p for p in taken if _is_sharded(p)), modifier_rank)
    kept = {p: p.detach().clone() for p in taken if p not in whole.values}
    forwards: list[_Forwards] = [*dict.fromkeys(p.__dict__[_FORWARDS] for p in whole.values)]
    modified = False
    try:
        whole.show()
        for each in forwards:
            each.open.append(whole)
        yield
        modified = modifier_rank is not None
    finally:
        for each in forwards:
            each.open = [other for other in each.open if other is not whole]
        whole.hide()
        whole.restore()
        if not modified:
            for p, before in kept.items():
                p.data.copy_(before)
    if modifier_rank is not None:
        for p in taken:
            _take(p, whole.values[p].detach() if p in whole.values else p.data, modifier_rank)


class _Whole:
    """Shards that one GatheredParameters shows whole."""

    def __init__(self, parameters: Iterable[nn.Parameter], modifier_rank: int | None) -> None:
        """Collective."""
        self.values = {p: _whole_of(p) for p in parameters}
        self._modifier_rank = modifier_rank
        self._shards = {p: _rows_and_spec(p) for p in self.values}
        self._before: dict[nn.Parameter, Tensor] = {}  # shards that a forward was given other values of

    def show(self) -> None:
        for p, value in self.values.items():
            _set_rows(p, value.data, _everywhere(self._shards[p][1]))
            _hold(p, value)

    def hide(self) -> None:
        for p, (shard, spec) in self._shards.items():
            _set_rows(p, shard, spec)
            _hold(p, p)

    @torch.no_grad()
    def lend(self) -> None:
        """Collective: the shards, as a forward gathers them, have the values that are shown."""
        self.hide()
        for p, value in self.values.items():
            if self._modifier_rank is not None:
                dist.broadcast(value.data, self._modifier_rank)
            shard, rows = self._shards[p][0], value.data[own_rows(cast(DTensor, p))]
            if not torch.equal(shard, rows):
                self._before.setdefault(p, shard.clone())
                shard.copy_(rows)

    @torch.no_grad()
    def restore(self) -> None:
        for p, before in self._before.items():
            self._shards[p][0].copy_(before)


class _Forwards:
    """Of one sharded module: a forward inside GatheredParameters runs with what is whole there.

    FSDP2 gathers weights from the shards whatever stands in the module, so for the time of a forward the shards are lent the
    values that are shown."""

    def __init__(self, module: nn.Module) -> None:
        self.open: list[_Whole] = []
        self._module = module
        self._outermost: nn.Module | None = None
        for part in [*(cast(nn.Module, group) for group in groups(module)), *root_parts(module)]:
            part.register_forward_pre_hook(self._enter, prepend=True)
            part.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if self._outermost is not None or not self.open:
            return
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a forward inside GatheredParameters computes no gradients; use torch.no_grad(), or leave it first"
            )
        self._outermost = module
        for whole in self.open:
            whole.lend()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if module is not self._outermost:
            return
        self._outermost = None
        if is_running(self._module):  # it raised
            abandon(self._module)
        reshard(self._module)
        for whole in self.open:
            whole.show()


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor)


def _is_whole_elsewhere(parameter: nn.Parameter) -> bool:
    """Whether it stands, or the tensor that stands in its place, for a shard that something else has gathered."""
    if not _is_sharded(parameter):
        return _STANDS_IN in parameter.__dict__
    return any(module._parameters.get(name) is not parameter for module, name in parameter.__dict__[_OWNERS])


def _whole_of(parameter: nn.Parameter) -> nn.Parameter:
    whole = nn.Parameter(cast(DTensor, parameter.detach()).full_tensor().clone(), requires_grad=False)
    whole.__dict__[_STANDS_IN] = True
    return whole


def _rows_and_spec(parameter: nn.Parameter) -> tuple[Tensor, DTensorSpec]:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor, parameter._spec


def _set_rows(parameter: nn.Parameter, tensor: Tensor, spec: DTensorSpec) -> None:
    """What this rank has of a DTensor, and how that is to be understood. No change in place: the shard keeps its memory."""
    assert isinstance(parameter, DTensor)
    parameter._local_tensor, parameter._spec = tensor, spec


def _everywhere(spec: DTensorSpec) -> DTensorSpec:
    """Of the same tensor, whole on every rank."""
    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)


def _hold(parameter: nn.Parameter, value: nn.Parameter) -> None:
    for module, name in parameter.__dict__[_OWNERS]:
        module._parameters[name] = value


@torch.no_grad()
def _take(parameter: nn.Parameter, whole: Tensor, rank: int) -> None:
    """This rank's part of the value that `rank` has."""
    if whole.numel():
        dist.broadcast(whole, rank)
    part = whole[own_rows(parameter)] if isinstance(parameter, DTensor) else whole
    local(parameter.data).copy_(part)


@contextmanager
def Init(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Nothing happens inside: here a module is made whole in host memory, and sharded by `initialize`."""
    log.info("zero.Init: the module is made in host memory; initialize shards it")
    yield
