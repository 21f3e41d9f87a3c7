"""From a RewardConfig to what scores rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trainers.rewards.builtin import REWARDS, TextReward, format_match, length_penalty, regex
from trainers.rewards.config import RewardConfig, kind_of
from trainers.rewards.functions import Function, load
from trainers.rewards.math_verify import MathVerify
from trainers.rewards.remote import Remote
from trainers.types import Prompt, Rollout

TIMEOUT_S = 10.0  # where a RewardConfig names none, as for the next two
RETRIES = 2
BATCH_SIZE = 64


class Component(Protocol):
    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError naming a row that it cannot score, whatever the response."""

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        """Per rollout what came back for it, a number or not; where it failed, the exception."""

    def close(self) -> None: ...


def open_component(config: RewardConfig) -> Component:
    """Raises ValueError for a function that cannot be imported, and for a package that is not installed."""
    timeout_s = TIMEOUT_S if config.timeout_s is None else config.timeout_s
    batch_timeout_s = config.seconds_at_most
    match config.kind:
        case "length":
            assert config.max_tokens is not None, "RewardConfig has checked it"
            assert config.buffer is not None, "as above"
            return Length(config.max_tokens, config.buffer)
        case "function":
            return Function(resolve(config.name), timeout_s, batch_timeout_s, workers=config.workers or 1)
        case "math_verify":
            return MathVerify(timeout_s, batch_timeout_s)
        case "http":
            return Remote(
                config.name,
                timeout_s=timeout_s,
                batch_timeout_s=batch_timeout_s,
                retries=RETRIES if config.retries is None else config.retries,
                batch_size=BATCH_SIZE if config.batch_size is None else config.batch_size,
            )
        case _:
            return Text(resolve(config.name))


def resolve(name: str) -> TextReward:
    """The function of (completion text, prompt) that a name stands for: a key of REWARDS, regex:PATTERN, format:PATTERN or
    module:function. Called as it is, it has no deadline, and may raise.

    Raises ValueError for other names, and for a function that cannot be imported."""
    pattern = name.partition(":")[2]
    match kind_of(name):
        case "regex":
            return regex(pattern)
        case "format":
            return format_match(pattern)
        case "function":
            return load(name)
        case "text":
            return REWARDS[name]
    raise ValueError(
        f"reward {name} is no function of the text; allowed here: {', '.join(REWARDS)}, regex:PATTERN, format:PATTERN, "
        "module:function"
    )


class Text:
    """A function of ours of the text, quick enough to need no deadline."""

    def __init__(self, reward: TextReward) -> None:
        self._reward = reward

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            self._reward("", prompt)

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        return [self._value(rollout) for rollout in rollouts]

    def _value(self, rollout: Rollout) -> Any:
        try:
            return self._reward(rollout.text, rollout.prompt)
        except ValueError as error:  # a row that `check` has not seen
            return error

    def close(self) -> None:
        pass


class Length:
    """`length_penalty` of a response's tokens."""

    def __init__(self, max_tokens: int, buffer: int) -> None:
        self._max_tokens, self._buffer = max_tokens, buffer

    def check(self, prompts: Sequence[Prompt]) -> None:
        pass

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        return [length_penalty(r.num_response, self._max_tokens, self._buffer) for r in rollouts]

    def close(self) -> None:
        pass
