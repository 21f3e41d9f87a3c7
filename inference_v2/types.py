"""What a caller hands to the engine and what it gets back. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
MAX_PENALTY = 1e30  # times a count it still fits fp32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw one request's tokens. Every default is neutral: nothing is read from a checkpoint's generation_config.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and penalties 1 / 0 / 0 are no-ops. `repetition_penalty` counts
    prompt and output, `presence_penalty` and `frequency_penalty` the output only. `seed` enters the counter-based
    randomness u = f(seed, request key, sample index, position), so tokens do not depend on batching or rank count.

    Numbers of other libraries become Python's, sequences become tuples. Raises ValueError for a value of another type or outside
    its range.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    num_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "min_new_tokens", "num_samples", "seed"):
            self._set(name, _integer(f"sampling: {name}", getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise ValueError(f"sampling: {name}={value!r}; allowed: a number")
            self._set(name, float(value))
        for name in ("allowed_token_ids", "bad_token_ids", "stop_token_ids"):
            if getattr(self, name) is not None:
                self._set(name, _token_ids(f"sampling: {name}", getattr(self, name)))
        if not isinstance(self.stop, (list, tuple)) or not all(isinstance(text, str) for text in self.stop):
            raise ValueError(f"sampling: stop={self.stop!r}; allowed: a tuple of strings")
        self._set("stop", tuple(self.stop))
        self._check_ranges()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # frozen for everybody else

    def _check_ranges(self) -> None:
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 0, ">= 0"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "finite and >= 0 (0 is greedy)"),
            ("top_k", self.top_k >= 0, ">= 0 (0 keeps every token)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "in [0, max_new_tokens]"),
            ("repetition_penalty", 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY, f"> 0, at most {MAX_PENALTY:g}"),
            ("presence_penalty", abs(self.presence_penalty) <= MAX_PENALTY, f"at most {MAX_PENALTY:g} either way"),
            ("frequency_penalty", abs(self.frequency_penalty) <= MAX_PENALTY, f"at most {MAX_PENALTY:g} either way"),
            ("num_samples", self.num_samples >= 1, ">= 1"),
            ("seed", 0 <= self.seed < 2**63, "in [0, 2**63)"),
            ("allowed_token_ids", self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "None or not empty"),
            ("stop", all(self.stop), "non-empty strings"),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise ValueError(f"sampling: {name}={getattr(self, name)!r}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. `key` (64 bit) names the request for the randomness: the caller gives it, e.g. a
    hash of (training step, prompt index); it is never a submission counter. `id` names it for `abort` and completions. Its
    samples are numbered from `first_sample`: sample i draws the same tokens whether it is asked for alone or among others.

    Raises ValueError for token ids, a key or a number that is no integer.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    key: int = 0
    id: int | None = None
    first_sample: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", _token_ids("request: prompt_ids", self.prompt_ids))
        for name in ("key", "first_sample"):
            object.__setattr__(self, name, _integer(f"request: {name}", getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample. `token_ids` holds what was generated, the end-of-sequence token included.

    `logprobs[t]`: under the distribution sampled from (after penalties, temperature, truncation); 0 under greedy.
    `logprobs_raw[t]`: log_softmax(z / temperature) without truncation or penalties (greedy: log_softmax(z)).
    `error`: why the request was refused (then `finish_reason` is "abort"); other requests are not touched by it.
    """

    request_id: int
    sample_index: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprobs_raw: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    text: str | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counted since the engine was made, except where it says now.

    A block is `block_size` tokens in all layers of one cache group; `blocks_copied` counts token blocks, whatever the groups.
    """

    forwards: int
    prompt_tokens_prefilled: int  # prompt tokens computed, those recomputed after a preemption included
    output_tokens_computed: int  # generated tokens fed back
    tokens_hit: int  # found in the prefix cache instead
    tokens_generated: int
    blocks_copied: int  # copy-on-write
    preemptions: int
    max_step_tokens: int  # of the largest step
    blocks_free: int  # now
    blocks_total: int
    running: int  # sequences, now
    waiting: int


def _integer(name: str, value: object) -> int:
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}={value!r}; allowed: an integer") from None


def _token_ids(name: str, ids: Iterable[object]) -> tuple[int, ...]:
    try:
        return tuple(map(index, ids))  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}: {str(ids)[:80]!r}; allowed: a sequence of integer token ids") from None
