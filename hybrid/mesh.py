"""The process group and the device mesh of one run: rank, world size, device, how shards are laid out over ranks, and what ranks
tell each other.

One process needs no launcher: it gets a group of its own and takes the same code path as many ranks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

# By default process group: the meshes made over it. The groups below a mesh live as long as that one (torch holds them by name),
# and each costs threads or a communicator, so engines of one layout share them, as torch's own share the default group.
_MESHES: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, int, int], DeviceMesh]] = WeakKeyDictionary()


class MeshSettings(Protocol):
    """What a config says of the mesh."""

    @property
    def device(self) -> str:
        """ "auto", "cpu" or "cuda"."""

    @property
    def timeout_s(self) -> float: ...

    @property
    def model_fields_set(self) -> set[str]:
        """The names that were given, not left to their defaults."""

    def num_shards(self, world_size: int) -> int:
        """Into how many shards a weight is cut."""


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. `device_mesh` has the dimensions ("replicate", "shard"): (1, W) for ZeRO 1 to 3, (W, 1) for 0, and
    (W / n, n) where n ranks hold one copy together (HSDP)."""

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
    def replicate_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same shards."""
        return self.device_mesh.get_group("replicate")

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


def join_group(config: MeshSettings) -> torch.device:
    """Join the group that torchrun (or `accelerate launch`) describes in the environment, or make one of a single process; a
    process group that exists already is used as it is. Returns this rank's device. Raises ValueError if config.device asks for
    CUDA where there is none, and for a group that cannot reduce host memory."""
    device = choose_device(config.device)
    if not dist.is_initialized():
        # On CUDA both backends: small agreements between ranks go over gloo and do not wait for the device.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=config.timeout_s)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    if "cpu:" not in (backends := dist.get_backend_config()):
        raise ValueError(f"the process group's backends are {backends!r}; allowed: one for host memory too: cpu:gloo,cuda:nccl")
    return device


def open_mesh(config: MeshSettings) -> Mesh:
    """Collective: the mesh over the group of `join_group`, which has config's timeout from here on, if config gives one. Raises
    ValueError as that does, and for a number of shards that does not divide the ranks."""
    device = join_group(config)
    world_size = dist.get_world_size()
    shards = config.num_shards(world_size)
    if world_size % shards:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ValueError(f"{shards} ranks are to hold one copy of the weights, of {world_size}; allowed: {fitting}")
    device_mesh = _device_mesh(device.type, world_size // shards, shards)
    if "timeout_s" in config.model_fields_set:
        for group in (dist.group.WORLD, device_mesh.get_group("replicate"), device_mesh.get_group("shard")):
            _set_pg_timeout(timedelta(seconds=config.timeout_s), group)
    return Mesh(
        rank=dist.get_rank(),
        world_size=world_size,
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device=device,
        device_mesh=device_mesh,
    )


def _device_mesh(device_type: str, copies: int, shards: int) -> DeviceMesh:
    """Collective where it is the first of its shape."""
    assert dist.group.WORLD is not None
    made = _MESHES.setdefault(dist.group.WORLD, {})
    if (key := (device_type, copies, shards)) not in made:
        made[key] = init_device_mesh(device_type, (copies, shards), mesh_dim_names=("replicate", "shard"))
    return made[key]


def choose_device(name: str) -> torch.device:
    """ "auto", "cpu" or "cuda" to the device of this rank (made current)."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("engine.device=cuda, but torch finds no CUDA device; allowed here: auto, cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def from_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    """Collective: rank 0's values, contiguous, on every rank; of any dtype and layout, since bytes are sent."""
    whole = tensor.contiguous()
    if get_world_size() > 1 and whole.numel():
        whole = whole.clone() if whole.data_ptr() == tensor.data_ptr() else whole
        dist.broadcast(whole.reshape(-1).view(torch.uint8), 0)
    return whole


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Collective: every rank's text, by rank; as bytes, so that nothing is pickled."""
    ranks = get_world_size(group)
    if ranks == 1:
        return [text]
    own = torch.tensor(list(text.encode()), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(own)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(ranks)]
    if longest:
        dist.all_gather(padded, torch.nn.functional.pad(own, (0, longest - len(own))), group=group)
    return [bytes(row[: int(length)].tolist()).decode() for row, length in zip(padded, lengths, strict=True)]


def first_error(error: BaseException | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Collective: the error of the lowest rank that has one, in one line; None when no rank has."""
    line = "" if error is None else describe(error)
    if line and get_world_size(group) > 1 and not isinstance(error, CheckpointException):  # which names the rank by itself
        line = f"rank {get_rank(group)}: {line}"
    return next((line for line in gather_texts(line, group) if line), None)


def raise_together(error: ValueError | None) -> None:
    """Collective: ValueError on every rank where any has an error, with the line of `first_error`."""
    if (line := first_error(error)) is not None:
        raise ValueError(line) from error


def check_same(what: str, lines: Sequence[str]) -> None:
    """Collective: ValueError on every rank, with the first line that differs, where ranks say different things of `what`."""
    text = "\n".join(lines)
    digests = gather_texts(hashlib.sha256(text.encode()).hexdigest())
    odd = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if odd is None:
        return
    texts = gather_texts(text)
    pairs = zip_longest(texts[0].split("\n"), texts[odd].split("\n"), fillvalue="nothing")
    theirs, given = next(pair for pair in pairs if pair[0] != pair[1])
    raise ValueError(
        f"rank {odd} was given other {what} than rank 0: {given.strip()}, not {theirs.strip()}; give all ranks the same"
    )


def in_text(value: object) -> str:
    """A setting for `check_same`: numbers in full, also those in a tensor; of objects the type."""
    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(in_text, value))}]"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


def check_same_module(module: torch.nn.Module) -> None:
    """Collective: ValueError on every rank where ranks hold modules that do not have the same parameters and buffers, by name,
    shape and dtype, or do not train the same."""
    lines = [
        f"{n}: {list(p.shape)} {p.dtype}{', trained' if p.requires_grad else ', frozen'}" for n, p in module.named_parameters()
    ]
    check_same("parameters", lines)
    check_same("buffers", [f"{n}: {list(b.shape)} {b.dtype}" for n, b in module.named_buffers()])


def describe(error: BaseException) -> str:
    """One line. torch.distributed.checkpoint wraps each rank's error with its traceback: the cause is what a reader wants."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        return f"rank {rank}: {describe(cause)}"
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | ValueError) and text else f"{type(error).__name__}: {text}"
