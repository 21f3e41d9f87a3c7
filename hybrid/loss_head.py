"""The chunked loss head: hidden states to a summed loss without ever forming [N, V] logits.

Logits, the per-token loss and its gradients are made chunk by chunk in the forward pass, while a chunk's logits exist; backward
only scales what is already there. Beyond the gradients themselves the peak is a few [chunk_tokens, V] tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid.batch import Batch
from inference_v2.head import Head
from inference_v2.kernels import Kernels

# (fp32 logits [C, V], the batch cut to these C counted positions) -> (per-token loss [C], per-token metrics {name: [C]})
TokenLoss = Callable[[Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]

# A head that is not in fp32 is converted this many bytes of fp32 rows at a time: a whole converted copy (0.5 GB for 152k x 896)
# would be the largest tensor of a step. An fp32 head is used as it is, in one piece.
CONVERTED_BYTES = 16 * 2**20
HELD_BYTES = 64 * 2**20  # of packed rows held for the loss: a whole copy of a large head would be the largest tensor of a step
PACKED_BYTES = 16 * 2**20  # of a larger head's rows, packed for one product
NARROWED_AT_ONCE = 2**22  # values of a gradient
# fp32 logits of one chunk, where its length is not given; a KL divergence holds two such tensors, others in PyTorch about eight
LOGIT_BYTES = 48 * 2**20


def cross_entropy(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-log softmax(logits)[target]: a TokenLoss."""
    return logits.logsumexp(1) - logits.gather(1, chunk.targets[:, None]).squeeze(1), {}


def tokens_per_chunk(head: Head, given: int | None) -> int:
    """The chunk length that was asked for, or as many tokens as have LOGIT_BYTES of logits."""
    return given or head.rows_within(LOGIT_BYTES)


