"""a * b for pairs of two-digit numbers: 8100 products, 600 held out. A small model cannot work them out, a calculator can.

A given response is a whole conversation with `rollout.environment: {name: calculator}`, `[12*34]408;408`: the policy's call, the
calculator's message, the policy's answer. Only one row in four has it; the others answer at once. A model that has learned from
these can use the calculator and mostly does not, which is for reinforcement learning to change.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

NUM_HELD_OUT = 600


def train() -> Iterator[dict[str, str]]:
    """Every pair that is not held out."""
    return (_row(pair, calls=i % 4 == 0) for i, pair in enumerate(_pairs()[NUM_HELD_OUT:]))


def held_out() -> Iterator[dict[str, str]]:
    return (_row(pair, calls=True) for pair in _pairs()[:NUM_HELD_OUT])


def _pairs() -> list[tuple[int, int]]:
    """All ordered pairs in a fixed random order."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(1).shuffle(pairs)
    return pairs


def _row(pair: tuple[int, int], *, calls: bool) -> dict[str, str]:
    a, b = pair
    answer = str(a * b)
    return {"prompt": f"{a}*{b}=", "response": f"[{a}*{b}]{answer};{answer}" if calls else answer, "answer": answer}
