"""Token ids made readable."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def is_special(tokenizer: Any, token: int) -> bool:
    """Whether a token was added to the vocabulary by hand (<think>, <|im_end|>) and is no piece of text."""
    return token in tokenizer.added_tokens_decoder or token in tokenizer.all_special_ids


def decoded(tokenizer: Any, ids: Iterable[int]) -> str:
    """Each id's text; white space and special tokens show."""
    return " ".join(repr(tokenizer.decode([i])) for i in ids)


def shown(tokenizer: Any, ids: Iterable[int]) -> str:
    """Each id and its text."""
    return ", ".join(f"{i} {tokenizer.decode([i])!r}" for i in ids)
