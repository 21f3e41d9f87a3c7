"""Per-token divergences between teacher T and student S, as pure functions of their fp32 log-probabilities [C, V].

No tau^2 factor anywhere: logits were divided by the temperature that both share before the softmax. `clip_element` caps each
vocabulary term before the sum (a capped term has no gradient; the sum may then be negative, since negative terms stay).

A log-probability of -inf (a masked vocabulary entry) has weight 0 in every sum. A KL is infinite where only its second
argument is 0.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

LogProbs = Float[Tensor, "C V"]
PerToken = Float[Tensor, " C"]

LOWEST = -1e30  # stands for -inf where a difference of two -inf would be NaN
FAR = 100.0  # log-ratios beyond this are equal to it in every weighted term: exp(-100) vanishes beside 1 in fp32
MIN_TAIL = 1e-7  # a tail of less mass than fp32 can resolve below 1


def forward_kl(log_t: LogProbs, log_s: LogProbs, clip_element: float | None = None) -> PerToken:
    """KL(T || S) = sum_v T (log T - log S). Gradient in the student's logits: (S - T) / tau."""
    return _kl(log_t, log_s, clip_element)


def reverse_kl(log_t: LogProbs, log_s: LogProbs, clip_element: float | None = None) -> PerToken:
    """KL(S || T) = sum_v S (log S - log T). Gradient in the student's logits: S (log(S / T) - KL) / tau."""
    return _kl(log_s, log_t, clip_element)


def jsd(log_t: LogProbs, log_s: LogProbs, beta: float, clip_element: float | None = None) -> PerToken:
    """beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S (Agarwal et al. 2024, GKD, eq. 1).

    beta = 0 is KL(T || S) and beta = 1 is KL(S || T) by definition, as in GKD. The family jumps there: its interior tends to 0
    at both ends. `jsd_normalised` is the one that is continuous.
    """
    if beta in (0.0, 1.0):
        return _kl(log_t, log_s, clip_element) if beta == 0 else _kl(log_s, log_t, clip_element)
    if beta > 0.5:  # M is taken relative to its larger part: exact near that end too, where jsd_normalised divides by 1 - beta
        log_t, log_s, beta = log_s, log_t, 1 - beta
    log_ratio = _log_ratio(log_t, log_s)
    log_m_over_s = _log_mixture_over_s(log_ratio, beta)
    terms = beta * log_t.exp() * (log_ratio - log_m_over_s) - (1 - beta) * log_s.exp() * log_m_over_s
    return _sum(terms, clip_element)


def jsd_normalised(log_t: LogProbs, log_s: LogProbs, beta: float, clip_element: float | None = None) -> PerToken:
    """jsd / (beta (1 - beta)): tends to KL(T || S) as beta -> 0 and to KL(S || T) as beta -> 1, which are its values there.

    `clip_element` caps the terms of this, the normalised, sum.
    """
    scale = beta * (1 - beta)
    if scale == 0.0:
        return jsd(log_t, log_s, beta, clip_element)
    return jsd(log_t, log_s, beta, None if clip_element is None else clip_element * scale) / scale


def skew_forward(log_t: LogProbs, log_s: LogProbs, skew: float, clip_element: float | None = None) -> PerToken:
    """KL(T || skew T + (1 - skew) S) (Ko et al. 2024, DistiLLM, eq. 3). skew = 0 is the forward KL."""
    if skew == 0.0:
        return _kl(log_t, log_s, clip_element)
    return _skew_kl(log_t, log_s, skew, clip_element)


def skew_reverse(log_t: LogProbs, log_s: LogProbs, skew: float, clip_element: float | None = None) -> PerToken:
    """KL(S || skew S + (1 - skew) T) (Ko et al. 2024, DistiLLM). skew = 0 is the reverse KL."""
    if skew == 0.0:
        return _kl(log_s, log_t, clip_element)
    return _skew_kl(log_s, log_t, skew, clip_element)


