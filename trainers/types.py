"""What flows through a trainer: prompts in, rollouts out. Ids are made once and never decoded and encoded again. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LARGEST_REWARD = 1e30  # beyond it sums and squares of deviations are not finite in fp32
Source = Literal["policy", "environment", "given"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset, tokenised. `index` is its place in the dataset and enters the request key."""

    index: int
    ids: tuple[int, ...]
    text: str  # as shown in the completions table
    answer: str | None = None
    rejected_ids: tuple[int, ...] | None = None  # a given response that is worse than `response_ids`
    margin: float | None = None  # by how much
    privileged_ids: tuple[int, ...] | None = None  # the teacher's prompt, built by the privileged template
    response: str | None = None  # a given response, as shown in the completions table
    response_ids: tuple[int, ...] | None = None  # the same, its end-of-sequence token included


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start:stop of `Rollout.ids` and who made them; only "policy" and "given" tokens can be trained on."""

    start: int
    stop: int
    source: Source


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt with one response. `ids` = prompt ids + response ids; the spans cover exactly the response."""

    prompt: Prompt
    sample_index: int
    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    logprobs: tuple[float, ...]  # per response token, as sampled; 0.0 for tokens the policy did not draw
    logprobs_raw: tuple[float, ...]
    finish_reason: str
    weight_version: int
    text: str
    reward: float | None = None  # the weighted sum of its parts
    reward_parts: Mapping[str, float] | None = None  # by component
    group: int = 0  # the key of the drawn prompt: samples of one prompt in one pass have one

    @property
    def num_prompt(self) -> int:
        return len(self.prompt.ids)

    @property
    def num_response(self) -> int:
        """Tokens of the response, those of an environment left out."""
        return sum(span.stop - span.start for span in self.spans if span.source != "environment")

    @property
    def response_ids(self) -> tuple[int, ...]:
        return self.ids[self.num_prompt :]
