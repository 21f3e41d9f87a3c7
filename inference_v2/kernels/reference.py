"""The kernels in plain PyTorch.

Rounding follows the Hugging Face modules step by step, so that bf16 results agree with the training forward nearly bit for bit.
No result depends on what else is in the batch: attention works on tiles of a fixed shape, aligned to absolute key positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

QUERY_ROWS = 16  # rows (query tokens x heads that share a kv head) of one attention tile, at least one token
KEY_TILE = 128  # keys of one attention tile
TILE_ELEMENTS = 1 << 22  # fp32 elements of gathered keys held at once (16 MiB, the values again as much)
FAR = -1e30  # running maximum before any key was seen: finite, so that FAR - FAR is 0 and not NaN


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [*, D], weight [D] -> [*, D]: normalised in fp32, rounded to x's dtype, then multiplied by the weight (Llama's order;
    https://arxiv.org/abs/1910.07467)."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(residual + x), residual + x); the sum is rounded to the activation dtype first."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def rope(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """Rotate the first `rot` of each head's dimensions, half-split pairing (i, i + rot / 2) (https://arxiv.org/abs/2104.09864).

    x [T, heads, D]; cos, sin [P, rot / 2] in the activation dtype; positions [T]. Returns a new tensor.
    """
    cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)  # [T, 1, rot / 2]
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def enter_attention(
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
    """All that lies between the qkv projection and attention: norms of each head, rotation, and the cache write.

    q [T, Hq, D], k and v [T, Hk, D], possibly slices of one tensor; pools [blocks, block_size, Hk, D]; token t goes to slot
    `slots[t]` = block * block_size + offset. `table` is (cos, sin) of `rope`, None for layers without positions; `q_norm`,
    `k_norm` [D] are rms norms over the head dimension. Returns q, normed and rotated.
    """
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if table is not None:
        q, k = rope(q, *table, positions), rope(k, *table, positions)
    k_pool.flatten(0, 1).index_copy_(0, slots, k)
    v_pool.flatten(0, 1).index_copy_(0, slots, v)
    return q


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]: silu of the first half, rounded, times the second (https://arxiv.org/abs/2002.05202).

    Written with exp: F.silu takes another code path for the last elements of a thread's share, so that a token's bits would
    depend on the batch. In bf16 the two are equal.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def paged_attention(
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
    """Causal attention of ragged queries over a paged cache; this step's keys and values are already in it.

    q [T, Hq, D]; pools [blocks, block_size, Hk, D]; cu_query_lens [R + 1]; context_lens [R]; block_tables [R, M]. Request r's
    last query is at position context_lens[r] - 1; a query at p sees the keys p - window < i <= p. `softcap` c maps a score s to
    c * tanh(s / c); `sinks` [Hq] are logits that take part in the softmax without a value. Returns [T, Hq, D].

    Online softmax in fp32 over key tiles (https://arxiv.org/abs/2205.14135). Whatever lies in unseen slots, NaN included,
    never reaches the result.
    """
    if q.shape[0] == 0:
        return torch.empty_like(q)
    num_kv_heads, head_dim = k_pool.shape[2:]
    group = q.shape[1] // num_kv_heads
    tiles = _query_tiles(cu_query_lens.long(), context_lens.long(), max(1, QUERY_ROWS // group), window)
    out = torch.empty_like(q)
    step = max(1, TILE_ELEMENTS // (KEY_TILE * num_kv_heads * head_dim))
    for start in range(0, tiles.requests.shape[0], step):
        part = tiles.select(slice(start, start + step))
        rows = q[part.tokens].unflatten(2, (num_kv_heads, group))  # [N, tokens, Hk, group, D]
        rows = rows.permute(0, 2, 1, 3, 4).flatten(2, 3).float()  # [N, Hk, rows, D]
        sink_rows = None if sinks is None else sinks.float().view(num_kv_heads, 1, group).expand(-1, part.tokens.shape[1], -1)
        seen = _attend(rows, k_pool, v_pool, part, block_tables.long(), group, scale, window, softcap, sink_rows)
        seen = seen.unflatten(2, (-1, group)).permute(0, 2, 1, 3, 4).flatten(2, 3)  # [N, tokens, Hq, D]
        out[part.tokens[part.real]] = seen[part.real].to(q.dtype)
    return out


@dataclass(frozen=True)
class _Tiles:
    """N query tiles: up to `tokens` consecutive queries of one request each, those with the most key tiles first."""

    requests: Tensor  # [N]
    tokens: Tensor  # [N, tokens] rows of q
    positions: Tensor  # [N, tokens]
    real: Tensor  # [N, tokens] bool: False pads the last tile of a request
    first_key_tile: Tensor  # [N]
    num_key_tiles: Tensor  # [N]

    def select(self, part: slice | Tensor) -> _Tiles:
        return _Tiles(self.requests[part], self.tokens[part], self.positions[part], self.real[part],
                      self.first_key_tile[part], self.num_key_tiles[part])  # fmt: skip


def _query_tiles(cu_query_lens: Tensor, context_lens: Tensor, tokens_per_tile: int, window: int | None) -> _Tiles:
    query_lens = cu_query_lens.diff()
    counts = (query_lens + tokens_per_tile - 1) // tokens_per_tile  # tiles of each request
    requests = torch.repeat_interleave(counts)
    offsets = torch.arange(requests.shape[0], device=requests.device) - (counts.cumsum(0) - counts)[requests]
    steps = offsets[:, None] * tokens_per_tile + torch.arange(tokens_per_tile, device=requests.device)
    real = steps < query_lens[requests, None]
    steps = torch.minimum(steps, query_lens[requests, None] - 1)
    positions = (context_lens - query_lens)[requests, None] + steps
    first_key = torch.zeros_like(requests) if window is None else (positions[:, 0] - window + 1).clamp(min=0)
    first_key_tile = first_key // KEY_TILE
    num_key_tiles = positions[:, -1] // KEY_TILE - first_key_tile + 1
    tiles = _Tiles(requests, cu_query_lens[requests, None] + steps, positions, real, first_key_tile, num_key_tiles)
    return tiles.select(num_key_tiles.argsort(descending=True, stable=True))


def _attend(
    rows: Tensor, k_pool: Tensor, v_pool: Tensor, tiles: _Tiles, block_tables: Tensor, group: int, scale: float,
    window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """rows [N, Hk, rows, D] fp32 -> [N, Hk, rows, D] fp32."""
    block_size = k_pool.shape[1]
    peak = rows.new_full(rows.shape[:3], FAR) if sinks is None else sinks.flatten(1).expand(rows.shape[:3]).clone()
    mass = torch.zeros_like(peak) if sinks is None else torch.ones_like(peak)
    total = torch.zeros_like(rows)
    row_positions = tiles.positions.repeat_interleave(group, dim=1).unsqueeze(-1)  # [N, rows, 1]
    within = torch.arange(KEY_TILE, device=rows.device)
    num_key_tiles = tiles.num_key_tiles.tolist()
    for j in range(num_key_tiles[0]):
        n = sum(count > j for count in num_key_tiles)  # sorted: the first n tiles still have keys
        keys = (tiles.first_key_tile[:n, None] + j) * KEY_TILE + within  # [n, KEY_TILE]
        visible = keys[:, None] <= row_positions[:n]  # [n, rows, KEY_TILE]
        if window is not None:
            visible &= keys[:, None] > row_positions[:n] - window
        blocks = block_tables[tiles.requests[:n, None], (keys // block_size).clamp(max=block_tables.shape[1] - 1)]
        slots = blocks * block_size + keys % block_size
        seen = visible.any(1)  # [n, KEY_TILE]
        k, v = _gather(k_pool, slots, seen), _gather(v_pool, slots, seen)
        scores = torch.bmm(rows[:n].flatten(0, 1), k.transpose(1, 2)).unflatten(0, (n, -1)) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores += torch.zeros(visible.shape, device=rows.device).masked_fill_(~visible, float("-inf"))[:, None]
        new_peak = torch.maximum(peak[:n], scores.amax(-1))
        weights = torch.exp(scores - new_peak.unsqueeze(-1))
        shrink = torch.exp(peak[:n] - new_peak)
        mass[:n] = mass[:n] * shrink + weights.sum(-1)
        total[:n] = total[:n] * shrink.unsqueeze(-1) + torch.bmm(weights.flatten(0, 1), v).unflatten(0, (n, -1))
        peak[:n] = new_peak
    return total / mass.unsqueeze(-1)


def _gather(pool: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
    """pool [blocks, block_size, Hk, D], slots and seen [n, keys] -> [n * Hk, keys, D] fp32, zero where not seen: a masked key
    has weight 0, and 0 times the NaN of an unwritten slot would be NaN. Hence a mask over bits, not over values."""
    bits = {2: torch.int16, 4: torch.int32}[pool.dtype.itemsize]
    found = pool.flatten(0, 1).flatten(1).index_select(0, slots.flatten())  # [n * keys, Hk * D]
    found.view(bits).bitwise_and_(-seen.flatten().to(bits).unsqueeze(1))  # -1 has all bits set
    heads = found.view(*slots.shape, *pool.shape[2:]).transpose(1, 2)  # [n, Hk, keys, D]
    return heads.to(torch.float32, memory_format=torch.contiguous_format).flatten(0, 1)
