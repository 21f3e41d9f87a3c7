"""What backends share around a generation: the door, completions, and errors that every rank hears of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid.engine import HybridEngine
from hybrid.mesh import first_error
from inference_v2.admission import Door
from inference_v2.types import Completion, FinishReason, Request, SamplingParams


class BackendError(RuntimeError):
    """A rollout backend failed; raised on every rank, with the first failing rank's reason."""


def raise_on_all(error: Exception | None) -> None:
    """Collective: BackendError on every rank where any has an error."""
    if (line := first_error(error)) is not None:
        raise BackendError(line) from error


class Answers:
    """Completions of one call, under one weight version. `request_id` is the prompt's place, as in the engine's own."""

    def __init__(self, engine: HybridEngine, sampling: SamplingParams, *, max_model_len: int, vocab_size: int) -> None:
        """vocab_size: rows of the embedding that a prompt's ids may name."""
        model = engine.model
        self.sampling, self.version, self._tokenizer = sampling, engine.weight_version, engine.tokenizer
        self._door = Door(
            vocab_size=vocab_size,
            num_drawable=min(model.vocab_limit or model.num_rows, model.num_rows),
            eos_token_ids=model.eos_token_ids,
            max_model_len=max_model_len,
            has_tokenizer=engine.tokenizer is not None,
        )

    @property
    def stop_ids(self) -> frozenset[int]:
        """What ends a response: every end-of-sequence id of the model unless they are ignored, and the sampling's own."""
        return self._door.stop_ids(self.sampling)

    def without_generating(self, place: int, prompt: Sequence[int]) -> list[Completion] | None:
        """The samples of a prompt that is refused (with the error) or to which nothing is to be added; None for others."""
        prompt = tuple(prompt)
        error = self._door.refusal(Request(prompt, self.sampling))
        if error is None and self.sampling.max_new_tokens > 0:
            return None
        return [
            self._completion(place, i, prompt, (), (), (), "length" if error is None else "abort", error)
            for i in range(self.sampling.num_samples)
        ]

    def completion(
        self,
        place: int,
        sample_index: int,
        prompt: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        raw: Sequence[float],
    ) -> Completion:
        """A sample from what was drawn: it ends with its first stop id, which is part of it, and what a batch may have drawn
        after that is dropped. One whose logits were not finite ends there, with the error."""
        stop = self.stop_ids
        for position, values in enumerate(zip(ids, logprobs, raw, strict=True)):
            token, *scores = values
            if not all(map(math.isfinite, scores)):
                error = f"the logits of position {len(prompt) + position} are not finite (weight version {self.version})"
                cut = (ids[:position], logprobs[:position], raw[:position])
                return self._completion(place, sample_index, prompt, *cut, "abort", error)
            if token in stop:
                end = position + 1
                return self._completion(place, sample_index, prompt, ids[:end], logprobs[:end], raw[:end], "stop", None)
        return self._completion(place, sample_index, prompt, ids, logprobs, raw, "length", None)

    def _completion(
        self,
        place: int,
        sample_index: int,
        prompt: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        raw: Sequence[float],
        reason: FinishReason,
        error: str | None,
    ) -> Completion:
        text = None if self._tokenizer is None else self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return Completion(
            place, sample_index, tuple(prompt), tuple(ids), tuple(logprobs), tuple(raw), reason, self.version, text, error
        )
