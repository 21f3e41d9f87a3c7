"""Sharded parameters seen whole for a while, under DeepSpeed's names."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid.optim.host import COPY
from hybrid.sharding import local, own_rows

log = logging.getLogger(__name__)
_OWNERS = "hybrid_owners"  # attribute of a sharded parameter: the (module, name) that hold it


def note_owners(module: nn.Module) -> None:
    """Let each sharded parameter of the module know where it is held. Called once, after sharding."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            owners = parameter.__dict__.setdefault(_OWNERS, [])
            owners.append((child, name))


@contextmanager
def GatheredParameters(
    params: nn.Parameter | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Collective. Inside, the modules that hold the parameters hold them whole (`layer.weight` is a plain tensor on every rank);
    at the end they hold the shards again, with what `modifier_rank` changed in place, or unchanged if that is None.

    Raises ValueError for a sharded parameter of something that no engine trains.
    """
    listed = [params] if isinstance(params, nn.Parameter) else list(params)
    sharded = [p for p in dict.fromkeys(listed) if _is_sharded(p)] if enabled else []
    if any(_OWNERS not in p.__dict__ for p in sharded):
        raise ValueError("GatheredParameters: a parameter was not sharded by hybrid.initialize; give those of engine.module")
    whole = {p: nn.Parameter(cast(DTensor, p.detach()).full_tensor().clone(), requires_grad=False) for p in sharded}
    try:
        for p in sharded:
            for module, name in p.__dict__[_OWNERS]:
                module._parameters[name] = whole[p]
        yield
    finally:
        for p in sharded:
            for module, name in p.__dict__[_OWNERS]:
                module._parameters[name] = p
    if modifier_rank is not None:
        for p in sharded:
            _take(p, whole[p].detach(), modifier_rank)


def _is_sharded(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor)


@torch.no_grad()
def _take(parameter: nn.Parameter, whole: torch.Tensor, rank: int) -> None:
    """This rank's rows of the value that `rank` has."""
    assert isinstance(parameter, DTensor)
    dist.broadcast(whole, rank)
    rows = own_rows(parameter)
    local(parameter).copy_(whole[rows])
    if (copy := parameter.__dict__.get(COPY)) is not None:
        local(copy).copy_(whole[rows])


@contextmanager
def Init(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Nothing happens inside: here a module is made whole in host memory, and sharded by `initialize`."""
    log.info("zero.Init: the module is made in host memory; initialize shards it")
    yield
