"""Cross-entropy and the KL divergences of a chunk of logits, with their gradients, in one pass through each row."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import Literal

import torch
from torch import Tensor

from inference_v2.kernels.cpu.build import library
from inference_v2.kernels.cpu.checks import require

KINDS = {"cross_entropy": 0, "forward_kl": 1, "reverse_kl": 2}
MEASURES = ("loss", "teacher_entropy", "student_entropy", "agreement", "teacher_logprob", "student_logprob")


class _TokenLoss(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("student", "teacher", "targets", *MEASURES)),
        *((name, c_int64) for name in ("rows", "vocab", "student_stride", "teacher_stride", "kind")),
        ("temperature", c_float),
    ]


def token_loss(
    kind: Literal["cross_entropy", "forward_kl", "reverse_kl"],
    student: Tensor,  # logits [C, V]
    teacher: Tensor,  # logits [C, V], replaced by the gradient of each row's loss in the student's logits
    targets: Tensor,  # [C]
    temperature: float,
    march: str = "native",
) -> dict[str, Tensor]:
    """MEASURES, [C] each: entropies in nats, log-probs of the targets, `agreement` 1 where the most likely tokens (for
    cross-entropy: the student's and the target) are the same. Rows of the fp32 logits may lie apart. For cross-entropy,
    `teacher` is memory for the gradient, and its measures are not set. Raises ValueError for what does not fit together."""
    (rows, vocab), targets = student.shape, targets.contiguous()
    require(torch.int64, targets)
    for logits in (student, teacher):
        if logits.shape != student.shape or logits.dtype != torch.float32 or logits.device.type != "cpu" or logits.stride(1) != 1:
            given = f"{logits.dtype} {tuple(logits.shape)} on {logits.device}, strides {logits.stride()}"
            raise ValueError(f"CPU kernel: logits {given}; allowed: float32 {tuple(student.shape)} on the CPU, dense rows")
    if targets.shape != (rows,) or (rows and not 0 <= int(targets.min()) <= int(targets.max()) < vocab):
        raise ValueError(f"CPU kernel: targets {tuple(targets.shape)}; allowed: [{rows}], each 0 to {vocab - 1}")
    measures = torch.zeros(len(MEASURES), rows)
    function = library(march).token_loss
    function.argtypes, function.restype = [POINTER(_TokenLoss)], None
    function(byref(_TokenLoss(
        student.data_ptr(), teacher.data_ptr(), targets.data_ptr(), *(row.data_ptr() for row in measures),
        rows, vocab, student.stride(0), teacher.stride(0), KINDS[kind], temperature,
    )))  # fmt: skip
    return dict(zip(MEASURES, measures))
