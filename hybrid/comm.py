"""torch.distributed under DeepSpeed's names: `import hybrid.comm as dist`. Each call is torch's own; what is not listed here and
torch.distributed has (send, all_to_all_single, all_gather_object...) is passed on."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from hybrid.mesh import get_rank, get_world_size

__all__ = [
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "destroy_process_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
    "new_group",
    "reduce_scatter_tensor",
]


_ELSEWHERE = {
    "configure": "the config's section comms_logger",
    "get_world_group": "hybrid.comm.group.WORLD",
    "log_summary": "engine.comms_logger.log_summary()",
}

if not TYPE_CHECKING:  # a type checker that saw it would let every name pass

    def __getattr__(name: str) -> object:
        if name.startswith("_") or not hasattr(dist, name):
            hint = f": use {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        return getattr(dist, name)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = False,
    distributed_port: int | None = None,
    verbose: bool = False,
    timeout: timedelta | None = None,
    init_method: str | None = None,
) -> None:
    """Join the group that the launcher describes; one that exists already is used as it is, and without a launcher the
    process is a group of its own. dist_backend: None: gloo for host memory and, where there is CUDA, nccl for it."""
    if dist.is_initialized():
        return
    if dist_backend == "nccl" and not torch.cuda.is_available():
        raise ValueError("dist_backend=nccl, but torch finds no CUDA device; allowed here: gloo, or None to choose")
    backend = dist_backend or ("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":  # small agreements between ranks are of host memory
        backend = "cpu:gloo,cuda:nccl"
    if init_method is not None or "RANK" in os.environ:
        dist.init_process_group(backend, init_method=init_method, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def is_initialized() -> bool:
    return dist.is_initialized()


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    dist.destroy_process_group(group)


def get_local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", get_rank()))


def get_global_rank(group: ProcessGroup, group_rank: int) -> int:
    return dist.get_global_rank(group, group_rank)


def new_group(ranks: list[int]) -> ProcessGroup:
    group = dist.new_group(ranks)
    assert isinstance(group, ProcessGroup)
    return group


def barrier(group: ProcessGroup | None = None) -> None:
    dist.barrier(group)


def all_reduce(
    tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    return dist.all_reduce(tensor, op, group, async_op)


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    return dist.broadcast(tensor, src, group, async_op)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    return dist.all_gather(tensor_list, tensor, group, async_op)


def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    return dist.all_gather_into_tensor(output_tensor, tensor, group, async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    return dist.reduce_scatter_tensor(output_tensor, tensor, op, group, async_op)
