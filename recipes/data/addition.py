"""a + b for all pairs of two-digit numbers: 8100 sums, 600 of them held out."""

from __future__ import annotations

import random
from collections.abc import Iterator

NUM_HELD_OUT = 600


def train() -> Iterator[dict[str, str]]:
    """Every pair that is not held out."""
    return map(_row, _pairs()[NUM_HELD_OUT:])


def held_out() -> Iterator[dict[str, str]]:
    return map(_row, _pairs()[:NUM_HELD_OUT])


def _pairs() -> list[tuple[int, int]]:
    """All ordered pairs in a fixed random order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return pairs


def _row(pair: tuple[int, int]) -> dict[str, str]:
    a, b = pair
    return {"prompt": f"{a}+{b}=", "response": str(a + b), "answer": str(a + b)}
