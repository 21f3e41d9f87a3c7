"""The language-model head: one function from hidden states to fp32 logits, used by rollout, trainer, teacher and tests.

Rounding in the head dominates the mismatch between a rollout's and a trainer's log-probs, so both sides share this code:
equal hidden states give bit-equal logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_v2.kernels import Kernels
from inference_v2.pages import Arena


@dataclass(frozen=True)
class Head:
    """`weight` [V, H], `bias` [V] or None. Logits are cut to the first `vocab_limit` rows (the tokenizer's size) before any
    softmax; `scale` multiplies them, `softcap` c maps z to c * tanh(z / c). `product` is a packed copy of bf16 rows."""

    weight: Tensor
    bias: Tensor | None = None
    vocab_limit: int | None = None
    scale: float = 1.0
    softcap: float | None = None
    product: Callable[..., Tensor] | None = None  # [T, H] bf16, into -> fp32 [T, vocab_size]

    @property
    def vocab_size(self) -> int:
        rows = self.weight.shape[0]
        return rows if self.vocab_limit is None else min(rows, self.vocab_limit)

    def rows_within(self, num_bytes: int) -> int:
        """Tokens whose fp32 logits take at most `num_bytes`; at least one."""
        return max(1, num_bytes // (4 * self.vocab_size))

    def packed(self, kernels: Kernels, old: Head | None = None, arena: Arena | None = None) -> Head:
        """The same head with its rows packed for `kernels`, where those have a product for them, in the storage of an `old` one
        that is no longer used, or in `arena`. Only the rows' rounding counts: bf16 x bf16 is exact in fp32."""
        usable = self.weight.dtype == torch.bfloat16 and self.weight.device.type == "cpu" and self.product is None
        if kernels.pack_linear is None or not usable:
            return self
        rows = self.weight[: self.vocab_size].detach()
        old_product = None if old is None else old.product
        return replace(self, product=kernels.pack_linear(rows, None, old_product, out_dtype=torch.float32, arena=arena))

    def logits(self, hidden: Tensor, into: Tensor | None = None) -> Tensor:
        """[*, H] in any float dtype -> fp32 [*, vocab_size]. The product is exact, its sums are fp32; a packed head takes bf16
        hidden states, and may leave its result in the first rows of `into` [T or more, vocab_size] fp32: new memory of this
        size costs as much as the product of a few rows."""
        n = self.vocab_size
        bias = None if self.bias is None else self.bias[:n].float()
        if self.product is None or (torch.is_grad_enabled() and hidden.requires_grad):  # a packed product has no backward
            z = F.linear(hidden.float(), self.weight[:n].float(), bias)
        else:
            rows = hidden.to(torch.bfloat16).reshape(-1, hidden.shape[-1])
            z = self.product(rows, None if into is None else into[: len(rows)]).view(*hidden.shape[:-1], n)
            if bias is not None:
                z += bias
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z
