"""All layers of a decoder in one call: the kernels of `CpuKernels`, without the way through Python between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p, cast
from typing import Any

import torch
from torch import Tensor

from inference_v2.kernels.cpu import DTYPES, PackedLinear
from inference_v2.kernels.cpu.build import library
from inference_v2.kernels.cpu.checks import pointer, require
from inference_v2.kernels.flops import tell_attention, tell_product

PANEL = 32  # as in linear.cpp
LINEARS = ("qkv", "o", "gate_up", "down")
NORMS = ("pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm", "q_norm", "k_norm")


class _Layer(Structure):
    _fields_ = [
        *((name, c_void_p) for name in (*LINEARS, *(f"{name}_bias" for name in LINEARS), *NORMS)),
        *((name, c_int64) for name in ("group", "window", "rope")),
    ]


class _Group(Structure):
    _fields_ = [("slots", c_void_p), ("block_tables", c_void_p), ("table_width", c_int64)]


class _Stack(Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("groups", POINTER(_Group)),
        *((name, c_void_p) for name in ("pools", "positions", "cu_query_lens", "context_lens", "cos", "sin")),
        *((name, c_void_p) for name in ("residual", "branch", "scratch")),
        *((name, c_int64) for name in ("num_layers", "tokens", "requests", "hidden", "intermediate")),
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "half", "block_size")),
        ("eps", c_float),
        ("scale", c_float),
    ]


class LayerStack:
    """The layers of one decoder, bound to the addresses of their weights: valid while those stay. `spec` is a
    models.spec.DecoderSpec, `layers` are weights.LayerWeights."""

    def __init__(self, functions: dict[torch.dtype, Callable[..., None]], spec: Any, layers: Sequence[Any]) -> None:
        self._functions, self._spec = functions, spec
        self._held = [(p.packed, p.bias) for layer in layers for p in _products(layer)]
        self._weights = sum(p.in_features * p.out_features for layer in layers for p in _products(layer))
        self._layers = (_Layer * len(layers))()
        for i, (own, weights) in enumerate(zip(spec.layers, layers)):
            products, norms = _products(weights), [getattr(weights, name) for name in NORMS]
            require(products[0].packed.dtype, *norms)
            self._layers[i] = _Layer(
                *(product.packed.data_ptr() for product in products), *(pointer(product.bias) for product in products),
                *map(pointer, norms), own.cache_group, own.window or 0, own.rope,
            )  # fmt: skip

    def __call__(self, batch: Any, cache: Any, table: tuple[Tensor, Tensor], residual: Tensor) -> tuple[Tensor, Tensor]:
        """residual [T, H], of which the memory is used -> (residual, last branch), as Decoder has them after its last layer.
        `batch` is a batch.Batch, `cache` a cache.KVCache."""
        spec, dtype, (tokens, hidden), (cos, sin) = self._spec, residual.dtype, residual.shape, table
        branch = torch.empty_like(residual)
        width = hidden + (3 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + spec.intermediate_size
        scratch = torch.empty(tokens * width, dtype=dtype)
        require(dtype, residual, cos, sin)
        groups = (_Group * len(batch.groups))(
            *(_Group(g.slots.data_ptr(), g.block_tables.data_ptr(), g.block_tables.shape[1]) for g in batch.groups)
        )
        self._functions[dtype](byref(_Stack(
            self._layers, groups, cast(cache.pointers, c_void_p), batch.positions.data_ptr(), batch.cu_query_lens.data_ptr(),
            batch.context_lens.data_ptr(), cos.data_ptr(), sin.data_ptr(), residual.data_ptr(), branch.data_ptr(),
            scratch.data_ptr(), len(self._layers), tokens, batch.num_requests, hidden, spec.intermediate_size, spec.num_heads,
            spec.num_kv_heads, spec.head_dim, cos.shape[-1], cache.block_size, spec.norm_eps, spec.scale,
        )))  # fmt: skip
        tell_product(tokens, 1, self._weights)
        heads = spec.num_heads * len(spec.layers)
        tell_attention("cpu_attention", batch.cu_query_lens, batch.context_lens, heads, spec.head_dim)
        return residual, branch


def stack_binder(march: str = "native") -> Callable[[Any, Sequence[Any]], LayerStack | None]:
    """The function behind `Kernels.bind_layers`. Raises BuildError."""
    functions = {dtype: getattr(library(march), f"stack_{suffix}") for dtype, suffix in DTYPES.items()}
    for function in functions.values():
        function.argtypes, function.restype = [POINTER(_Stack)], None

    def bind(spec: Any, layers: Sequence[Any]) -> LayerStack | None:
        if spec.intermediate_size % PANEL or not all(isinstance(p, PackedLinear) for layer in layers for p in _products(layer)):
            return None
        return LayerStack(functions, spec, layers)

    return bind


def _products(layer: Any) -> list[Any]:
    return [getattr(layer, name).product for name in LINEARS]
