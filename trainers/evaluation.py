"""Greedy completions on held-out prompts, scored by a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid.engine import HybridEngine
from inference_v2.types import SamplingParams
from trainers.config import EvalConfig
from trainers.data.order import DrawnPrompt, share
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
        """Collective: each rank completes its share."""
        sampling = SamplingParams(max_new_tokens=self.config.max_new_tokens, temperature=0.0, stop=self.config.stop)
        mine = [DrawnPrompt(prompt, epoch=0) for prompt in share(self.prompts, engine.rank, engine.world_size)]
        rollouts = [replace(r, reward=float(self.reward(r.text, r.prompt))) for r in sample_rollouts(engine, mine, sampling)]
        local = [
            sum(r.reward or 0.0 for r in rollouts),
            sum(len(r.response_ids) for r in rollouts),
            sum(r.finish_reason == "length" for r in rollouts),
        ]
        reward, length, truncated = (value / len(self.prompts) for value in engine.mesh.sum(local))
        return Evaluation(reward, length, truncated, len(self.prompts), tuple(rollouts[: self.config.samples]))


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
