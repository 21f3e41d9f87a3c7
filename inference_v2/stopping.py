"""When a sample ends: stop ids, length, and stop strings found in text that is decoded as it grows. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """What the engine needs of a Hugging Face tokenizer."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


class StopText:
    """Looks for stop strings in a growing output. Only the newest tokens are decoded each time, with a few before them, since a
    tokenizer's text for a token depends on its left neighbours; text that ends inside a character waits for the rest."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        self._text = ""
        self._context = 0  # output[context : done] is decoded again as left context
        self._done = 0  # output[:done] is in the text

    def push(self, output: Sequence[int]) -> str | None:
        """The text before the first stop string that the newest tokens complete, or None."""
        known = self._decode(output[self._context : self._done])
        grown = self._decode(output[self._context :])
        if len(grown) <= len(known) or grown.endswith("\ufffd"):
            return None
        start = max(0, len(self._text) - self._longest + 1)
        self._text += grown[len(known) :]
        self._context, self._done = self._done, len(output)
        found = [at for at in (self._text.find(stop, start) for stop in self._stop) if at >= 0]
        return self._text[: min(found)] if found else None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