def pack_head(head: Head, kernels: Kernels) -> Head:
    """The head with the product that rollouts use, where `kernels` have one, so that equal hidden states give equal logits. A
    large head is not held packed: its rows are, PACKED_BYTES at a time, at every product."""
    pack, weight = kernels.pack_linear, head.weight.detach()
    rows = max(1, PACKED_BYTES // (weight.shape[1] * weight.itemsize))
    packable = pack is not None and weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and head.product is None
    if not packable or weight[: head.vocab_size].nbytes <= HELD_BYTES:
        return head.packed(kernels)
    assert pack is not None

    def product(x: Tensor, into: Tensor | None = None) -> Tensor:
        logits = torch.empty(x.shape[0], head.vocab_size) if into is None else into
        for start in range(0, head.vocab_size, rows):
            stop = min(start + rows, head.vocab_size)
            pack(weight[start:stop], None, out_dtype=torch.float32)(x, logits[:, start:stop])
        return logits

    return replace(head, product=product)


def chunked_loss(
    hidden: Tensor, head: Head, batch: Batch, token_loss: TokenLoss, chunk_tokens: int, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of `weights` [N] (None: ones) times the per-token loss over the N counted positions, and the metrics' plain sums.

    `hidden` [N, H] is aligned with `batch.targets`. The sum is an fp32 scalar, differentiable in `hidden`, `head.weight` and
    `head.bias` (each gets its gradient in its own dtype; the head's accumulates in fp32), once: backward scales the
    gradients in place. A position of weight 0 adds exactly nothing to loss, metrics and gradients, NaN and infinities
    included. N = 0 gives 0, still attached to the graph. Raises ValueError on lengths that disagree.
    """
    if hidden.shape[0] != batch.num_targets or (weights is not None and weights.shape != batch.targets.shape):
        given = f"hidden {tuple(hidden.shape)}, weights {None if weights is None else tuple(weights.shape)}"
        raise ValueError(f"chunked_loss: {given} for {batch.num_targets} targets; give one row per counted position")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}; allowed: 1 or more")
    if weights is None:
        weights = torch.ones(batch.num_targets, dtype=torch.float32, device=hidden.device)
    leaves = (hidden, head.weight, head.bias)
    gradients = [_accumulator(leaf, like_leaf=leaf is hidden) for leaf in leaves]
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, batch.num_targets, chunk_tokens):
            cut = slice(start, start + chunk_tokens)
            chunk = batch.select(cut.start, cut.stop)
            loss, metrics = _one_chunk(hidden[cut], head, chunk, token_loss, weights[cut].float(), gradients, cut)
            total += loss
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
    if any(g is not None for g in gradients):
        total = _KnownGradients.apply(total, gradients, *leaves)
    return total, sums


def head_logits(head: Head, hidden: Tensor) -> Tensor:
    """`head.logits(hidden)` for [C, H] without an fp32 copy of a whole lower-precision head; not differentiable."""
    blocks = list(_row_blocks(head))
    if len(blocks) == 1 or head.product is not None:
        return head.logits(hidden)
    logits = torch.empty(*hidden.shape[:-1], head.vocab_size, device=hidden.device)
    with torch.no_grad():
        for rows, block in blocks:
            logits[..., rows] = block.logits(hidden)
    return logits


def _row_blocks(head: Head) -> Iterator[tuple[slice, Head]]:
    """The head as heads of consecutive rows, few enough to convert to fp32 at once."""
    n = head.vocab_size
    rows = n if head.weight.dtype == torch.float32 else max(1, CONVERTED_BYTES // (4 * head.weight.shape[1]))
    for start in range(0, n, rows):
        cut = slice(start, min(start + rows, n))
        bias = None if head.bias is None else head.bias[cut]
        yield cut, replace(head, weight=head.weight[cut], bias=bias, vocab_limit=None, product=None)


def _accumulator(leaf: Tensor | None, like_leaf: bool) -> Tensor | None:
    if leaf is None or not (leaf.requires_grad and torch.is_grad_enabled()):
        return None
    # Each row of `hidden` belongs to one chunk, so its gradient is written once; the head's is a sum over chunks.
    return torch.zeros_like(leaf, dtype=leaf.dtype if like_leaf else torch.float32, memory_format=torch.contiguous_format)


def _one_chunk(
    hidden: Tensor,  # [C, H]
    head: Head,
    chunk: Batch,
    token_loss: TokenLoss,
    weight: Tensor,  # [C] fp32
    gradients: list[Tensor | None],  # of hidden, head weight, head bias: written in place
    cut: slice,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss sum and metric sums of one chunk; adds its part to `gradients`."""
    counted = weight != 0
    hidden = torch.where(counted[:, None], hidden.float(), 0.0)  # 0 x NaN is NaN: an uncounted row must not enter a product
    logits = head_logits(head, hidden)
    differentiate = any(g is not None for g in gradients)
    with torch.set_grad_enabled(differentiate):
        logits.requires_grad_(differentiate)
        per_token, metrics = token_loss(logits, chunk)
    if wrong := [tuple(t.shape) for t in (per_token, *metrics.values()) if t.shape != weight.shape]:
        raise ValueError(f"a token loss gave {wrong[0]} for {len(weight)} tokens; allowed: one value per token, [C]")
    if differentiate:
        (grad,) = torch.autograd.grad(per_token, logits, weight)
        grad = grad.contiguous().masked_fill_(~counted[:, None], 0.0)
        if head.softcap is not None:
            grad *= 1 - (logits.detach() / head.softcap) ** 2
        if head.scale != 1.0:
            grad *= head.scale
        _add_gradients(grad, hidden, head, gradients, cut)
    loss = torch.where(counted, per_token.detach() * weight, 0.0).sum()
    return loss, {name: torch.where(counted, value.detach(), 0.0).float().sum() for name, value in metrics.items()}


def _add_gradients(grad: Tensor, hidden: Tensor, head: Head, gradients: list[Tensor | None], cut: slice) -> None:
    """From d loss / d (hidden @ weight.T + bias) [C, V] to the three gradients."""
    of_hidden, of_weight, of_bias = gradients
    row_grad = torch.zeros_like(hidden)
    for rows, block in _row_blocks(head):  # BLAS libraries keep buffers as large as their largest product
        if of_hidden is not None:
            row_grad.addmm_(grad[:, rows], block.weight.float())
        if of_weight is not None:
            of_weight[rows].addmm_(grad[:, rows].T, hidden)
    if of_hidden is not None:
        of_hidden[cut] = row_grad
    if of_bias is not None:
        of_bias[: head.vocab_size] += grad.sum(0)


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients with respect to `leaves` were computed along with it."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *leaves: Tensor | None) -> Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [None if leaf is None else leaf.dtype for leaf in leaves]
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("chunked_loss: backward ran a second time; its gradients are scaled in place, so call it anew")
        return None, None, *(g if g is None else _narrowed(g.mul_(grad_output), t) for g, t in zip(gradients, ctx.dtypes))


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype; in a narrower one in the memory of `x`, which is used up: a second copy of a large head's gradient
    would be the peak of a step."""
    if x.dtype.itemsize <= dtype.itemsize:
        return x.to(dtype)
    wide = x.view(-1)
    narrow = wide.view(dtype)[: wide.numel()]
    for start in range(0, wide.numel(), NARROWED_AT_ONCE):  # what is written over has been read
        part = slice(start, start + NARROWED_AT_ONCE)
        narrow[part] = wide[part].to(dtype)
    return narrow.view(x.shape)
