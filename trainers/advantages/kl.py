"""Estimates of the KL between a policy and its reference from sampled tokens (Schulman 2020, "Approximating KL divergence")."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from trainers.config.policy import KLEstimator

PerToken = Float[Tensor, " n"]

FLOOR = -1e4  # stands for every log-prob below it, -inf (a masked token) too: sums and squares of differences stay finite in fp32
EXPONENT = 20.0  # a ratio of two probabilities is exp of at most +- this: 2e-9 to 5e8


def log_ratio(logprobs: PerToken, other: PerToken) -> PerToken:
    """logprobs - other, finite; log-probs below FLOOR count as FLOOR and have no gradient."""
    return logprobs.clamp(min=FLOOR) - other.clamp(min=FLOOR)


def kl_estimate(kind: KLEstimator, logprobs: PerToken, reference: PerToken) -> PerToken:
    """Per-token estimate of KL(policy || reference) from tokens drawn from the policy, with d = logprobs - reference:

    k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d, whose exponent is clamped to +- 20. k1 and k3 are unbiased, k2 and k3 never negative.
    Finite also where a log-prob is -inf, which counts as -1e4.
    """
    d = log_ratio(logprobs.double(), reference.double())
    match kind:
        case "k1":
            estimate = d
        case "k2":
            estimate = d.square() / 2
        case "k3":
            estimate = torch.expm1((-d).clamp(-EXPONENT, EXPONENT)) + d
    return estimate.to(logprobs.dtype)


@dataclass(frozen=True)
class AdaptiveKL:
    """The coefficient of the KL in the reward, steered towards a KL of `target` per response (Ziegler et al. 2019, section
    2.2)."""

    beta: float
    target: float  # nats, summed over a response's tokens
    horizon: int  # responses

    def updated(self, kl_per_sequence: float, num_sequences: int) -> AdaptiveKL:
        """beta *= 1 + clip((KL - target) / target, +-0.2) * num_sequences / horizon. `kl_per_sequence` is the KL summed over each
        response and averaged over the step's `num_sequences`. Raises ValueError where so many responses could make beta 0 or
        negative, and for a KL that is not finite."""
        if num_sequences >= 5 * self.horizon:
            raise ValueError(
                f"adaptive KL: horizon={self.horizon} for {num_sequences} responses in a step; allowed: more than a fifth of them"
            )
        if not math.isfinite(kl_per_sequence):
            raise ValueError(f"adaptive KL: a KL of {kl_per_sequence}; allowed: finite numbers; look for log-probs that are not")
        error = min(max(kl_per_sequence / self.target - 1, -0.2), 0.2)
        return replace(self, beta=self.beta * (1 + error * num_sequences / self.horizon))
