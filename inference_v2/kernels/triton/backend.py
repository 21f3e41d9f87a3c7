"""The host side of the kernels: shapes to grids and tile sizes. The one module that imports the others, and so triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from inference_v2.kernels.triton import attention, elementwise, sample

QUERY_ROWS = 16  # rows (tokens x heads that share a kv head) of a query tile; the least a matrix instruction takes
PARTITION = 512  # keys that a decode's programs share out among them
SPLIT_BYTES = 64 * 2**20  # of partial results
CHUNK = 4096  # logits of one program of the sampler
FEW_PROCESSORS = 4  # what the interpreter counts as, so that tests meet split and unsplit decodes


class TritonKernels:
    """The functions of `inference_v2.kernels.Kernels`, for tensors of one device."""

    def __init__(self, device: torch.device) -> None:
        self._processors = FEW_PROCESSORS
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        dim = x.shape[-1]
        rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, dim).contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(elementwise.rms_norm, (rows.shape[0],), rows, None, weight, y, None, rows.stride(0), eps, **_row(dim))
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, residual, dim = x.contiguous(), residual.contiguous(), x.shape[-1]
        y, total = torch.empty_like(x), torch.empty_like(x)
        _launch(elementwise.rms_norm, (x.numel() // dim,), x, residual, weight, y, total, dim, eps, **_row(dim))
        return y, total

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up, dim = gate_up.contiguous(), gate_up.shape[1] // 2
        y = torch.empty(gate_up.shape[0], dim, dtype=gate_up.dtype, device=gate_up.device)
        _launch(elementwise.silu_and_mul, (y.shape[0], triton.cdiv(dim, 1024)), gate_up, y, DIM=dim, BLOCK=1024)
        return y

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
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cos, sin = (None, None) if table is None else table
        grid = (q.shape[0], q.shape[1] + 2 * k.shape[1])
        _launch(
            elementwise.enter_attention, grid, q, k, v, out, k_pool, v_pool, slots, positions, cos, sin, q_norm, k_norm, eps,
            q.stride(0), k.stride(0), v.stride(0), Q_HEADS=q.shape[1], KV_HEADS=k.shape[1], DIM=q.shape[2],
            HALF=0 if cos is None else cos.shape[-1], BLOCK=triton.next_power_of_2(q.shape[2]), num_warps=1,
        )  # fmt: skip
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
    ) -> Tensor:
        q, (tokens, num_heads, dim), num_kv_heads = q.contiguous(), q.shape, k_pool.shape[2]
        sinks = None if sinks is None else sinks.float().contiguous()
        requests, block_size, group = context_lens.shape[0], k_pool.shape[1], num_heads // num_kv_heads
        is_decode = tokens == requests  # a request has a query or more
        per_tile = max(1, QUERY_ROWS // group)
        tiles = requests if is_decode else tokens // per_tile + requests
        partitions = triton.cdiv(block_tables.shape[1] * block_size, PARTITION)
        split = is_decode and partitions > 1 and requests * num_kv_heads < 2 * self._processors
        split = split and 4 * tokens * num_heads * partitions * dim <= SPLIT_BYTES
        out = torch.empty_like(q)
        shape = (tokens, num_heads, partitions)
        sizes = (shape, shape, (*shape, dim)) if split else ()
        parts = [torch.empty(size, dtype=torch.float32, device=q.device) for size in sizes]
        common = {"DIM": dim, "BLOCK_DIM": max(16, triton.next_power_of_2(dim)), "PARTITION": PARTITION, "Q_HEADS": num_heads}
        _launch(
            attention.attend, (tiles, num_kv_heads, partitions if split else 1), q, k_pool, v_pool, out,
            *(parts or (None, None, None)), cu_query_lens, context_lens, block_tables, sinks, requests, block_tables.stride(0),
            scale, softcap, window, KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, TOKENS=per_tile,
            ROWS=max(QUERY_ROWS, triton.next_power_of_2(group)), KEYS=_key_tile(common["BLOCK_DIM"], q.dtype), DECODE=is_decode,
            SPLIT=split, num_warps=8 if common["BLOCK_DIM"] > 128 else 4, num_stages=2, **common,
        )  # fmt: skip
        if split:
            _launch(attention.merge, (tokens, num_heads), *parts, context_lens, sinks, out, partitions, window, **common)
        return out

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
        logits, (rows, vocab) = logits.contiguous(), logits.shape
        source = logits if edited is None else edited.contiguous()
        chunk = min(CHUNK, triton.next_power_of_2(vocab))
        chunks = triton.cdiv(vocab, chunk)
        found = []
        for z in (logits,) if edited is None else (logits, source):
            dtypes = (torch.float32, torch.float64, torch.int32)
            peaks, sums, best = (torch.empty(rows, chunks, dtype=dtype, device=logits.device) for dtype in dtypes)
            _launch(sample.masses, (rows, chunks), z, temperature, peaks, sums, best, VOCAB=vocab, CHUNK=chunk, num_warps=8)
            found.append((peaks, sums, best))
        (peaks, sums, _), (source_peaks, source_sums, best) = found[0], found[-1]
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        logprobs, raw = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
        settings = (temperature, uniform, top_k, top_p, min_p)
        common = {"VOCAB": vocab, "CHUNK": chunk, "CHUNKS": chunks, "BLOCK": triton.next_power_of_2(chunks), "num_warps": 8}
        masses = (source_peaks, source_sums, ids, logprobs, raw)
        _launch(sample.draw, (rows,), logits, source, *settings, peaks, sums, best, *masses, **common)
        _launch(sample.draw_truncated, (rows,), logits, source, *settings, peaks, sums, *masses, **common)
        return ids, logprobs, raw


def _launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *arguments: Any, **constants: Any) -> None:
    """On the device of `x`, the first argument, whichever is current. An empty grid is no work."""
    if 0 not in grid:
        with torch.cuda.device_of(x):
            kernel[grid](x, *arguments, **constants)


def _heads(x: Tensor) -> Tensor:
    """[T, heads, D] whose tokens may lie apart, but whose heads are one behind the other."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _row(dim: int) -> dict[str, int]:
    """Sizes for one program a row of `dim` numbers."""
    block = triton.next_power_of_2(dim)
    return {"DIM": dim, "BLOCK": block, "num_warps": min(16, max(1, block // 512))}


def _key_tile(block_dim: int, dtype: torch.dtype) -> int:
    """Keys of a tile: as many as leave shared memory room for the next one. Depends on nothing that a batch changes."""
    return 64 if block_dim * dtype.itemsize <= 512 else 32
