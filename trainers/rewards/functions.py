"""`module:function`: a user's (completion text, Prompt) -> float, called with a deadline."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from trainers.deadline import Deadline
from trainers.rewards.builtin import TextReward
from trainers.types import Prompt, Rollout


def load(name: str) -> TextReward:
    """Raises ValueError where `module:function` cannot be imported, or does not take (completion, prompt)."""
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module: whatever it raises
        raise ValueError(
            f"reward {name}: cannot import {module_name!r}: {type(error).__name__}: {error}; its folder must be on PYTHONPATH"
        ) from error
    reward = getattr(module, function, None)
    if not callable(reward):
        raise ValueError(f"reward {name}: {module_name} has no function {function!r}")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some functions of C modules have none
        return reward
    try:
        signature.bind("completion", "prompt")
    except TypeError as error:
        raise ValueError(f"reward {name}: it takes {signature} ({error}); allowed: (completion, prompt)") from None
    return reward


class Function:
    """A component that is a user's function. It runs in other threads than the trainer's: `signal` does not work there."""

    def __init__(self, reward: TextReward, timeout_s: float, batch_timeout_s: float, *, workers: int) -> None:
        self._reward, self._batch_timeout_s = reward, batch_timeout_s
        self._deadline = Deadline(timeout_s, workers=workers)

    def check(self, prompts: Sequence[Prompt]) -> None:
        pass

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        self._deadline.begin(self._batch_timeout_s)
        return self._deadline.run([partial(self._reward, r.text, r.prompt) for r in rollouts])

    def close(self) -> None:
        self._deadline.close()
