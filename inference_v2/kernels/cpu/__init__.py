"""The kernels in C++, for CPUs: `load_kernels` compiles them on first use. Their contract is that of reference.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from inference_v2.kernels.cpu.build import BuildError, library
from inference_v2.kernels.cpu.checks import pointer, require
from inference_v2.kernels.flops import tell_attention, tell_product
from inference_v2.pages import Arena

__all__ = ["DTYPES", "BuildError", "CpuKernels", "load_kernels"]

DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16"}
PART_ROWS = 32  # as in elementwise.cpp


class _EnterAttention(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "q_out", "k_pool", "v_pool", "slots", "positions", "cos", "sin")),
        *((name, c_void_p) for name in ("q_norm", "k_norm")),
        *((name, c_int64) for name in ("tokens", "num_heads", "num_kv_heads", "head_dim", "half")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "v_stride")),
        ("eps", c_float),
    ]


class _Attention(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("q", "k_pool", "v_pool", "out", "cu_query_lens", "context_lens", "block_tables", "sinks")
        ),
        *(
            (name, c_int64)
            for name in ("requests", "num_heads", "num_kv_heads", "head_dim", "block_size", "table_width", "window")
        ),
        ("scale", c_float),
        ("softcap", c_float),
        ("lse", c_void_p),
    ]


class _Linear(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "packed", "bias", "y")),
        *((name, c_int64) for name in ("rows", "in_features", "out_features", "x_stride", "y_stride")),
        ("y_is_float", c_int32),
    ]


class _GatedRows(Structure):
    _fields_ = [*((name, c_void_p) for name in ("gate", "up")),
                *((name, c_int64) for name in ("rows", "dim", "gate_stride", "up_stride"))]  # fmt: skip


class _Sample(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "edited", "temperature", "uniform", "top_p", "min_p", "top_k")),
        *((name, c_void_p) for name in ("ids", "logprobs", "raw")),
        ("rows", c_int64),
        ("vocab", c_int64),
    ]


def _gated_rows(gate: Tensor, up: Tensor) -> _GatedRows:
    if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype or not gate.stride(1) == up.stride(1) == 1:
        given = f"gate {gate.dtype} {tuple(gate.shape)}, up {up.dtype} {tuple(up.shape)}"
        raise ValueError(f"CPU kernel: {given}; allowed: rows of one shape and dtype, each dense")
    return _GatedRows(gate.data_ptr(), up.data_ptr(), *gate.shape, gate.stride(0), up.stride(0))


def _dense(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return (x if dtype is None else x.to(dtype)).contiguous()


def _heads(x: Tensor) -> Tensor:
    """[T, heads, D] whose tokens may lie apart, but whose heads are one behind the other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


class PackedLinear:
    """`CpuKernels.pack_linear`'s product."""

    def __init__(
        self,
        function: Callable[..., None],
        packed: Tensor,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
        out_dtype: torch.dtype,
    ) -> None:
        self.packed, self.bias = packed, bias
        self.in_features, self.out_features = in_features, out_features
        self._function, self._out_dtype = function, out_dtype

    def __call__(self, x: Tensor, into: Tensor | None = None) -> Tensor:
        """`into` [T, out]: where the result goes; its rows may lie apart."""
        if x.dtype != self.packed.dtype:
            raise ValueError(f"packed product: x in {x.dtype}; allowed: {self.packed.dtype}")
        x = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, self.in_features).contiguous()
        rows = x.shape[0]
        y = torch.empty(rows, self.out_features, dtype=self._out_dtype) if into is None else into
        if y.shape != (rows, self.out_features) or y.dtype != self._out_dtype or y.stride(1) != 1:
            given = f"{y.dtype} {tuple(y.shape)}, strides {y.stride()}"
            raise ValueError(f"packed product into {given}; allowed: {self._out_dtype} {(rows, self.out_features)}, dense rows")
        stride = x.stride(0) if rows > 1 else self.in_features
        arguments = _Linear(
            x.data_ptr(), self.packed.data_ptr(), pointer(self.bias), y.data_ptr(), rows, self.in_features, self.out_features,
            stride, y.stride(0), self._out_dtype == torch.float32,
        )  # fmt: skip
        self._function(byref(arguments))
        tell_product(rows, self.in_features, self.out_features)
        return y


