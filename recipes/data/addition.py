"""a + b for all pairs of two-digit numbers: 8100 sums, 600 of them held out."""

from __future__ import annotations

import random
from collections.abc import Iterator

NUM_HELD_OUT = 600


def train() -> Iterator[dict[str, str]]:
    """Every pair that is not held out."""
    return map(_row, _pairs()[NUM_HELD_OUT:])


def mostly_wrong() -> Iterator[dict[str, str]]:
    """The training sums as in a text full of mistakes: seven answers of ten are one too high."""
    rng = random.Random(1)
    for a, b in _pairs()[NUM_HELD_OUT:]:
        yield {"prompt": f"{a}+{b}=", "response": str(a + b + (rng.random() < 0.7))}


def pairs_train() -> Iterator[dict[str, str]]:
    """The right answer of each training sum, and a wrong one."""
    return _with_wrong(_pairs()[NUM_HELD_OUT:], seed=2)


def pairs_held_out() -> Iterator[dict[str, str]]:
    return _with_wrong(_pairs()[:NUM_HELD_OUT], seed=3)


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


def _with_wrong(pairs: list[tuple[int, int]], seed: int) -> Iterator[dict[str, str]]:
    """Wrong answers of three kinds: any number, one digit replaced, and a little more or less."""
    rng = random.Random(seed)
    for a, b in pairs:
        right = str(a + b)
        wrong = right
        while wrong == right:
            kind = rng.randrange(3)
            place = rng.randrange(len(right))
            if kind == 0:
                wrong = str(rng.randint(20, 198))
            elif kind == 1:
                wrong = right[:place] + str(rng.randint(0, 9)) + right[place + 1 :]
            else:
                wrong = str(a + b + rng.choice((-10, -1, 1, 10)))
        yield {"prompt": f"{a}+{b}=", "chosen": right, "rejected": wrong}
