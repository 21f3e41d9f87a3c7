"""Operations that torch's flop counter does not know, or gets wrong: what each of them multiplies.

A formula takes the operation's arguments with shapes in place of tensors, and gives twice the number of products.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

Shape = Sequence[int]


def formulas() -> dict[Any, Callable[..., int]]:
    """For FlopCounterMode's custom_mapping."""
    aten = torch.ops.aten
    found: dict[Any, Callable[..., int]] = {
        aten.mv: _mv,
        aten.addmv: _add_mv,
        aten.addmv_: _add_mv,
        aten.addmm_: _add_product,
        aten.baddbmm_: _add_product,
        aten.addbmm: _add_product,
        aten.addbmm_: _add_product,
        aten.dot: lambda a, b, **_: 2 * prod(a),
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten.convolution_backward: _convolution_backward,
        aten._grouped_mm: _grouped_mm,
        aten._int_mm: lambda a, b, **_: 2 * prod(a) * b[1],
    }
    if torch.cuda.is_available() and importlib.util.find_spec("torch.nn.attention.varlen") is not None:
        importlib.import_module("torch.nn.attention.varlen")  # tells torch's counter of its own; attention.py imports it late
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = _packed_linear
    return found


def _mv(matrix: Shape, vector: Shape, **_: Any) -> int:
    return 2 * prod(matrix)


def _add_mv(own: Shape, matrix: Shape, vector: Shape, **_: Any) -> int:
    return 2 * prod(matrix)


def _add_product(own: Shape, a: Shape, b: Shape, **_: Any) -> int:
    """[*, m, k] by [*, k, n], added to `own`, which addbmm also sums over the batch."""
    return 2 * prod(a) * b[-1]


def _packed_linear(x: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return 2 * prod(out_shape) * x[-1]  # the weight's own shape is that of its packing


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad_out, query, key, value)


def _convolution_backward(
    grad_out: Shape,
    x: Shape,
    weight: Shape,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """The gradients of input and weight each pair what the forward paired: weight [out, in / groups, *window] with every place of
    the output, or of the input where transposed. torch's own formula multiplies the weight's by `groups`."""
    places = prod((x if transposed else grad_out)[2:])
    return 2 * x[0] * places * prod(weight) * sum(map(bool, output_mask[:2]))


def _grouped_mm(a: Shape, b: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    """Experts: [T, k] by [E, k, n], each row by one of E; or [m, T] by [T, n], summed by expert into [E, m, n]."""
    if len(a) == len(b) == 2:
        return 2 * prod(a) * b[1]
    return 2 * prod(out_shape) * a[-1]
