"""Linear layers of the rollout path: packed once per weight version where the kernels or torch can, row-padded on request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inference_v2.kernels import Kernels
from inference_v2.pages import Arena

Product = Callable[[Tensor], Tensor]
Pack = Callable[[Tensor, Tensor | None, Any], Product]  # weight, bias, an earlier product of theirs that is no longer used
PROBED_ROWS = (*range(1, 41), 48, 63, 64, 65, 96, 127, 128, 129, 200, 256, 257, 512)


@functools.cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed linear works here for `dtype`. A plain linear re-packs the weight at every call."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    try:
        packed_product(torch.ones(16, 16, dtype=dtype), None)(torch.ones(1, 16, dtype=dtype))
    except RuntimeError:  # the CPU lacks the instructions for this dtype
        return False
    return True


def packed_product(weight: Tensor, bias: Tensor | None, old: Product | None = None) -> Product:
    """x -> x @ weight.T + bias with a private, reordered copy of `weight` [out, in]."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def choose_pack(kernels: Kernels, dtype: torch.dtype, device: torch.device, arena: Arena) -> Pack | None:
    """How weights are packed: by the kernels' own product, into `arena`, by oneDNN, or (None) not at all."""
    if device.type != "cpu":
        return None
    if kernels.pack_linear is not None:
        return functools.partial(kernels.pack_linear, arena=arena)
    return packed_product if can_pack(dtype) else None


def plain_product(weight: Tensor, bias: Tensor | None) -> Product:
    return lambda x: F.linear(x, weight, bias)


def pad_rows(product: Product, x: Tensor, rows: int) -> Tensor:
    """`product(x)` computed on at least `rows` rows: zeros are appended and their results dropped. With `rows`, never on more
    than was probed."""
    if rows and x.shape[0] > PROBED_ROWS[-1]:
        return torch.cat([pad_rows(product, part, rows) for part in x.split(PROBED_ROWS[-1])])
    missing = rows - x.shape[0]
    if missing <= 0 or x.shape[0] == 0:
        return product(x)
    return product(F.pad(x, (0, 0, 0, missing)))[: x.shape[0]]


def safe_rows(product: Product, in_features: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> int:
    """The least row count from which on `product` gave every row the same bits, however many rows came with it.

    BLAS libraries choose a kernel by row count, so bits change between counts; where and how often depends on library, CPU
    and shape. The counts in PROBED_ROWS are tried, on random input from a private generator.
    """
    x = torch.randn(PROBED_ROWS[-1], in_features, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    want = product(x)
    safe = PROBED_ROWS[-1]
    for rows in reversed(PROBED_ROWS):
        if not torch.equal(product(x[:rows]), want[:rows]):
            break
        safe = rows
    return safe


class Linear:
    """One linear layer, perhaps of several weights merged along the output. The object stays, its content is refreshed.

    `pack` makes a private copy in a layout of its own. `probed` turns on batch invariance: the input is padded to a row count
    found by `safe_rows`, so that a row's bits do not depend on the batch it is in; the dict keeps that count per shape for all
    linears that share it.
    """

    def __init__(self, pack: Pack | None = None, probed: dict[tuple[int, ...], int] | None = None) -> None:
        self._pack = pack
        self._probed = probed
        self._min_rows = 0
        self._weight: Tensor | None = None  # the merged copy, unless packed
        self._bias: Tensor | None = None
        self.product: Product | None = None
        self.nbytes = 0

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, dtype: torch.dtype, device: torch.device) -> None:
        """Copy [out_i, in] weights, in order, and their biases. Storage of an earlier load is written over (same address)."""
        self._bias = None if biases is None else _merge(self._bias, biases, dtype, device)
        merged = _merge(self._weight, weights, dtype, device)
        if self._pack is not None:
            self.product = self._pack(merged, self._bias, self.product)
        else:
            self._weight = merged
            self.product = plain_product(merged, self._bias)
        self.nbytes = merged.nbytes + (0 if self._bias is None else self._bias.nbytes)
        if self._probed is not None:
            shape = (merged.shape[0], merged.shape[1])
            if shape not in self._probed:
                self._probed[shape] = safe_rows(self.product, merged.shape[1], dtype, device)
            self._min_rows = self._probed[shape]

    def move(self, device: torch.device) -> None:
        """To another device; a packed weight lives on the CPU and stays there."""
        if self._weight is not None:
            self._weight = self._weight.to(device)
            self._bias = None if self._bias is None else self._bias.to(device)
            self.product = plain_product(self._weight, self._bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        assert self.product is not None, "linear used before its weights were loaded"
        return pad_rows(self.product, x, self._min_rows) if self._min_rows else self.product(x)


def _merge(into: Tensor | None, parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    rows = sum(part.shape[0] for part in parts)
    if into is None:
        into = torch.empty(rows, *parts[0].shape[1:], dtype=dtype, device=device)
    start = 0
    for part in parts:
        into[start : start + part.shape[0]].copy_(part)
        start += part.shape[0]
    return into
