"""Rewards of tokens, and the advantages that are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

PerToken = Float[Tensor, " n"]
GroupEstimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"]

GRPO_EPS = 1e-6
ROUNDING = 1e-5  # in fp32, of scores that went through a model


def token_rewards(score: float, num_tokens: int, kl: PerToken | None = None, beta: float = 0.0) -> PerToken:
    """-beta * kl_t, plus the response's score on its last policy token; empty where it has none. Raises ValueError where `kl` is
    missing though beta is not 0, or has another length."""
    if (kl is None and beta != 0) or (kl is not None and len(kl) != num_tokens):
        raise ValueError(f"token_rewards: beta={beta} and {None if kl is None else len(kl)} KLs for {num_tokens} policy tokens")
    rewards = torch.zeros(num_tokens, dtype=torch.float64) if kl is None else -beta * kl.double()
    rewards[-1:] += score
    return rewards.float()


def rewards_to_go(rewards: PerToken) -> PerToken:
    """sum over s >= t of r_s."""
    to_go, later = [], 0.0
    for reward in reversed(rewards.tolist()):
        later = reward + later
        to_go.append(later)
    return rewards.new_tensor(to_go[::-1])


def gae(rewards: PerToken, values: PerToken, *, gamma: float, lam: float, bootstrap: float) -> tuple[PerToken, PerToken]:
    """(advantages, returns) by generalised advantage estimation (Schulman et al. 2016, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V, which is what the critic learns, so
    advantages are to be whitened afterwards. `values[t]` is read at the token before policy token t. `bootstrap` is the value
    after the last one: 0 after an end; for a response that a length limit cut, the value read at its last token.
    """
    if len(rewards) != len(values):
        raise ValueError(f"gae: {len(rewards)} rewards and {len(values)} values; allowed: one of each per policy token")
    advantages, returns, later, next_value = [], [], 0.0, bootstrap
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist())):
        later = reward + gamma * next_value - value + gamma * lam * later
        next_value = value
        advantages.append(later)
        returns.append(later + value)
    return rewards.new_tensor(advantages[::-1]), rewards.new_tensor(returns[::-1])


def group_advantages(estimator: GroupEstimator, rewards: PerToken, groups: Sequence[int]) -> PerToken:
    """One advantage per response from the rewards r of its group, the responses to one prompt.

    `rewards` and `groups` list all responses of the step on every rank, so that it does not matter how a group is split over
    ranks and micro-batches. Responses whose rewards are all equal (but for rounding) get exactly 0, and so does one alone in its
    group.

    grpo: (r - mean) / (std + 1e-6), with the standard deviation of the group itself, over G (Shao et al. 2024, section 4.1;
    TRL and verl divide by G - 1, which makes it smaller by sqrt((G - 1) / G)). dr_grpo: r - mean (Liu et al. 2025). rloo: r -
    mean of the others (Ahmadian et al. 2024). reinforce_pp_baseline: r - mean, to be whitened over all tokens (Hu et al.
    2025).
    """
    if len(groups) != len(rewards):
        raise ValueError(f"group_advantages: {len(rewards)} rewards and {len(groups)} groups; allowed: one of each per response")
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    advantages = torch.zeros_like(rewards)
    for rows in members.values():
        advantages[rows] = _of_group(estimator, rewards[rows].double()).to(rewards.dtype)
    return advantages


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether their differences are no more than rounding: a reward model gives one response slightly different scores in
    differently composed batches, and a division by the deviation would make signal of it."""
    return max(rewards) - min(rewards) <= ROUNDING * max(1.0, abs(max(rewards)), abs(min(rewards)))


def _of_group(estimator: GroupEstimator, rewards: Tensor) -> Tensor:
    if all_equal(rewards.tolist()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    match estimator:
        case "grpo":
            return centred / (rewards.std(correction=0) + GRPO_EPS)
        case "rloo":
            return centred * len(rewards) / (len(rewards) - 1)
        case "dr_grpo" | "reinforce_pp_baseline":
            return centred
