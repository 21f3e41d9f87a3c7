"""What memory is free, what was used at most, and whether bits are the same."""

from __future__ import annotations

import resource
from pathlib import Path

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on this device; on CPU also within the limit of the process's control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def checksum(tensor: torch.Tensor) -> int:
    """Of the bits: equal for equal tensors, almost surely different otherwise. Each element's bits are weighted by its place."""
    if tensor.numel() == 0:
        return 0
    bits = tensor.contiguous().flatten().view(torch.uint8).to(torch.int64)
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return int((bits * (places * 2654435761 % 4294967291)).sum())
