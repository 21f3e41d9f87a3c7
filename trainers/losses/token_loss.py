"""Per-token losses for the chunked loss head."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.loss_head import TokenLoss, head_logits
from inference_v2.head import Head
from trainers.config import DistillLoss
from trainers.losses import divergence


def cross_entropy_token_loss(temperature: float = 1.0) -> TokenLoss:
    """-log softmax(z / temperature) of the target."""

    def token_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        log_s = _log_softmax(logits, temperature)
        loss = -log_s.gather(1, chunk.targets[:, None]).squeeze(1)
        return loss, {"accuracy": (log_s.argmax(-1) == chunk.targets).float()}

    return token_loss


def divergence_token_loss(loss: DistillLoss, teacher_head: Head, temperature: float) -> TokenLoss:
    """The divergence that `loss` names, between softmax(z / temperature) of teacher and student on their common vocabulary."""

    def token_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        if chunk.teacher_hidden is None:
            raise ValueError("batch.teacher_hidden is None; run the teacher's scorer on the batch before the loss")
        common = min(logits.shape[1], teacher_head.vocab_size)
        with torch.no_grad():
            teacher = head_logits(teacher_head, chunk.teacher_hidden.to(logits.device))
            log_t = _log_softmax(teacher[:, :common], temperature)
        log_s = _log_softmax(logits[:, :common], temperature)
        per_token = getattr(divergence, loss.divergence)(log_t, log_s, clip_element=loss.clip_element)
        return per_token, {}

    return token_loss


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
