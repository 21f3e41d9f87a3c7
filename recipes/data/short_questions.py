"""Short questions of five kinds, and a privileged context that shows the form in which they are to be answered.

The context is three worked turns, question / "Answer: X". The student sees the bare question; what it is to learn is the form.
Train and held-out questions differ, and so do the names in them: no country, thing or sum stands in both.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

NUM_TRAIN = 2400
NUM_HELD_OUT = 160

COUNTRIES = (
    "Italy Spain Japan Egypt Kenya Peru Chile Norway Poland Turkey India Cuba Ghana Iran Greece Mexico Portugal Ireland "
    "Sweden Finland Austria Hungary Morocco Brazil Canada China Vietnam Thailand Nepal Iraq Jordan Ethiopia Nigeria Senegal "
    "Uganda Angola Argentina Colombia Ecuador Bolivia Uruguay Denmark Iceland Belgium Croatia Romania Bulgaria Ukraine "
    "Estonia Latvia Australia"
).split()
THINGS = (
    "cat tree river car bird stone house cloud fish lamp boat shoe horse spoon table bridge apple train book window bottle "
    "mountain pencil lion ship chair garden bicycle flower kettle carrot hammer button whale basket tower rabbit ladder "
    "feather wagon"
).split()
KINDS: Sequence[Callable[[random.Random, Sequence[str], Sequence[str], int], str]] = (
    lambda r, countries, things, odd: f"What is the capital of {r.choice(countries)}?",
    lambda r, countries, things, odd: f"What is {r.randint(2, 60)} + {2 * r.randint(1, 30) + odd}?",
    lambda r, countries, things, odd: f"What color is a {r.choice(things)}?",
    lambda r, countries, things, odd: f"On which continent is {r.choice(countries)}?",
    lambda r, countries, things, odd: "Is a {} bigger than a {}?".format(*r.sample(things, 2)),
)
WORKED = (
    ("What is the capital of France?", "Paris"),
    ("What is 3 + 4?", "7"),
    ("Is a mouse bigger than a cow?", "no"),
)


def train() -> Iterator[dict[str, Any]]:
    """Questions over four fifths of the names; some come up more than once, as in any stream of short questions."""
    rng = random.Random(1)
    for _ in range(NUM_TRAIN):
        yield _row(rng.choice(KINDS)(rng, _part(COUNTRIES, False), _part(THINGS, False), 0))


def held_out() -> Iterator[dict[str, Any]]:
    """Questions over the other names, each once."""
    rng = random.Random(2)
    seen: set[str] = set()
    while len(seen) < NUM_HELD_OUT:
        question = rng.choice(KINDS)(rng, _part(COUNTRIES, True), _part(THINGS, True), 1)
        if question not in seen:
            seen.add(question)
            yield _row(question)


def _part(names: Sequence[str], held_out: bool) -> list[str]:
    return [name for index, name in enumerate(names) if (index % 5 == 4) == held_out]


def _row(question: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], "privileged": worked_turns(WORKED)}


def worked_turns(examples: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Question and "Answer: X" as chat turns."""
    turns: list[dict[str, str]] = []
    for question, answer in examples:
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": f"Answer: {answer}"}]
    return turns
