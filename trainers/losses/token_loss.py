"""Per-token losses for `hybrid.loss_head.chunked_loss`: from one chunk's logits to [C] losses and [C] metrics."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hybrid.batch import Batch
from hybrid.loss_head import TokenLoss, head_logits
from inference_v2.head import Head
from inference_v2.kernels import REFERENCE, Kernels
from trainers.config import DistillLoss
from trainers.losses import divergence as D
from trainers.losses.fused import fused_loss, kind_of, runs


def cross_entropy_token_loss(temperature: float = 1.0, kernels: Kernels = REFERENCE) -> TokenLoss:
    """-log softmax(z / temperature) at the target. Metrics: `accuracy`, `entropy`."""

    def token_loss(logits: Float[Tensor, "C V"], chunk: Batch) -> tuple[Float[Tensor, " C"], dict[str, Tensor]]:
        if runs(kernels, logits):
            gradient = torch.empty_like(logits, requires_grad=False)
            found = fused_loss(kernels, "cross_entropy", logits, gradient, chunk.targets, temperature)
            return found["loss"], {"accuracy": found["agreement"], "entropy": found["student_entropy"]}
        log_s = _log_softmax(logits, temperature)
        with torch.no_grad():
            metrics = {"accuracy": (log_s.argmax(-1) == chunk.targets).float(), "entropy": _entropy(log_s)}
        return -_at(log_s, chunk.targets), metrics

    return token_loss


def divergence_token_loss(loss: DistillLoss, teacher_head: Head, temperature: float, kernels: Kernels = REFERENCE) -> TokenLoss:
    """The divergence that `loss` names between softmax(z / temperature) of the teacher and of the student.

    Both logits are cut to the common vocabulary, `min` of the two heads' `vocab_size`, before any softmax. The teacher's are
    made from `chunk.teacher_hidden` and carry no gradient.

    `loss.cross_entropy` adds that weight times cross-entropy at temperature 1 on given responses (`chunk.on_policy` False). A
    step's responses are all given or all sampled (rollout.given_fraction), so its denominator is that of the divergence.

    Metrics: `divergence` (before cross-entropy), `teacher_entropy`, `student_entropy`, `top1_agreement`, `teacher_logprob` and
    `student_logprob` of the target, and where they apply `teacher_support_mass`, `student_support_mass`, `clipped` (share of
    tokens whose divergence a clip lowered) and `cross_entropy`. Raises ValueError if the chunk lacks a field it needs.
    """

    kind = kind_of(loss)

    def token_loss(logits: Float[Tensor, "C V"], chunk: Batch) -> tuple[Float[Tensor, " C"], dict[str, Tensor]]:
        hidden = _needed(chunk.teacher_hidden, "teacher_hidden", "run the teacher's scorer on the batch before the loss")
        common = min(logits.shape[-1], teacher_head.vocab_size)
        if common < logits.shape[-1]:  # even a slice of everything has a gradient of its own size
            logits = logits[:, :common]
        with torch.no_grad():
            teacher = head_logits(teacher_head, hidden.to(logits.device))[:, :common]
        if kind is not None and runs(kernels, logits):
            metrics = fused_loss(kernels, kind, logits, teacher, chunk.targets, temperature)
            per_token = unclipped = metrics.pop("loss")
            metrics["top1_agreement"] = metrics.pop("agreement")
        else:
            log_t, log_s = _log_softmax(teacher, temperature), _log_softmax(logits, temperature)
            del teacher
            support = _support(loss, log_t, log_s)
            per_token = unclipped = _divergence(loss, log_t, log_s, support, chunk, loss.clip_element)
            with torch.no_grad():
                metrics = _metrics(log_t, log_s, support, chunk.targets)
                if loss.clip_element is not None:
                    unclipped = _divergence(loss, log_t, log_s, support, chunk, None)
        if loss.clip_token is not None:
            per_token = per_token.clamp(max=loss.clip_token)
        metrics["divergence"] = per_token.detach()
        if unclipped is not per_token:
            metrics["clipped"] = (unclipped.detach() - per_token.detach() > 1e-6).float()
        if loss.cross_entropy > 0:
            on_policy = _needed(chunk.on_policy, "on_policy", "say which positions belong to given responses")
            mle = torch.where(on_policy, 0.0, F.cross_entropy(logits, chunk.targets, reduction="none"))
            metrics["cross_entropy"] = mle.detach()
            per_token = per_token + loss.cross_entropy * mle
        return per_token, metrics

    return token_loss


def _support(loss: DistillLoss, log_t: Tensor, log_s: Tensor) -> Tensor | None:
    if loss.top_k is None:
        return None
    return D.top_k_indices(log_t if loss.support == "teacher" else log_s.detach(), loss.top_k)


def _divergence(
    loss: DistillLoss, log_t: Tensor, log_s: Tensor, support: Tensor | None, chunk: Batch, clip_element: float | None
) -> Tensor:
    """[C], before `clip_token`."""
    if loss.divergence == "sampled_token":
        lp_t, lp_s = _at(log_t, chunk.targets), _at(log_s, chunk.targets)
        return D.sampled_token(lp_t, lp_s, chunk.rollout_logprobs_raw, loss.ratio_clip)
    if support is not None:
        log_t, log_s = D.on_support(log_t, support, loss.tail), D.on_support(log_s, support, loss.tail)
    match loss.divergence:
        case "forward_kl":
            return D.forward_kl(log_t, log_s, clip_element)
        case "reverse_kl":
            return D.reverse_kl(log_t, log_s, clip_element)
        case "jsd":
            return D.jsd(log_t, log_s, loss.beta, clip_element)
        case "jsd_normalised":
            return D.jsd_normalised(log_t, log_s, loss.beta, clip_element)
        case "skew_forward":
            return D.skew_forward(log_t, log_s, loss.skew, clip_element)
        case "skew_reverse":
            return D.skew_reverse(log_t, log_s, loss.skew, clip_element)


def _metrics(log_t: Tensor, log_s: Tensor, support: Tensor | None, targets: Tensor) -> dict[str, Tensor]:
    metrics = {
        "teacher_entropy": _entropy(log_t),
        "student_entropy": _entropy(log_s),
        "top1_agreement": (log_t.argmax(-1) == log_s.argmax(-1)).float(),
        "teacher_logprob": _at(log_t, targets),
        "student_logprob": _at(log_s, targets),
    }
    if support is not None:
        metrics["teacher_support_mass"] = log_t.gather(-1, support).exp().sum(-1)
        metrics["student_support_mass"] = log_s.gather(-1, support).exp().sum(-1)
    return metrics


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)


def _entropy(log_p: Tensor) -> Tensor:
    return torch.special.entr(log_p.exp()).sum(-1)  # [C], nats; entr(0) = 0


def _at(log_p: Tensor, ids: Tensor) -> Tensor:
    return log_p.gather(-1, ids[:, None]).squeeze(-1)


def _needed(field: Tensor | None, name: str, remedy: str) -> Tensor:
    if field is None:
        raise ValueError(f"batch.{name} is None in a distillation loss; {remedy}")
    return field
