"""Greedy completions on held-out prompts, scored by a reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybrid.engine import HybridEngine
from hybrid.mesh import raise_together
from trainers.config import EvalConfig
from trainers.data.order import DrawnPrompt
from trainers.environments.conversations import Conversations, last_turn
from trainers.reward_scoring import RewardScorer
from trainers.rewards import Rewards, from_name
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
    failures: int = 0  # rewards that raised, took too long or gave no finite number, and count as 0

    def metrics(self) -> dict[str, float]:
        means = {"eval_reward": self.reward, "eval_length": self.length, "eval_truncated": self.truncated}
        return means | ({"eval_reward_failures": float(self.failures)} if self.failures else {})


class Evaluator:
    """Raises ValueError at construction for an unknown reward, or a prompt without the answer that a built-in reward needs."""

    def __init__(
        self,
        config: EvalConfig,
        prompts: Sequence[Prompt],
        conversations: Conversations | None = None,
        scorer: RewardScorer | None = None,
    ) -> None:
        """`conversations`: prompts are completed in several turns, and the policy's last one is scored. `scorer`: of
        config.reward=rewards; it stays its owner's."""
        self.config, self.prompts, self.conversations, self.scorer = config, prompts, conversations, scorer
        if conversations is not None:
            conversations.check(prompts)
        self.rewards = Rewards([] if scorer is not None else [from_name(config.reward)], raise_together)
        (scorer or self.rewards).check(prompts)

    def run(self, engine: HybridEngine) -> Evaluation:
        """Collective: each rank completes and scores its share."""
        drawn = [DrawnPrompt(prompt, epoch=0) for prompt in self.prompts]
        if self.conversations is None:
            completed = answers = sample_rollouts(engine, drawn, self.config.sampling)
        else:
            completed = self.conversations.sample(drawn, self.config.sampling)
            answers = [replace(r, text=last_turn(r, engine.tokenizer)) for r in completed]
        scores = self.rewards.score(answers) if self.scorer is None else self.scorer.scores(answers)
        rollouts = [replace(r, reward=s.total) for r, s in zip(completed, scores, strict=True)]
        *totals, failures = engine.mesh.sum(
            [
                sum(s.total for s in scores),
                sum(r.num_response for r in rollouts),
                sum(r.finish_reason == "length" for r in rollouts),
                sum(bool(s.failed) for s in scores),
            ]
        )
        reward, length, truncated = (total / len(self.prompts) for total in totals)
        return Evaluation(
            reward, length, truncated, len(self.prompts), tuple(rollouts[: self.config.samples]), failures=int(failures)
        )

    def close(self) -> None:
        self.rewards.close()


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
            "length": r.num_response,
            "finish_reason": r.finish_reason,
            "source": r.spans[0].source if r.spans else None,
        }
        for r in rollouts
    ]
