"""How long the phases of a step take, and what was done in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Phase:
    """A timed part of a step; its counts may be added to inside the `with`."""

    tokens: int = 0
    seconds: float = 0.0
    samples: int = 0
    flops: float = 0.0

    def add(self, other: Phase) -> None:
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.samples += other.samples
        self.flops += other.flops


class Phases:
    """Sums by name, in the order of first use."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """clock: seconds, from any moment."""
        self.totals: dict[str, Phase] = {}
        self._clock = clock

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        """Times a part of the step, also one that raises; several with one name add up."""
        phase = Phase(tokens)
        start = self._clock()
        try:
            yield phase
        finally:
            phase.seconds = self._clock() - start
            self.totals.setdefault(name, Phase()).add(phase)

    def clear(self) -> None:
        self.totals.clear()
