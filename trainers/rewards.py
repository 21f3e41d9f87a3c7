"""Reward functions by name: (completion text, prompt) -> float."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from decimal import Decimal

from trainers.types import Prompt

Reward = Callable[[str, Prompt], float]

# A sign only counts where no digit stands before it, so that "3-4" ends in 4 and not in -4.
_SIGN = r"(?:(?<![\d.])[-\u2212])?"  # a hyphen or the minus sign
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"  # 1,234.5  12  .5
_NUMBER = re.compile(_SIGN + _DIGITS + r"(?:[eE][-+]?\d{1,3}(?!\d))?")


def exact_match(completion: str, prompt: Prompt) -> float:
    """1 where the completion is the answer, up to white space at both ends."""
    return float(completion.strip() == _answer(prompt, "exact_match").strip())


def numeric_match(completion: str, prompt: Prompt) -> float:
    """1 where the last number of the completion equals the last number of the answer (commas between thousands are read)."""
    expected = last_number(_answer(prompt, "numeric_match"))
    if expected is None:
        raise ValueError(f"reward numeric_match: row {prompt.index} has the answer {prompt.answer!r}, which holds no number")
    return float(last_number(completion) == expected)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in `text`, exactly."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


REWARDS: dict[str, Reward] = {"exact_match": exact_match, "numeric_match": numeric_match}


def resolve(name: str) -> Reward:
    """The reward called `name`: a key of REWARDS, `regex:PATTERN` (1 where the pattern is found), or `module:function`.

    Raises ValueError for an unknown name (with the nearest), a pattern that does not compile, a function that is not there.
    """
    if name in REWARDS:
        return REWARDS[name]
    kind, colon, rest = name.partition(":")
    if kind == "regex" and colon:
        try:
            pattern = re.compile(rest)
        except re.error as error:
            raise ValueError(f"reward regex:{rest}: not a regular expression: {error}") from error
        return lambda completion, prompt: float(pattern.search(completion) is not None)
    if colon:
        return _imported(name, kind, rest)
    near = difflib.get_close_matches(name, REWARDS, 1, cutoff=0.3)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"reward {name!r} is unknown; {hint}allowed: {', '.join(REWARDS)}, regex:PATTERN, module:function")


def _imported(name: str, module_name: str, function: str) -> Reward:
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module: whatever it raises
        raise ValueError(
            f"reward {name}: cannot import {module_name!r}: {type(error).__name__}: {error}; its folder must be on PYTHONPATH"
        ) from error
    reward = getattr(module, function, None)
    if not callable(reward):
        raise ValueError(f"reward {name}: {module_name} has no function {function!r}")
    return reward


def _answer(prompt: Prompt, reward: str) -> str:
    if prompt.answer is None:
        raise ValueError(f"reward {reward}: row {prompt.index} of the data has no answer; fill data.answer_column")
    return prompt.answer
