"""Greedy completions on held-out prompts, scored by a reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid.engine import HybridEngine
from hybrid.mesh import first_error
from trainers.config import EvalConfig
from trainers.data.order import DrawnPrompt
from trainers.rewards import REWARDS, Reward, resolve
from trainers.rollout import sample_rollouts
from trainers.types import Prompt, Rollout


@dataclass(frozen=True)
class Evaluation:
    """Means over all held-out prompts of all ranks, and the first few rollouts of this rank."""

    reward: float
    length: float  # tokens per completion
    truncated: float  # share that ended by length
    num_prompts: int
    samples: tuple[Rollout, ...]

    def metrics(self) -> dict[str, float]:
        return {"eval_reward": self.reward, "eval_length": self.length, "eval_truncated": self.truncated}


class Evaluator:
    """Raises ValueError at construction for an unknown reward, or a prompt without the answer that a built-in reward needs."""

    def __init__(self, config: EvalConfig, prompts: Sequence[Prompt]) -> None:
        self.config, self.prompts = config, prompts
        self.reward: Reward = resolve(config.reward)
        if config.reward in REWARDS:
            for prompt in prompts:
                self.reward("", prompt)

    def run(self, engine: HybridEngine) -> Evaluation:
        """Collective: each rank completes its share. Raises ValueError on every rank, naming reward and row, if the reward raises
        or gives no finite number."""
        completed = sample_rollouts(engine, [DrawnPrompt(prompt, epoch=0) for prompt in self.prompts], self.config.sampling)
        rollouts: list[Rollout] = []
        error: ValueError | None = None
        try:
            rollouts = [replace(r, reward=self._score(r)) for r in completed]
        except ValueError as caught:
            error = caught
        if (line := first_error(error)) is not None:
            raise ValueError(line) from error
        local = [
            sum(r.reward or 0.0 for r in rollouts),
            sum(len(r.response_ids) for r in rollouts),
            sum(r.finish_reason == "length" for r in rollouts),
        ]
        reward, length, truncated = (value / len(self.prompts) for value in engine.mesh.sum(local))
        return Evaluation(reward, length, truncated, len(self.prompts), tuple(rollouts[: self.config.samples]))

    def _score(self, rollout: Rollout) -> float:
        name = f"reward {self.config.reward}: row {rollout.prompt.index}"
        try:
            reward = float(self.reward(rollout.text, rollout.prompt))
        except Exception as error:  # a user's function: whatever it raises
            raise ValueError(f"{name}: it raised {type(error).__name__}: {error}") from error
        if not math.isfinite(reward):
            raise ValueError(f"{name}: it gave {reward}; allowed: a finite number")
        return reward


def table_rows(kind: str, rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Rows of the completions table."""
    return [
        {
            "kind": kind,
            "row": r.prompt.index,
            "sample": r.sample_index,
            "prompt": r.prompt.text,
            "completion": r.text,
            "answer": r.prompt.answer,
            "reward": r.reward,
            "length": len(r.response_ids),
            "finish_reason": r.finish_reason,
            "source": r.spans[0].source if r.spans else None,
        }
        for r in rollouts
    ]
