"""Word problems that add two two-digit numbers. The privileged context is the worked calculation; the student sees the bare
problem."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NUM_TRAIN = 8000
NUM_HELD_OUT = 200

NAMES = "Ann Ben Carla David Ella Frank Grace Henry Iris Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor".split()
THINGS = "apples marbles stamps books coins shells cards pencils stickers eggs buttons flowers".split()
EVENTS = ("buys {b} more", "finds {b} more", "gets {b} more from a friend")


def train() -> Iterator[dict[str, Any]]:
    return _rows(seed=1, count=NUM_TRAIN, held_out=False)


def held_out() -> Iterator[dict[str, Any]]:
    return _rows(seed=2, count=NUM_HELD_OUT, held_out=True)


def _rows(seed: int, count: int, held_out: bool) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        a, b = rng.randint(11, 99), rng.randint(11, 99)
        sum_is_held_out = (a * 97 + b * 89) % 10 == 0
        if sum_is_held_out != held_out:
            continue  # a sum belongs to one split, whatever the story around it
        row = _row(rng, a, b)
        question = row["prompt"][0]["content"]
        if question not in seen:
            seen.add(question)
            yield row


def _row(rng: random.Random, a: int, b: int) -> dict[str, Any]:
    name, thing, event = rng.choice(NAMES), rng.choice(THINGS), rng.choice(EVENTS).format(b=b)
    question = f"{name} has {a} {thing} and {event}. How many {thing} does {name} have now?"
    tens, ones = b // 10 * 10, b % 10
    worked = f"{a} + {b} = {a} + {tens} + {ones} = {a + tens} + {ones} = {a + b}. The answer is {a + b}."
    return {"prompt": [{"role": "user", "content": question}], "privileged": worked, "answer": str(a + b)}
