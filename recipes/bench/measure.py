"""Repeated runs after a warm-up, and memory, as numbers for a report."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

STATUS = Path("/proc/self/status")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """median, min, max and the runs in their order."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": list(values)}


def seconds_of(work: Callable[[], object], repeats: int, warmups: int = 1) -> list[float]:
    """Wall-clock seconds of each of `repeats` calls, after `warmups` that do not count."""
    for _ in range(warmups):
        work()
    return [_seconds(work) for _ in range(repeats)]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def slope(values: Sequence[float]) -> float:
    """Least-squares change per step; 0 for fewer than two values."""
    return statistics.linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """The most that was in RAM at once, since the start or the last `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> bool:
    """Let the peak start again from what is resident now. False where the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


@contextmanager
def threads(count: int | None) -> Iterator[int]:
    """Torch's (and the kernels') threads inside the `with`; None: as they are. Yields their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield count or before
    finally:
        torch.set_num_threads(before)
