"""The door for requests: what can never be served is refused with the given, the allowed and the remedy. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inference_v2.types import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Door:
    vocab_size: int  # rows of the embedding: ids a prompt may hold
    num_drawable: int  # ids the sampler may draw, the tokenizer's size
    eos_token_ids: frozenset[int]
    max_model_len: int
    has_tokenizer: bool

    def stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        eos = frozenset() if sampling.ignore_eos else self.eos_token_ids
        return eos | frozenset(sampling.stop_token_ids)

    def refusal(self, request: Request) -> str | None:
        """Why this request cannot be served, in one line, or None."""
        prompt, sampling = request.prompt_ids, request.sampling
        if not prompt:
            return "empty prompt; allowed: at least one token, e.g. the beginning-of-sequence id"
        if (bad := _outside(prompt, self.vocab_size)) is not None:
            return f"prompt id {bad}; allowed: 0 to {self.vocab_size - 1}, the model's vocabulary"
        if len(prompt) + sampling.max_new_tokens > self.max_model_len:
            return (
                f"{len(prompt)} prompt tokens + max_new_tokens={sampling.max_new_tokens}; allowed: {self.max_model_len} in all; "
                "shorten either or raise max_model_len"
            )
        if sampling.stop and not self.has_tokenizer:
            return f"stop={sampling.stop!r} without a tokenizer; use stop_token_ids or load a tokenizer"
        for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            if (bad := _outside(getattr(sampling, name) or (), self.vocab_size)) is not None:
                return f"{name} holds {bad}; allowed: 0 to {self.vocab_size - 1}"
        if sampling.max_new_tokens > 0 and not self._leaves_one(sampling):
            return "allowed_token_ids, bad_token_ids and min_new_tokens (which rules out eos and stop ids) leave no token to draw"
        return None

    def _leaves_one(self, sampling: SamplingParams) -> bool:
        banned = set(sampling.bad_token_ids)
        if sampling.min_new_tokens > 0:
            banned |= self.stop_ids(sampling)
        allowed = range(self.num_drawable) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
        return any(token < self.num_drawable and token not in banned for token in allowed)


def _outside(ids: Iterable[int], size: int) -> int | None:
    return next((token for token in ids if not 0 <= token < size), None)
