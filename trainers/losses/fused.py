"""The losses that a backend's kernels compute together with their gradients: as in divergence.py, in one pass."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from inference_v2.kernels import Kernels
from trainers.config import DistillLoss

Kind = Literal["cross_entropy", "forward_kl", "reverse_kl"]


def kind_of(loss: DistillLoss) -> Kind | None:
    """Which KL over the whole vocabulary, unclipped within it, `loss` is; None for anything else."""
    if loss.top_k is not None or loss.clip_element is not None:
        return None
    match loss.divergence, loss.beta, loss.skew:
        case ("forward_kl", _, _) | ("jsd" | "jsd_normalised", 0.0, _) | ("skew_forward", _, 0.0):
            return "forward_kl"
        case ("reverse_kl", _, _) | ("jsd" | "jsd_normalised", 1.0, _) | ("skew_reverse", _, 0.0):
            return "reverse_kl"
    return None


def runs(kernels: Kernels, logits: Tensor) -> bool:
    return kernels.token_loss is not None and logits.device.type == "cpu" and logits.dtype == torch.float32


def fused_loss(
    kernels: Kernels, kind: Kind, logits: Tensor, teacher: Tensor, targets: Tensor, temperature: float
) -> dict[str, Tensor]:
    """`Kernels.token_loss`, of which "loss" [C] is differentiable in `logits`, once. The memory of `teacher` is used up."""
    assert kernels.token_loss is not None
    measures = kernels.token_loss(kind, logits.detach(), teacher, targets, temperature)
    return measures | {"loss": _KnownGradient.apply(logits, teacher, measures["loss"])}


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        ctx.gradient = gradient
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError("fused_loss: backward ran a second time; its gradient is scaled in place, so call it anew")
        return gradient.mul_(of_loss[:, None]), None, None