def top_k_indices(log_p: LogProbs, k: int) -> Int[Tensor, "C K"]:
    """The support of the min(k, V) most probable entries."""
    return log_p.topk(min(k, log_p.shape[-1]), dim=-1).indices


def on_support(
    log_p: LogProbs, indices: Int[Tensor, "C K"], tail: Literal["bucket", "renormalise"]
) -> Float[Tensor, "C K_or_K_plus_1"]:
    """`log_p` as a distribution over `indices`: the rest in one bucket behind them, or dropped and the support renormalised.

    By the log-sum inequality a KL of two bucketed distributions is at most the full one, and grows to it with K. At K = V
    there is no rest, so no bucket.
    """
    kept = log_p.gather(-1, indices)
    if kept.shape[-1] == log_p.shape[-1]:
        return kept
    log_mass = kept.logsumexp(-1, keepdim=True)
    if tail == "renormalise":
        return kept - log_mass
    log_tail = torch.log(-torch.expm1(torch.where(log_mass < -MIN_TAIL, log_mass, -MIN_TAIL)))
    return torch.cat([kept, log_tail], -1)


def sampled_token(
    lp_t: PerToken, lp_s: PerToken, rollout_lp: PerToken | None = None, ratio_clip: float | None = None
) -> PerToken:
    """Policy gradient on the sampled token y alone: -A * ratio, A = stop_grad(log T(y) - log S(y)).

    ratio = S(y) / S_rollout(y), or 1 with the gradient of log S(y) where `rollout_lp` is None. Its expected gradient is the
    reverse KL's only when y was drawn from S at the same temperature without truncation; it credits no later token.
    `ratio_clip` c: max(-A ratio, -A clip(ratio, 1 - c, 1 + c)), as in PPO.
    """
    advantage = (lp_t - lp_s).detach()
    behaviour = lp_s.detach() if rollout_lp is None else rollout_lp
    ratio = (lp_s - behaviour).clamp(-20, 20).exp()
    loss = -advantage * ratio
    if ratio_clip is not None:
        loss = torch.maximum(loss, -advantage * ratio.clamp(1 - ratio_clip, 1 + ratio_clip))
    return loss


def _kl(log_p: Tensor, log_q: Tensor, clip_element: float | None) -> Tensor:
    p = log_p.exp()
    terms = p * torch.where(log_p > -torch.inf, log_p - log_q, 0.0)
    return _sum(terms, clip_element, log_q.exp() - p)


def _skew_kl(log_p: Tensor, log_q: Tensor, skew: float, clip_element: float | None) -> Tensor:
    """KL(P || skew P + (1 - skew) Q)."""
    p = log_p.exp()
    terms = -p * _log_mixture_over_s(_log_ratio(log_q, log_p), 1 - skew)
    return _sum(terms, clip_element, (1 - skew) * (log_q.exp() - p))


def _log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.clamp(min=LOWEST) - log_q.clamp(min=LOWEST)).clamp(-FAR, FAR)


def _log_mixture_over_s(log_ratio: Tensor, weight: float) -> Tensor:
    """log((w T + (1 - w) S) / S) from log(T / S). Taken relative to S it is exact where T = S, which log M itself is not."""
    if weight == 0.0:
        return torch.zeros_like(log_ratio)
    return torch.logaddexp(log_ratio + math.log(weight), log_ratio.new_full((), math.log1p(-weight)))


def _sum(terms: Tensor, clip_element: float | None, zero_sum: Tensor | None = None) -> Tensor:
    """Sum over the vocabulary. `zero_sum` (q - p) adds nothing but makes every term of a KL non-negative, which removes the
    error that log-softmax's rounding makes in all terms alike: 1e-6 at V = 32k, enough for a negative KL."""
    if clip_element is not None:
        return terms.clamp(max=clip_element).sum(-1)
    return (terms if zero_sum is None else terms + zero_sum).sum(-1)
