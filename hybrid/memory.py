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
    """Of the bits: equal for equal tensors, almost surely different otherwise. Each element is weighted by its place."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for chunk in tensor.contiguous().flatten().view(integer).split(2**20):
        places = torch.arange(1, chunk.numel() + 1, device=chunk.device)
        total = (total * 31 + int((chunk.to(torch.int64) * places).sum())) % 2**61
    return total
