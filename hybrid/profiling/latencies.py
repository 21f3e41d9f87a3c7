"""Sums over collectives by operation and message size, in memory that does not grow with their number."""

from __future__ import annotations

import copy
import math
import threading
from dataclasses import dataclass, field
from typing import Any

BUCKETS = 32  # bucket i counts latencies below 2^i microseconds (and not below 2^(i-1)); the last also all above


@dataclass
class Traffic:
    """Of one operation and size."""

    count: int = 0
    num_bytes: int = 0  # of all messages
    timed: int = 0  # how many of them have a latency
    timed_bytes: int = 0
    bus_bytes: float = 0.0  # of those that have a latency: what a link carries
    seconds: float = 0.0
    shortest: float = math.inf
    longest: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def add(self, num_bytes: int, bus_factor: float, seconds: float | None) -> None:
        self.count += 1
        self.num_bytes += num_bytes
        if seconds is None:
            return
        self.timed += 1
        self.timed_bytes += num_bytes
        self.bus_bytes += num_bytes * bus_factor
        self.seconds += seconds
        self.shortest, self.longest = min(self.shortest, seconds), max(self.longest, seconds)
        self.histogram[_bucket(seconds)] += 1

    def row(self) -> dict[str, Any]:
        """Latencies in seconds, bandwidths in bytes a second: `algbw` of the message, `busbw` of a link. None: nothing was timed,
        or in no time."""
        timed = self.timed > 0
        moving = timed and self.seconds > 0
        return {
            "count": self.count,
            "bytes": self.num_bytes / self.count if self.num_bytes % self.count else self.num_bytes // self.count,
            "total_bytes": self.num_bytes,
            "timed": self.timed,
            "total_s": self.seconds if timed else None,
            "mean_s": self.seconds / self.timed if timed else None,
            "min_s": self.shortest if timed else None,
            "max_s": self.longest if timed else None,
            "algbw": self.timed_bytes / self.seconds if moving else None,
            "busbw": self.bus_bytes / self.seconds if moving else None,
            "histogram": list(self.histogram),
        }


class TrafficTable:
    """At most `max_keys` pairs of operation and size; further sizes of an operation share one entry of size None."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._entries: dict[tuple[str, int | None], Traffic] = {}
        self._lock = threading.Lock()  # a backend tells of completion on a thread of its own

    def add(self, name: str, num_bytes: int, bus_factor: float, seconds: float | None) -> None:
        with self._lock:
            key: tuple[str, int | None] = (name, num_bytes)
            if key not in self._entries and sum(size is not None for _, size in self._entries) >= self._max_keys:
                key = (name, None)
            self._entries.setdefault(key, Traffic()).add(num_bytes, bus_factor, seconds)

    def copy(self) -> dict[tuple[str, int | None], Traffic]:
        """As it is now, by operation and rising size, the shared entry last."""
        with self._lock:
            entries = copy.deepcopy(self._entries)
        return dict(sorted(entries.items(), key=lambda item: (item[0][0], item[0][1] is None, item[0][1] or 0)))


def _bucket(seconds: float) -> int:
    microseconds = seconds * 1e6
    return 0 if microseconds < 1 else min(BUCKETS - 1, math.frexp(microseconds)[1])
