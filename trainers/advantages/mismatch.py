"""Importance weights for rollouts of an engine whose log-probs are not the trainer's (Yao et al. 2025, truncated importance
sampling)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from trainers.advantages.kl import EXPONENT, log_ratio
from trainers.config.policy import Mismatch

PerToken = Float[Tensor, " n"]


def mismatch_weights(mismatch: Mismatch, old: PerToken, rollout: PerToken) -> tuple[PerToken, int]:
    """The weights of one response's tokens, detached, and how many were corrected: w = exp(clamp(old - rollout, +-20)), or at
    sequence level the same of the sum over the response, on each of its tokens. truncate: min(w, high). mask: 0 where w is
    outside [low, high].

    `old` are the trainer's raw log-probs before the step's first update, `rollout` the engine's. Raises ValueError for
    correct=off, where there is nothing to weigh.
    """
    if mismatch.correct == "off":
        raise ValueError("mismatch_weights: correct=off; allowed: truncate, mask")
    difference = log_ratio(old.detach().double(), rollout.detach().double())
    summed = difference if mismatch.level == "token" else difference.sum().expand_as(difference)
    weights = summed.clamp(-EXPONENT, EXPONENT).exp()
    outside = weights > mismatch.high
    if mismatch.correct == "mask":
        outside |= weights < mismatch.low
        weights = weights.masked_fill(outside, 0.0)
    else:
        weights = weights.clamp(max=mismatch.high)
    return weights.to(old.dtype), int(outside.sum())
