"""Importance weights for rollouts of an engine whose log-probs are not the trainer's (Yao et al. 2025, truncated importance
sampling)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from trainers.advantages.kl import EXPONENT, kl_estimate, log_ratio
from trainers.config.policy import Mismatch

PerToken = Float[Tensor, " n"]


def mismatch_weights(mismatch: Mismatch, old: PerToken, rollout: PerToken) -> tuple[PerToken, dict[str, float]]:
    """The weights of one response's tokens, detached: w = exp(clamp(old - rollout, +-20)), or at sequence level the same of
    the sum over the response, on each of its tokens. truncate: min(w, high). mask: 0 where w is outside [low, high]. off: 1.

    `old` are the trainer's raw log-probs before the step's first update, `rollout` the engine's. Metrics, as sums over the tokens
    and whatever is corrected: `mismatch_weight` (w), `mismatch_corrected` (tokens whose w is above `high`; for mask, outside
    [low, high]), `mismatch_abs` (|old - rollout|) and `mismatch_kl` (k3, of KL(rollout || old)).
    """
    difference = log_ratio(old.detach().double(), rollout.detach().double())
    summed = difference if mismatch.level == "token" else difference.sum().expand_as(difference)
    weights = summed.clamp(-EXPONENT, EXPONENT).exp()
    outside = weights > mismatch.high
    if mismatch.correct == "mask":
        outside |= weights < mismatch.low
    metrics = {
        "mismatch_weight": weights.sum().item(),
        "mismatch_corrected": float(outside.sum()),
        "mismatch_abs": difference.abs().sum().item(),
        "mismatch_kl": kl_estimate("k3", rollout.detach().double(), old.detach().double()).sum().item(),
    }
    match mismatch.correct:
        case "off":
            weights = torch.ones_like(weights)
        case "truncate":
            weights = weights.clamp(max=mismatch.high)
        case "mask":
            weights = weights.masked_fill(outside, 0.0)
    return weights.to(old.dtype), metrics
