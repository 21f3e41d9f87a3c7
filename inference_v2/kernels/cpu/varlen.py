"""Causal attention over packed sequences, forward and backward, in C++: what training runs instead of a padded attention.

The forward is the rollout's own `paged_attention`, handed the packed keys as a pool of blocks of one token: a query's result has
the bits that it has in a rollout. Tensors lie on the CPU, in fp32 or bf16; sums are fp32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p

import torch
from torch import Tensor

from inference_v2.kernels.cpu import DTYPES, load_kernels
from inference_v2.kernels.cpu.build import library
from inference_v2.kernels.flops import tell_attention


class _Backward(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "out", "d_out", "lse", "dq", "dk", "dv", "cu_seqlens")),
        *((name, c_int64) for name in ("sequences", "num_heads", "num_kv_heads", "head_dim", "window")),
        ("scale", c_float),
        ("softcap", c_float),
    ]


def token_tables(cu_seqlens: Tensor) -> Tensor:
    """[B, longest] int32: where the tokens of each sequence lie among the packed ones; the ends of shorter rows are not read."""
    longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    return (cu_seqlens[:-1, None] + torch.arange(longest)).int()


def varlen_forward(
    q: Tensor,  # [T, Hq, D]
    k: Tensor,  # [T, Hk, D]
    v: Tensor,  # [T, Hk, D]
    cu_seqlens: Tensor,  # [B + 1]
    tables: Tensor,  # token_tables(cu_seqlens)
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    march: str = "native",
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, D], log-sum-exp of each query's scores [T, Hq] fp32). The query at position p of a sequence sees the keys of
    that sequence at p - window < position <= p."""
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    attend, k_pool, v_pool = load_kernels(march).paged_attention, k.contiguous()[:, None], v.contiguous()[:, None]
    return attend(q, k_pool, v_pool, cu_seqlens, cu_seqlens.diff(), tables, scale, window, softcap, lse=lse), lse


def varlen_backward(
    d_out: Tensor,  # [T, Hq, D]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    march: str = "native",
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for that of `varlen_forward`'s out; the same bits for any number of threads."""
    q, k, v, out, d_out = (x.contiguous() for x in (q, k, v, out, d_out))
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    cu_seqlens = cu_seqlens.to(torch.int32).contiguous()
    tensors = (q, k, v, out, d_out, lse, dq, dk, dv, cu_seqlens)
    sizes = (len(cu_seqlens) - 1, q.shape[1], k.shape[1], q.shape[2], window or 0)
    _backward(march)[q.dtype](byref(_Backward(*(x.data_ptr() for x in tensors), *sizes, scale, softcap or 0.0)))
    tell_attention("cpu_attention_backward", cu_seqlens, None, q.shape[1], q.shape[2], products=5)
    return dq, dk, dv


@functools.cache
def _backward(march: str) -> dict[torch.dtype, Callable[..., None]]:
    found = {}
    for dtype, suffix in DTYPES.items():
        found[dtype] = symbol = getattr(library(march), f"varlen_backward_{suffix}")
        symbol.argtypes, symbol.restype = [POINTER(_Backward)], None
    return found
