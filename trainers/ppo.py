"""Proximal policy optimisation with a critic (Schulman et al. 2017; for language models Ouyang et al. 2022): the reward of a
token is -beta times its KL to the reference, plus the response's score on its last one; advantages by GAE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from hybrid.engine import HybridEngine
from trainers.advantages import explained_variance, gae, token_rewards, whiten
from trainers.algorithm import Fields, Learner
from trainers.config import PPOConfig
from trainers.critic import CriticModel, SharedCritic
from trainers.losses.policy import value_token_loss
from trainers.on_policy import OnPolicy, was_cut
from trainers.scoring import Scorer
from trainers.types import Rollout


class PPO(OnPolicy):
    config: PPOConfig

    def __init__(self, config: PPOConfig, engine: HybridEngine, *, start: str) -> None:
        self.gae, self.shared_weight = config.advantages, config.critic.shared_weight
        tokens = config.train.micro_batch_tokens
        if self.shared_weight is None:
            self.critic = CriticModel(
                config.critic,
                engine,
                config.engine,
                start=start,
                tokenizer=config.model.tokenizer,
                num_updates=config.max_steps * config.updates.steps,
                micro_batch_tokens=tokens,
            )
            self.others = {"critic": self.critic.engine}
            values: Scorer = self.critic
        else:
            values = SharedCritic(config.critic, engine, micro_batch_tokens=tokens)
        super().__init__(config, engine, start=start)
        self.scorers = [*self.scorers, values]

    def advantages(
        self, rollouts: Sequence[Rollout], scores: Sequence[float], kls: Sequence[Tensor] | None, fields: Fields
    ) -> tuple[Fields, dict[str, float]]:
        values = [v[:-1] for v in fields["values"]]
        advantages, returns = [], []
        for i, (rollout, score, value) in enumerate(zip(rollouts, scores, values, strict=True)):
            rewards = token_rewards(score, len(value), None if kls is None else kls[i], self.beta if kls is not None else 0.0)
            bootstrap = float(fields["values"][i][-1]) if self.gae.bootstrap and was_cut(rollout) else 0.0
            of_tokens, to_learn = gae(rewards, value, gamma=self.gae.gamma, lam=self.gae.lam, bootstrap=bootstrap)
            advantages.append(of_tokens)
            returns.append(to_learn)
        total = self.engine.mesh.sum
        counted = [i for i, rollout in enumerate(rollouts) if self.counts(rollout)]
        record = {"explained_variance": explained_variance([values[i] for i in counted], [returns[i] for i in counted], total)}
        if self.gae.whiten:
            for i, whitened in zip(counted, whiten([advantages[i] for i in counted], total), strict=True):
                advantages[i] = whitened
        return {"advantages": advantages, "returns": returns, "values": values}, record

    def learners(self, step: int) -> Sequence[Learner]:
        policy = super().learners(step)
        if self.shared_weight is not None:
            value_loss = value_token_loss(self.config.critic.clip)
            return [replace(p, value_loss=value_loss, value_weight=self.shared_weight) for p in policy]
        critic = Learner(self.critic.engine, self.critic.token_loss, prefix="critic/", on_device=self.critic.on_device)
        return [*policy, critic] if self.policy_learns(step) else [critic]

    def policy_learns(self, step: int) -> bool:
        return step > self.config.critic.warmup_steps

    def export(self, run_dir: Path) -> None:
        super().export(run_dir)
        if self.shared_weight is not None:
            return
        with self.critic.on_device():
            self.critic.engine.save_pretrained(run_dir / "critic")
