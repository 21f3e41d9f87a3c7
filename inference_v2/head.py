"""The language-model head: one function from hidden states to fp32 logits, used by rollout, trainer, teacher and tests.

Rounding in the head dominates the mismatch between a rollout's and a trainer's log-probs, so both sides share this code:
equal hidden states give bit-equal logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """`weight` [V, H], `bias` [V] or None. Logits are cut to the first `vocab_limit` rows (the tokenizer's size) before any
    softmax; `scale` multiplies them, `softcap` c maps z to c * tanh(z / c)."""

    weight: Tensor
    bias: Tensor | None = None
    vocab_limit: int | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def vocab_size(self) -> int:
        rows = self.weight.shape[0]
        return rows if self.vocab_limit is None else min(rows, self.vocab_limit)

    def rows_within(self, num_bytes: int) -> int:
        """Tokens whose fp32 logits take at most `num_bytes`; at least one."""
        return max(1, num_bytes // (4 * self.vocab_size))

    def logits(self, hidden: Tensor) -> Tensor:
        """[*, H] in any float dtype -> fp32 [*, vocab_size]. The product is taken in fp32."""
        n = self.vocab_size
        bias = None if self.bias is None else self.bias[:n].float()
        z = F.linear(hidden.float(), self.weight[:n].float(), bias)
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z
