"""How per-token losses become one number per optimizer step, the same for any split over ranks and micro-batches.

loss = sum over all ranks and micro-batches of (weight * per-token loss) / sum over all of them of `denominator`. Each rank knows
its own terms; the two sums are the engine's (one all-reduce of the denominators before the first backward). A sequence is
never split over micro-batches.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hybrid.batch import Batch

Reduction = Literal["token_mean", "sequence_mean", "sum_per_constant"]


def target_weights(batch: Batch, reduction: Reduction, constant_length: int | None = None) -> Float[Tensor, " N"]:
    """The weight of each counted position.

    token_mean: 1. sequence_mean: 1 / (counted positions of its sequence). sum_per_constant: 1 / constant_length, which does not
    weigh a token less in a long response (Liu et al. 2025, Dr. GRPO).
    """
    ones = torch.ones(batch.num_targets, device=batch.targets.device)
    match reduction:
        case "token_mean":
            return ones
        case "sequence_mean":
            return ones / _targets_per_sequence(batch)[batch.sequence_index]
        case "sum_per_constant":
            if constant_length is None:
                raise ValueError("reduction=sum_per_constant needs constant_length")
            return ones / constant_length


def denominator(batch: Batch, reduction: Reduction) -> int:
    """This batch's part of what the weighted sum is divided by: its counted positions for token_mean, else its sequences that
    have any."""
    return batch.num_targets if reduction == "token_mean" else int(batch.sequence_index.unique().numel())


def _targets_per_sequence(batch: Batch) -> Tensor:
    return torch.bincount(batch.sequence_index, minlength=batch.num_sequences)
