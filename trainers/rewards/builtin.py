"""Rewards that need no deadline: (completion text, prompt) -> float, and the length of a response in tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal

from trainers.types import Prompt

TextReward = Callable[[str, Prompt], float]

# A sign only counts where no digit stands before it, so that "3-4" ends in 4 and not in -4.
_SIGN = r"(?:(?<![\d.])[-\u2212])?"  # a hyphen or the minus sign
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"  # 1,234.5  12  .5
_NUMBER = re.compile(_SIGN + _DIGITS + r"(?:[eE][-+]?\d{1,3}(?!\d))?")


def exact_match(completion: str, prompt: Prompt) -> float:
    """1 where the completion is the answer, up to white space at both ends."""
    return float(completion.strip() == answer(prompt, "exact_match").strip())


def numeric_match(completion: str, prompt: Prompt) -> float:
    """1 where the last number of the completion equals the last number of the answer (commas between thousands are read)."""
    expected = last_number(answer(prompt, "numeric_match"))
    if expected is None:
        raise ValueError(f"reward numeric_match: row {prompt.index} has the answer {prompt.answer!r}, which holds no number")
    return float(last_number(completion) == expected)


def last_number(text: str) -> Decimal | None:
    """The last decimal number in `text`, exactly."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def regex(pattern: str) -> TextReward:
    """1 where the pattern is found. A pattern with nested repeats can take exponentially long, and is not timed."""
    compiled = re.compile(pattern)
    return lambda completion, prompt: float(compiled.search(completion) is not None)


def format_match(pattern: str) -> TextReward:
    """1 where the pattern matches the completion from its first character to its last; a dot also matches a line break."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda completion, prompt: float(compiled.fullmatch(completion) is not None)


def length_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max_tokens - buffer, from there linearly down to -1 at
    max_tokens, -1 beyond."""
    return max(-1.0, min(0.0, (max_tokens - buffer - num_tokens) / buffer))


def answer(prompt: Prompt, reward: str) -> str:
    """The row's answer. Raises ValueError where it has none."""
    if prompt.answer is None:
        raise ValueError(f"reward {reward}: row {prompt.index} of the data has no answer; fill data.answer_column")
    return prompt.answer


REWARDS: dict[str, TextReward] = {"exact_match": exact_match, "numeric_match": numeric_match}
