"""Questions with one number as their answer: sums and differences of numbers up to 30 and 9, in words and signs. No worked
answers: a policy finds by itself what is rewarded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

NUM_TRAIN = 1500
NUM_HELD_OUT = 160
FORMS = (
    "What is {a} {sign} {b}?",
    "Calculate {a} {sign} {b}.",
    "How much is {a} {word} {b}?",
    "{a} {sign} {b} = ?",
)
SIGNS = {"+": "plus", "-": "minus"}


def train() -> Iterator[dict[str, Any]]:
    return _rows(seed=1, count=NUM_TRAIN, held_out=False)


def held_out() -> Iterator[dict[str, Any]]:
    return _rows(seed=2, count=NUM_HELD_OUT, held_out=True)


def _rows(seed: int, count: int, held_out: bool) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        a, b, sign = rng.randint(2, 30), rng.randint(2, 9), rng.choice(list(SIGNS))
        if sign == "-" and b > a:
            a, b = b, a
        if ((a * 97 + b * 89) % 10 == 0) != held_out:
            continue  # a pair of numbers belongs to one split, whatever is asked of it
        question = rng.choice(FORMS).format(a=a, b=b, sign=sign, word=SIGNS[sign])
        if question not in seen:
            seen.add(question)
            yield {"prompt": [{"role": "user", "content": question}], "answer": str(a + b if sign == "+" else a - b)}
