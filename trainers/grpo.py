"""Group-relative policy optimisation: a response's advantage is its reward beside those of the other samples of its prompt. By
config GRPO (Shao et al. 2024), Dr. GRPO (Liu et al. 2025), RLOO (Ahmadian et al. 2024), REINFORCE++ (Hu et al. 2025), DAPO (Yu et
al. 2025) and GSPO (Zheng et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid.engine import HybridEngine
from trainers.advantages import all_equal, group_advantages, rewards_to_go, token_rewards, whiten
from trainers.algorithm import Fields, Take
from trainers.config import GRPOConfig
from trainers.on_policy import Key, OnPolicy, key_of
from trainers.statistics import num_sampled
from trainers.types import Rollout


class GRPO(OnPolicy):
    def __init__(self, config: GRPOConfig, engine: HybridEngine, *, start: str) -> None:
        super().__init__(config, engine, start=start)
        self.estimator, self.dynamic = config.estimator, config.dynamic_sampling
        self.samples_again = self.dynamic is not None
        compared = None if self.dynamic is None else self.dynamic.component
        if compared is not None and compared not in self.rewards.names:
            raise ValueError(f"dynamic_sampling.component={compared}; allowed: {', '.join(self.rewards.names)}, or null")

    def rollouts(self, step: int, take: Take) -> tuple[list[Rollout], dict[str, float]]:
        if self.dynamic is None:
            return super().rollouts(step, take)
        kept: list[Rollout] = []
        groups: list[int] = []  # that teach something, in the order they were drawn
        records: list[dict[str, float]] = []
        generated = 0
        for _ in range(self.dynamic.max_batches):
            prompts = take(self.prompts_per_step)
            judged, found = self.judged(prompts)
            records.append(found)
            generated += num_sampled(judged)
            rewards = by_group(self.of_all_ranks(judged, [self._compared(r) for r in judged]))
            told_apart = {group for group, values in rewards.items() if not all_equal(values)}
            groups += [p.key for p in prompts if p.key in told_apart]
            kept += [r for r in judged if r.group in told_apart]
            if len(groups) >= self.prompts_per_step:
                break
        chosen = set(groups[: self.prompts_per_step])
        drawn = float(len(records) * self.prompts_per_step)
        record = of_all_draws(records) | {"dynamic_drawn": drawn, "dynamic_kept": len(groups) / drawn}
        record["generated_tokens"] = self.engine.mesh.sum([generated])[0]
        return [r for r in kept if r.group in chosen], record

    def _compared(self, rollout: Rollout) -> float:
        if self.dynamic is None or self.dynamic.component is None:
            return rollout.reward or 0.0
        return (rollout.reward_parts or {})[self.dynamic.component]

    def advantages(
        self, rollouts: Sequence[Rollout], scores: Sequence[float], kls: Sequence[Tensor] | None, fields: Fields
    ) -> tuple[Fields, dict[str, float]]:
        lengths = [len(lp) for lp in fields["old_logprobs"]]
        total = self.engine.mesh.sum
        beta = self.beta if kls is not None else 0.0
        terms = kls if kls is not None else [torch.zeros(n) for n in lengths]
        by_token = self.estimator in ("reinforce_pp", "reinforce_pp_baseline")  # where a KL counts for the tokens up to its own
        if not by_token:
            scores = [s - beta * float(kl.double().sum()) for s, kl in zip(scores, terms, strict=True)]
        if self.estimator != "reinforce_pp":
            of_all = self.of_all_ranks(rollouts, scores)
            rewards = torch.tensor(list(of_all.values()), dtype=torch.float32)
            found = group_advantages(self.estimator, rewards, [group for group, _ in of_all]).tolist()
            of_response = dict(zip(of_all, found, strict=True))
            scores = [of_response[key_of(r)] for r in rollouts]
        if by_token:
            made = [rewards_to_go(token_rewards(s, n, kl, beta)) for s, n, kl in zip(scores, lengths, terms, strict=True)]
            counted = [i for i, rollout in enumerate(rollouts) if self.counts(rollout)]
            for i, whitened in zip(counted, whiten([made[i] for i in counted], total), strict=True):
                made[i] = whitened
        else:
            made = [torch.full((n,), s) for s, n in zip(scores, lengths, strict=True)]
        heard = [bool(a.any()) for a, rollout in zip(made, rollouts, strict=True) if self.counts(rollout)]
        count, zero = total([len(heard), len(heard) - sum(heard)])
        return {"advantages": made}, {"no_signal": zero / max(count, 1.0)}


def of_all_draws(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several draws of equally many responses, as of one: failures add up, the rest are means."""
    merged = {}
    for name in records[0]:
        values = [record[name] for record in records]
        merged[name] = sum(values) if name.endswith("_failures") else sum(values) / len(values)
    squares = sum(r["reward_std"] ** 2 + r["reward_mean"] ** 2 for r in records) / len(records)
    return merged | {"reward_std": math.sqrt(max(squares - merged["reward_mean"] ** 2, 0.0))}


def by_group(values: Mapping[Key, float]) -> dict[int, list[float]]:
    groups: dict[int, list[float]] = {}
    for (group, _), value in values.items():
        groups.setdefault(group, []).append(value)
    return groups
