"""One sample on its way through the engine, as plain host state. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_v2.stopping import StopText
from inference_v2.types import Completion, FinishReason, Request


class Prefix:
    """A whole prefix of full blocks: the last block's `tokens` after `parent` (the weight version at the root).

    Made only by `blocks.PrefixTable`, which interns them: two sequences share a Prefix exactly when all their tokens up to here
    and the weight version are equal.
    """

    __slots__ = ("__weakref__", "parent", "tokens")

    def __init__(self, parent: Prefix | int, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks in one cache group: block i holds tokens i * block_size onwards."""

    ids: list[int] = field(default_factory=list)
    num_dropped: int = 0  # leading blocks given back, behind the window; their ids read 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output of one sample. `computed` of its `total` tokens have their keys and values in the cache.

    With `score_start` set nothing is generated: tokens from there on are scored, and the last one needs no forward.
    """

    request: Request
    request_id: int
    sample_index: int
    order: int  # of arrival: older sequences go first
    tokens: list[int]
    stop_ids: frozenset[int] = frozenset()
    stop_text: StopText | None = None
    score_start: int | None = None
    computed: int = 0
    tables: list[BlockTable] = field(default_factory=list)  # one a cache group; empty while waiting
    chain: list[Prefix] = field(default_factory=list)  # chain[i] names the first i + 1 full blocks
    forks: list[Sequence] = field(default_factory=list)  # further samples, which wait for this one's prefill
    logprobs: list[float] = field(default_factory=list)
    logprobs_raw: list[float] = field(default_factory=list)
    weight_version: int | None = None  # of the first generated token

    def append(self, token_id: int, logprob: float, logprob_raw: float, weight_version: int) -> None:
        self.tokens.append(token_id)
        self.logprobs.append(logprob)
        self.logprobs_raw.append(logprob_raw)
        if self.weight_version is None:
            self.weight_version = weight_version

    def completion(self, reason: FinishReason, weight_version: int, text: str | None, error: str | None) -> Completion:
        """What the caller gets; `weight_version` is reported where no token was drawn."""
        return Completion(
            request_id=self.request_id,
            sample_index=self.sample_index,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self.output),
            logprobs=tuple(self.logprobs),
            logprobs_raw=tuple(self.logprobs_raw),
            finish_reason=reason,
            weight_version=weight_version if self.weight_version is None else self.weight_version,
            text=text,
            error=error,
        )

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def total(self) -> int:
        """Tokens to compute before the next one can be drawn (or everything is scored)."""
        return len(self.tokens) - (self.score_start is not None)

    @property
    def max_cached(self) -> int:
        """Tokens in the cache at most: the last generated one is never fed back."""
        if self.score_start is not None:
            return self.total
        return self.num_prompt + max(self.request.sampling.max_new_tokens, 1) - 1

    @property
    def hit_limit(self) -> int:
        """Tokens a prefix hit may cover: one is left to compute the next token's logits from."""
        return self.total - 1 if self.score_start is None else min(self.total, self.score_start) - 1
