"""What a benchmark ran on: processor, memory bandwidth, load, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from recipes.bench.measure import seconds_of

STREAM_BYTES = 2**30  # far more than any cache
FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "asimd", "bf16", "sve")
PACKAGES = ("hybrid-rlhf", "torch", "transformers")


def machine() -> dict[str, Any]:
    """Processor, cores, instruction sets, load average, and GB/s of reading memory with the threads that are set."""
    return {
        "cpu": _cpuinfo().get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "isa": isa_flags(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_average": os.getloadavg()[0],
        "read_gb_per_s": read_bandwidth() / 1e9,
    }


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def isa_flags() -> list[str]:
    info = _cpuinfo()
    have = set(info.get("flags", info.get("Features", "")).split())
    return [flag for flag in FLAGS if flag in have]


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes per second of reading a large matrix once, the fastest of several passes by two ways of reading (a sum, a product
    with a vector): a bound for a step that must read every weight."""
    width = 4096
    matrix, vector = torch.ones(max(1, STREAM_BYTES // 4 // width), width), torch.ones(width)
    return matrix.nbytes / min(*seconds_of(matrix.sum, repeats), *seconds_of(lambda: matrix @ vector, repeats))


def _cpuinfo() -> dict[str, str]:
    """Of the first core."""
    try:
        block = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in block.splitlines())}
