"""When a sample ends: stop ids, length, and stop strings found in text that is decoded as it grows. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

CUT_CHARACTER = "\ufffd"  # what a decoder makes of bytes that are no whole character


class Tokenizer(Protocol):
    """What the engine needs of a Hugging Face tokenizer."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


class StopText:
    """Looks for stop strings in a growing output. Only the newest tokens are decoded each time, with a few before them, since a
    tokenizer's text for a token depends on its left neighbours; a character that is not whole yet waits for its rest."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._text = ""
        self._context = 0  # output[context : done] is decoded again as left context
        self._done = 0  # output[:done] is in the text
        self._searched = 0  # characters that hold no stop string, some of them perhaps not in the text yet

    def push(self, output: Sequence[int]) -> str | None:
        """The text before the first stop string that the newest tokens complete, or None."""
        known = self._decode(output[self._context : self._done])
        grown = self._decode(output[self._context :])
        searched, text = self._searched, self._text + grown[len(known) :].rstrip(CUT_CHARACTER)
        self._searched = len(text)
        if len(grown) > len(known) and not grown.endswith(CUT_CHARACTER):
            self._text = text
            self._context, self._done = self._done, len(output)
        found = [at for stop in self._stop if (at := text.find(stop, max(0, searched - len(stop) + 1))) >= 0]
        return text[: min(found)] if found else None

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
