"""The process group and the device mesh of one run: rank, world size, device, and how shards are laid out over ranks.

One process needs no launcher: it gets a group of its own and takes the same code path as many ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hybrid.config import HybridConfig


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. `device_mesh` has the dimensions ("replicate", "shard"): (1, W) for ZeRO 1 to 3, (W, 1) for 0."""

    rank: int
    world_size: int
    local_world_size: int  # ranks that share this machine's memory
    device: torch.device
    device_mesh: DeviceMesh

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that together hold one copy of the weights."""
        return self.device_mesh.get_group("shard")

    @property
    def shard_rank(self) -> int:
        return self.device_mesh.get_local_rank("shard")

    def sum(self, values: Sequence[float]) -> list[float]:
        """One all-reduce over all ranks, in float64 on the host."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def min(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MIN)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        reduced = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(reduced, op=op)
        return reduced.tolist()

    def table(self, row: Sequence[float]) -> list[list[float]]:
        """Every rank's row, from one all-reduce. The rows have one length on all ranks."""
        flat = [0.0] * (self.world_size * len(row))
        flat[self.rank * len(row) : (self.rank + 1) * len(row)] = row
        flat = self.sum(flat)
        return [flat[r * len(row) : (r + 1) * len(row)] for r in range(self.world_size)]


def open_mesh(config: HybridConfig) -> Mesh:
    """Join the group that torchrun (or `accelerate launch`) describes in the environment, or make one of a single process.

    A process group that exists already is used as it is. Raises ValueError if config.device asks for CUDA where there is none.
    """
    device = choose_device(config.device)
    if not dist.is_initialized():
        # On CUDA both backends: small agreements between ranks go over gloo and do not wait for the device.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=config.timeout_s)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    world_size = dist.get_world_size()
    shape = (world_size, 1) if config.zero_stage == 0 else (1, world_size)
    return Mesh(
        rank=dist.get_rank(),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device=device,
        device_mesh=init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")),
    )


def choose_device(name: str) -> torch.device:
    """ "auto", "cpu" or "cuda" to the device of this rank (made current)."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device=cuda, but torch finds no CUDA device; allowed here: auto, cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device
