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

from hybrid.sharding import local, mark_gathered, own_rows

log = logging.getLogger(__name__)
_OWNERS = "hybrid_owners"  # attribute of an engine's parameter: the (module, name) that hold it
_WHOLE = "hybrid_whole"  # attribute of a plain tensor that stands in a module in place of a shard


def note_owners(module: nn.Module) -> None:
    """Let each parameter of the module know where it is held, and what a forward gathers that it is no shard. Called once, after
    sharding."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            owners = parameter.__dict__.setdefault(_OWNERS, [])
            owners.append((child, name))
    mark_gathered(module, _WHOLE)


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
    whole already (by a forward, or another GatheredParameters): the change would be lost.
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
    whole = {p: _whole_of(p) for p in taken if _is_sharded(p)}
    kept = {p: p.detach().clone() for p in taken if p not in whole}
    shards = {p: _lie(p) for p in whole}
    modified = False
    try:
        for p, value in whole.items():
            _lay(p, value.data, _everywhere(shards[p][1]))
            _put(p, value)
        yield
        modified = modifier_rank is not None
    finally:
        for p, (shard, spec) in shards.items():
            _lay(p, shard, spec)
            _put(p, p)
        if not modified:
            for p, before in kept.items():
                p.data.copy_(before)
    if modifier_rank is not None:
        for p in taken:
            _take(p, whole[p].detach() if p in whole else p.data, modifier_rank)


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor)


def _is_whole_elsewhere(parameter: nn.Parameter) -> bool:
    """Whether it stands, or the tensor that stands in its place, for a shard that something else has gathered."""
    if not _is_sharded(parameter):
        return _WHOLE in parameter.__dict__
    return any(module._parameters.get(name) is not parameter for module, name in parameter.__dict__[_OWNERS])


def _whole_of(parameter: nn.Parameter) -> nn.Parameter:
    whole = nn.Parameter(cast(DTensor, parameter.detach()).full_tensor().clone(), requires_grad=False)
    whole.__dict__[_WHOLE] = True
    return whole


def _lie(parameter: nn.Parameter) -> tuple[Tensor, DTensorSpec]:
    assert isinstance(parameter, DTensor)
    return parameter._local_tensor, parameter._spec


def _lay(parameter: nn.Parameter, tensor: Tensor, spec: DTensorSpec) -> None:
    """What this rank has of a DTensor, and how that is to be understood. No change in place: the shard keeps its memory."""
    assert isinstance(parameter, DTensor)
    parameter._local_tensor, parameter._spec = tensor, spec


def _everywhere(spec: DTensorSpec) -> DTensorSpec:
    """Of the same tensor, whole on every rank."""
    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)


def _put(parameter: nn.Parameter, value: nn.Parameter) -> None:
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
