"""Which operations of torch's dispatcher are collectives: their name, the group that talks, the bytes of the message.

Every call of torch.distributed ends in one of these operators, whoever makes it: FSDP2, DTensor, this project. Bytes and bus
bandwidth are counted as nccl-tests counts them (its PERFORMANCE.md): the message of an all-gather is all of its output, that of a
reduce-scatter all of its input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves


def _whole(ranks: int) -> float:
    return 1.0


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


# What a link carries, as a share of the message, where `ranks` talk
BUS_FACTORS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": _all_but_own,
    "all_gather_into_tensor": _all_but_own,
    "reduce_scatter": _all_but_own,
    "reduce_scatter_tensor": _all_but_own,
    "all_to_all": _all_but_own,
    "all_to_all_single": _all_but_own,
    "gather": _all_but_own,
    "scatter": _all_but_own,
    "broadcast": _whole,
    "reduce": _whole,
    "send": _whole,
    "recv": _whole,
    "barrier": _whole,
}


@dataclass(frozen=True)
class Collective:
    name: str  # of the function of torch.distributed
    message: int | None  # position of the argument whose bytes count; None: no message
    per_rank: bool = False  # that argument is one rank's part of the message
    functional: bool = False  # gives tensors that are waited for, instead of a Work

    def num_bytes(self, arguments: Sequence[Any], ranks: int) -> int:
        if self.message is None:
            return 0
        own = sum(t.numel() * t.element_size() for t in tree_leaves(arguments[self.message]) if isinstance(t, Tensor))
        return own * ranks if self.per_rank else own


# Operator: name, argument of the message, whether that is one rank's part
_C10D: dict[str, tuple[str, int | None, bool]] = {
    "allreduce_": ("all_reduce", 0, False),
    "allreduce_coalesced_": ("all_reduce", 0, False),
    "allgather_": ("all_gather", 0, False),
    "allgather_coalesced_": ("all_gather", 0, False),
    "_allgather_base_": ("all_gather_into_tensor", 0, False),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor", 0, False),
    "reduce_scatter_": ("reduce_scatter", 1, False),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 1, False),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor", 1, False),
    "alltoall_": ("all_to_all", 1, False),
    "alltoall_base_": ("all_to_all_single", 1, False),
    "broadcast_": ("broadcast", 0, False),
    "reduce_": ("reduce", 0, False),
    "gather_": ("gather", 1, True),  # only the root has the whole
    "scatter_": ("scatter", 0, True),
    "send": ("send", 0, False),
    "recv_": ("recv", 0, False),
    "recv_any_source_": ("recv", 0, False),
    "barrier": ("barrier", None, False),
}
_FUNCTIONAL: dict[str, tuple[str, int | None, bool]] = {
    "all_reduce": ("all_reduce", 0, False),
    "all_reduce_": ("all_reduce", 0, False),
    "all_reduce_coalesced": ("all_reduce", 0, False),
    "all_reduce_coalesced_": ("all_reduce", 0, False),
    "all_gather_into_tensor": ("all_gather_into_tensor", 0, True),
    "all_gather_into_tensor_out": ("all_gather_into_tensor", 0, True),
    "all_gather_into_tensor_coalesced": ("all_gather_into_tensor", 0, True),
    "reduce_scatter_tensor": ("reduce_scatter_tensor", 0, False),
    "reduce_scatter_tensor_out": ("reduce_scatter_tensor", 0, False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 0, False),
    "all_to_all_single": ("all_to_all_single", 0, False),
    "broadcast": ("broadcast", 0, False),
    "broadcast_": ("broadcast", 0, False),
}


@functools.cache
def collectives() -> dict[Any, Collective]:
    """By operator (OpOverloadPacket)."""
    found = {getattr(torch.ops.c10d, op): Collective(*entry) for op, entry in _C10D.items()}
    functional = torch.ops._c10d_functional
    found |= {getattr(functional, op): Collective(*entry, functional=True) for op, entry in _FUNCTIONAL.items()}
    found[torch.ops._dtensor.shard_dim_alltoall] = Collective("all_to_all_single", 0, functional=True)
    return found


def group_of(operator: Any, arguments: Sequence[Any]) -> dist.ProcessGroup:
    """The group that a collective's arguments name."""
    names = [argument.name for argument in operator._schema.arguments]
    if "process_group" in names:
        return dist.ProcessGroup.unbox(arguments[names.index("process_group")])
    named = arguments[names.index("group_name")]
    if isinstance(named, str):
        return dist.distributed_c10d._resolve_process_group(cast(Any, named))
    return dist.ProcessGroup.unbox(named)


def work_of(result: Any) -> dist.Work | None:
    """The Work among what a collective of c10d gives."""
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, torch.ScriptObject):
            return dist.Work.unbox(part)
    return None
