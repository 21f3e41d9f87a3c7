"""Per-token divergences between teacher T and student S, as pure functions of their fp32 log-probabilities.

No tau^2 factor anywhere: the logits were divided by the shared temperature before the softmax. `clip_element` caps each
vocabulary term before the sum; a clipped term has no gradient.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def forward_kl(
    log_t: Float[Tensor, "C V"], log_s: Float[Tensor, "C V"], clip_element: float | None = None
) -> Float[Tensor, " C"]:
    """KL(T || S) = sum_v T (log T - log S). Gradient with respect to the student's logits: (S - T) / tau."""
    return _sum(_kl_terms(log_t, log_s), clip_element)


def reverse_kl(
    log_t: Float[Tensor, "C V"], log_s: Float[Tensor, "C V"], clip_element: float | None = None
) -> Float[Tensor, " C"]:
    """KL(S || T) = sum_v S (log S - log T). Gradient with respect to the student's logits: S (log(S / T) - KL) / tau."""
    return _sum(_kl_terms(log_s, log_t), clip_element)


def _kl_terms(log_p: Tensor, log_q: Tensor) -> Tensor:
    """p (log p - log q), 0 where p is 0 (also where q is); infinite where only q is 0."""
    return log_p.exp() * torch.where(log_p > -torch.inf, log_p - log_q, 0.0)


def _sum(terms: Tensor, clip_element: float | None) -> Tensor:
    return (terms if clip_element is None else terms.clamp(max=clip_element)).sum(-1)