class CpuKernels:
    """One compiled library with the functions of `inference_v2.kernels.Kernels`; tensors on the CPU, fp32 or bf16."""

    def __init__(self, march: str = "native") -> None:
        self._library = lib = library(march)
        f32, i64, address = c_float, c_int64, c_void_p
        self._rms_norm = self._both("rms_norm", address, address, f32, address, i64, i64, i64)
        self._add_rms_norm = self._both("add_rms_norm", address, address, address, f32, address, address, i64, i64)
        self._silu_and_mul = self._both("silu_and_mul", POINTER(_GatedRows), address)
        self._silu_and_mul_backward = self._both("silu_and_mul_backward", POINTER(_GatedRows), address, address, address)
        self._rms_norm_backward = self._both("rms_norm_backward", address, address, address, f32, address, address, i64, i64)
        self._enter_attention = self._both("enter_attention", POINTER(_EnterAttention))
        self._paged_attention = self._both("paged_attention", POINTER(_Attention))
        self._linear = self._both("linear", POINTER(_Linear))
        self._pack = self._both("linear_pack", address, address, i64, i64)
        self._packed_size = _function(lib.linear_packed_size, i64, i64, result=i64)
        self._sample = _function(lib.sample, POINTER(_Sample))

    def _both(self, name: str, *arguments: Any) -> dict[torch.dtype, Callable[..., None]]:
        return {dtype: _function(getattr(self._library, f"{name}_{suffix}"), *arguments) for dtype, suffix in DTYPES.items()}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dim = x.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, dim).contiguous()
        require(x.dtype, weight)
        y = torch.empty(x.shape, dtype=x.dtype)
        stride = rows.stride(0) if rows.shape[0] > 1 else dim
        self._rms_norm[x.dtype](rows.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), rows.shape[0], dim, stride)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual = x.contiguous(), residual.contiguous()
        require(x.dtype, residual, weight)
        y, total = torch.empty_like(x), torch.empty_like(x)
        dim = x.shape[-1]
        pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps, y.data_ptr(), total.data_ptr())
        self._add_rms_norm[x.dtype](*pointers, x.numel() // dim, dim)
        return y, total

    def rms_norm_backward(self, x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(dx like x, d_weight [dim] fp32) of `rms_norm`; the same bits for any number of threads."""
        dim, dy = x.shape[-1], dy.contiguous()
        require(x.dtype, x, weight, dy)
        dx, rows = torch.empty_like(x), x.numel() // dim
        parts = torch.empty(-(-rows // PART_ROWS), dim)
        pointers = (x.data_ptr(), weight.data_ptr(), dy.data_ptr(), eps, dx.data_ptr(), parts.data_ptr())
        self._rms_norm_backward[x.dtype](*pointers, rows, dim)
        return dx, parts.sum(0)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self.silu_mul(*gate_up.chunk(2, dim=-1))

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, [rows, dim] each, of which the rows may lie apart."""
        y = torch.empty(gate.shape, dtype=gate.dtype)
        self._silu_and_mul[gate.dtype](byref(_gated_rows(gate, up)), y.data_ptr())
        return y

    def silu_mul_backward(self, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of gate and up [rows, dim]."""
        dy = dy.contiguous()
        require(gate.dtype, dy)
        d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype) for _ in range(2))
        pointers = (dy.data_ptr(), d_gate.data_ptr(), d_up.data_ptr())
        self._silu_and_mul_backward[gate.dtype](byref(_gated_rows(gate, up)), *pointers)
        return d_gate, d_up

    def enter_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        slots: Tensor,
        positions: Tensor,
        table: tuple[Tensor, Tensor] | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        q, k, v = _heads(q), _heads(k), _heads(v)
        tokens, num_heads, head_dim = q.shape
        out = torch.empty(q.shape, dtype=q.dtype)
        cos, sin = (None, None) if table is None else table
        require(q.dtype, k_pool, v_pool, cos, sin, q_norm, k_norm)
        require(torch.int64, slots, positions)
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"CPU kernel: q, k, v in {q.dtype}, {k.dtype}, {v.dtype}; allowed: one dtype")
        half = 0 if cos is None else cos.shape[-1]
        arguments = _EnterAttention(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), slots.data_ptr(),
            positions.data_ptr(), pointer(cos), pointer(sin), pointer(q_norm), pointer(k_norm), tokens, num_heads,
            k.shape[1], head_dim, half, q.stride(0), k.stride(0), v.stride(0), eps,
        )  # fmt: skip
        self._enter_attention[q.dtype](byref(arguments))
        return out

    def paged_attention(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,  # [T, Hq] fp32, written: the log-sum-exp of each query's scores, without the sink
    ) -> Tensor:
        q, block_tables = q.contiguous(), _dense(block_tables, torch.int32)
        cu_query_lens, context_lens = _dense(cu_query_lens, torch.int32), _dense(context_lens, torch.int32)
        sinks = None if sinks is None else _dense(sinks, torch.float32)
        require(q.dtype, q, k_pool, v_pool)
        out = torch.empty_like(q)
        arguments = _Attention(
            q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr(), cu_query_lens.data_ptr(),
            context_lens.data_ptr(), block_tables.data_ptr(), pointer(sinks), context_lens.shape[0], q.shape[1],
            k_pool.shape[2], q.shape[2], k_pool.shape[1], block_tables.shape[1], window or 0, scale, softcap or 0.0,
            pointer(lse),
        )  # fmt: skip
        self._paged_attention[q.dtype](byref(arguments))
        tell_attention("cpu_attention", cu_query_lens, context_lens, q.shape[1], q.shape[2])
        return out

    def pack_linear(
        self,
        weight: Tensor,
        bias: Tensor | None,
        old: PackedLinear | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        arena: Arena | None = None,
    ) -> PackedLinear:
        """x [T, in] -> x @ weight.T + bias, all of one dtype, or fp32 out, with a private copy of `weight` [out, in]: in `arena`,
        or in the storage of `old`, which is no longer used. Sums are fp32, in one order for every row count: a row's bits do not
        depend on the batch."""
        (out_features, in_features), dtype = weight.shape, weight.dtype
        size = self._packed_size(out_features, in_features)
        if old is not None and old.packed.dtype == dtype and old.packed.numel() == size:
            packed = old.packed
        else:
            packed = torch.empty(size, dtype=dtype) if arena is None else arena.empty(size, dtype)
        weight = weight.contiguous()  # a name keeps it alive for the call
        require(dtype, weight)
        self._pack[dtype](weight.data_ptr(), packed.data_ptr(), out_features, in_features)
        bias = None if bias is None else _dense(bias, dtype)
        return PackedLinear(self._linear[dtype], packed, bias, in_features, out_features, out_dtype or dtype)

    def sample(
        self,
        logits: Tensor,
        edited: Tensor | None,
        temperature: Tensor,
        uniform: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, vocab = logits.shape
        logits, edited = logits.contiguous(), None if edited is None else edited.contiguous()
        ids, logprobs, raw = torch.empty(rows, dtype=torch.int64), torch.empty(rows), torch.empty(rows)
        arguments = _Sample(
            logits.data_ptr(), pointer(edited), temperature.data_ptr(), uniform.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
            top_k.data_ptr(), ids.data_ptr(), logprobs.data_ptr(), raw.data_ptr(), rows, vocab,
        )  # fmt: skip
        self._sample(byref(arguments))
        return ids, logprobs, raw


@functools.cache
def load_kernels(march: str = "native") -> CpuKernels:
    """Raises BuildError."""
    return CpuKernels(march)


def _function(symbol: Any, *arguments: Any, result: Any = None) -> Any:
    symbol.argtypes, symbol.restype = arguments, result
    return symbol
