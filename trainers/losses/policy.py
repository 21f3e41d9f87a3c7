"""Per-token losses of policy optimisation for `hybrid.loss_head.chunked_loss`: the clipped policy loss, the value loss, and the
pair loss of a reward model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hybrid.batch import Batch
from hybrid.loss_head import TokenLoss
from inference_v2.kernels import REFERENCE, Kernels
from trainers.advantages.kl import EXPONENT, FLOOR, kl_estimate, log_ratio
from trainers.config.policy import PolicyLoss
from trainers.losses.fused import fused_loss, runs

PerToken = Float[Tensor, " C"]
Metrics = dict[str, Tensor]


def policy_token_loss(loss: PolicyLoss, temperature: float, kernels: Kernels = REFERENCE) -> TokenLoss:
    """The clipped policy loss (Schulman et al. 2017, eq. 7) at lp = log softmax(z / temperature)[target], in fp32:

        w max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) - entropy * H + kl * K

    token: rho = exp(lp - old_logprobs). sequence (GSPO, Zheng et al. 2025): every token of a response has rho = exp(
    sequence_log_ratio), with the gradient rho * grad lp; with reduction sequence_mean this is their objective. Exponents are
    clamped to +- 20. Without `old_logprobs` the policy has not changed since the rollout: rho is 1, with the gradient of lp.
    `dual_clip` c: where A < 0, at most -c A (Ye et al. 2020). w are `mismatch_weights`, or 1.

    K is between the policy and `reference_logprobs`, with d = lp - reference: k2 has the value d^2 / 2 and the gradient d grad
    lp, whose mean over tokens drawn from the policy is that of the reverse KL; k3 has k3's value and k2's gradient; k3_value
    has k3's own gradient, whose mean is the forward KL's (Tang and Munos 2025).

    A target of probability 0 (a masked logit) gets no gradient, and nothing is NaN.

    Metrics: `policy_loss` (the first term), `ratio`, `clipped_low` and `clipped_high` (share of tokens whose gradient the
    lower or upper bound removes), `approx_kl` (k3, of KL(old || new)), `entropy`, `logprob`, and where they apply
    `dual_clipped` and `kl` (k3, to the reference). Raises ValueError if the chunk lacks a field that it needs.
    """

    def token_loss(logits: Float[Tensor, "C V"], chunk: Batch) -> tuple[PerToken, Metrics]:
        advantages = _needed(chunk.advantages, "advantages", "fill them from the step's rewards before the loss")
        lp, entropy = _logprob_and_entropy(logits, chunk.targets, temperature, loss.entropy != 0, kernels)
        old = lp.detach() if chunk.old_logprobs is None else chunk.old_logprobs
        per_token, metrics = _clipped(loss, _ratio(loss, lp, old, chunk), advantages)
        if chunk.mismatch_weights is not None:
            per_token = per_token * chunk.mismatch_weights
        metrics["policy_loss"] = per_token.detach()
        metrics["approx_kl"] = kl_estimate("k3", old, lp.detach())
        metrics["entropy"], metrics["logprob"] = entropy.detach(), lp.detach().clamp(min=FLOOR)
        if loss.entropy != 0:
            per_token = per_token - loss.entropy * entropy
        if loss.kl > 0:
            _needed(chunk.reference_logprobs, "reference_logprobs", "score the batch under the reference, or set loss.kl=0")
        if chunk.reference_logprobs is not None:
            metrics["kl"] = kl_estimate("k3", lp.detach(), chunk.reference_logprobs)
            if loss.kl > 0:
                per_token = per_token + loss.kl * _kl(loss, lp, chunk.reference_logprobs)
        return per_token, metrics

    return token_loss


def value_token_loss(clip: float | None) -> TokenLoss:
    """1/2 max((v - R)^2, (clip(v, values - clip, values + clip) - R)^2) for values v = logits [C, 1] and `returns` R; `values`
    are the critic's before the step's first update. `clip` None: 1/2 (v - R)^2.

    Metrics: `value_loss`, `value`, `return`, `value_clipped` (share of tokens whose gradient the clip removes). Raises
    ValueError for other logits, and if the chunk lacks a field that it needs.
    """

    def token_loss(logits: Float[Tensor, "C 1"], chunk: Batch) -> tuple[PerToken, Metrics]:
        value = _scalar(logits)
        returns = _needed(chunk.returns, "returns", "fill them by gae before the loss")
        error = clipped_error = (value - returns).square()
        if clip is not None:
            old = _needed(chunk.values, "values", "score the batch with the critic before the loss, or set critic.clip=null")
            clipped_error = (value.clamp(old - clip, old + clip) - returns).square()
        per_token = torch.maximum(error, clipped_error) / 2
        metrics = {"value_loss": per_token.detach(), "value": value.detach(), "return": returns}
        return per_token, metrics | {"value_clipped": (clipped_error > error).float()}

    return token_loss


def reward_pair_loss(centring: float = 0.0) -> TokenLoss:
    """-log sigmoid(c - r - margin) + centring * (c + r)^2 for the scores c, r of a chosen and a rejected response (Bradley-Terry;
    Touvron et al. 2023 for the margin, Eisenstein et al. 2023 for the centring).

    logits [C, 1] hold them in the order c, r, c, r, ...; `margins` are read at the chosen one, 0 where the batch has none.
    Loss and metrics of a pair stand at both, so that means over rows are means over pairs: `accuracy` (c > r), `margin` (c - r),
    `chosen_score`, `rejected_score`. Raises ValueError for other logits, an odd C among them.
    """

    def token_loss(logits: Float[Tensor, "C 1"], chunk: Batch) -> tuple[PerToken, Metrics]:
        scores = _scalar(logits)
        if len(scores) % 2:
            raise ValueError(f"reward_pair_loss: {len(scores)} scores; allowed: pairs; give an even chunk length")
        chosen, rejected = scores[0::2], scores[1::2]
        margins = chunk.margins
        difference = chosen - rejected
        per_pair = -F.logsigmoid(difference if margins is None else difference - margins[0::2])
        if centring:
            per_pair = per_pair + centring * (chosen + rejected).square()
        metrics = {
            "accuracy": (difference > 0).float(),
            "margin": difference.detach(),
            "chosen_score": chosen.detach(),
            "rejected_score": rejected.detach(),
        }
        return _at_both(per_pair), {name: _at_both(value) for name, value in metrics.items()}

    return token_loss


def _logprob_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float, entropy_gradient: bool, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """[C] each; the log-prob is differentiable, the entropy (nats) where it is to be."""
    if not entropy_gradient and runs(kernels, logits):
        gradient = torch.empty_like(logits, requires_grad=False)
        found = fused_loss(kernels, "cross_entropy", logits, gradient, targets, temperature)
        return -found["loss"], found["student_entropy"]
    log_p = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # A token of probability 0 adds 0; the slope of its log-prob would be infinite
        entropy = -(log_p.exp() * log_p.clamp(min=FLOOR)).sum(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy


def _ratio(loss: PolicyLoss, lp: Tensor, old: Tensor, chunk: Batch) -> Tensor:
    if loss.ratio == "token" or chunk.old_logprobs is None:
        return log_ratio(lp, old).clamp(-EXPONENT, EXPONENT).exp()
    remedy = "give the mean of lp - old_logprobs over each response under today's weights, or set loss.ratio=token"
    of_sequence = _needed(chunk.sequence_log_ratio, "sequence_log_ratio", remedy)
    return of_sequence.clamp(-EXPONENT, EXPONENT).exp() * log_ratio(lp, lp.detach()).exp()


def _clipped(loss: PolicyLoss, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    per_token = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    found = ratio.detach()
    metrics = {
        "ratio": found,
        "clipped_low": ((advantages < 0) & (found < low)).float(),
        "clipped_high": ((advantages > 0) & (found > high)).float(),
    }
    if loss.dual_clip is not None:
        negative = advantages < 0
        bounded = torch.minimum(per_token, -loss.dual_clip * advantages)
        metrics["dual_clipped"] = (negative & (found > loss.dual_clip)).float()
        per_token = torch.where(negative, bounded, per_token)
    return per_token, metrics


def _kl(loss: PolicyLoss, lp: Tensor, reference: Tensor) -> Tensor:
    """The estimate's value, with the gradient that its name stands for (not always the derivative of the value)."""
    fixed = lp.detach()
    k1 = log_ratio(fixed, reference)
    value = kl_estimate("k2" if loss.kl_estimator == "k2" else "k3", fixed, reference)
    slope = -torch.expm1((-k1).clamp(-EXPONENT, EXPONENT)) if loss.kl_estimator == "k3_value" else k1
    return value + slope * log_ratio(lp, fixed)  # the last factor is 0, and its gradient that of lp


def _scalar(logits: Tensor) -> Tensor:
    if logits.shape[-1] != 1:
        raise ValueError(f"logits {tuple(logits.shape)}; allowed: [C, 1], of a model with one scalar head")
    return logits.squeeze(-1)


def _at_both(per_pair: Tensor) -> Tensor:
    return per_pair.repeat_interleave(2)


def _needed(field: Tensor | None, name: str, remedy: str) -> Tensor:
    if field is None:
        raise ValueError(f"batch.{name} is None in a loss of policy optimisation; {remedy}")
    return field
