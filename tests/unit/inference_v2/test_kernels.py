"""The reference kernels against plain formulas, and the properties the engine builds on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inference_v2.kernels import get_kernels
from inference_v2.kernels.reference import KEY_TILE

KERNELS = get_kernels("reference")
BLOCK = 16


def paged(k: Tensor, v: Tensor, num_requests: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [R, L, Hk, D] -> NaN-filled pools with them written in shuffled blocks, and the block tables."""
    requests, length = k.shape[:2]
    blocks = -(-length // BLOCK)
    tables = 1 + torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0)).view(requests, blocks)
    pools = [torch.full((1 + requests * blocks, BLOCK, *k.shape[2:]), float("nan"), dtype=k.dtype) for _ in range(2)]
    positions = torch.arange(length)
    for r in range(requests):
        slots = tables[r][positions // BLOCK] * BLOCK + positions % BLOCK
        KERNELS.write_kv(k[r], v[r], *pools, slots)
    return pools[0], pools[1], tables.int()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """One whole sequence: q [L, Hq, D], k and v [L, Hk, D]."""
    length, heads, head_dim = q.shape
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * head_dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], dim=-1)
    weights = scores.softmax(-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v.double()).float()


def attend(q: Tensor, pools: tuple, chunks: list[tuple[int, int, int]], **kwargs) -> Tensor:
    """chunks: (request, start, stop); q [R, L, Hq, D]. One call for all chunks, results concatenated."""
    k_pool, v_pool, tables = pools
    lens = torch.tensor([0] + [stop - start for _, start, stop in chunks]).cumsum(0).int()
    context = torch.tensor([stop for _, _, stop in chunks]).int()
    rows = torch.cat([q[r, start:stop] for r, start, stop in chunks])
    tables = tables[[r for r, _, _ in chunks]]
    return KERNELS.paged_attention(rows, k_pool, v_pool, lens, context, tables, q.shape[-1] ** -0.5, **kwargs)


def random_qkv(length: int, heads: int, kv_heads: int, head_dim: int, requests: int = 1, dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(requests, length, h, head_dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(
    "features", [{}, {"window": 24}, {"softcap": 2.0}, {"sinks": True}, {"window": 7, "sinks": True}], ids=str
)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (14, 2, 80), (40, 8, 16), (4, 1, 96), (20, 1, 8)])
def test_paged_attention_matches_the_formula(heads: int, kv_heads: int, head_dim: int, features: dict) -> None:
    length = 2 * KEY_TILE + 19
    q, k, v = random_qkv(length, heads, kv_heads, head_dim)
    features = features | ({"sinks": torch.linspace(-1, 2, heads)} if "sinks" in features else {})
    got = attend(q, paged(k, v), [(0, 0, 100), (0, 100, length - 1), (0, length - 1, length)], **features)
    want = plain_attention(q[0], k[0], v[0], features.get("window"), features.get("softcap"), features.get("sinks"))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_bits_do_not_depend_on_batch_or_chunks(dtype: torch.dtype, window: int | None) -> None:
    length = KEY_TILE + 50
    q, k, v = random_qkv(length, 6, 2, 32, requests=3, dtype=dtype)
    pools = paged(k, v)
    whole = attend(q, pools, [(1, 0, length)], window=window)
    for size in (1, 7, 64):
        chunks = [(r, start, min(start + size, length)) for start in range(0, length, size) for r in range(3)]
        together = attend(q, pools, chunks, window=window)
        mine = torch.cat([torch.full((stop - start,), r == 1) for r, start, stop in chunks])
        assert torch.equal(together[mine], whole)


def test_unwritten_slots_and_freed_blocks_never_reach_the_result() -> None:
    q, k, v = random_qkv(40, 4, 2, 16)
    k_pool, v_pool, tables = paged(k, v)
    want = attend(q, (k_pool, v_pool, tables), [(0, 39, 40)], window=10)
    k_pool[tables[0, :1].long()] = float("nan")  # keys 0 to 15 lie behind the window, and their block was freed
    v_pool[tables[0, :1].long()] = float("inf")
    tables = tables.clone()
    tables[0, 0] = 0
    got = attend(q, (k_pool, v_pool, tables), [(0, 39, 40)], window=10)
    assert torch.isfinite(got).all()
    assert torch.equal(got, want)


def test_a_nan_that_is_seen_is_not_hidden() -> None:
    q, k, v = random_qkv(20, 2, 1, 8)
    v[0, 3] = float("nan")
    got = attend(q, paged(k, v), [(0, 0, 20)])
    assert torch.isnan(got[3:]).all()


def test_no_tokens_give_no_rows() -> None:
    q, k, v = random_qkv(4, 2, 1, 8)
    pools = paged(k, v)
    empty = torch.zeros(1, dtype=torch.int32)
    got = KERNELS.paged_attention(q[0, :0], *pools[:2], empty, empty[:0], pools[2][:0], 1.0)
    assert got.shape == (0, 2, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_the_llama_module_bit_for_bit(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    x, residual = (3 * torch.randn(33, 48, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2))
    weight = module.weight.detach()
    assert torch.equal(KERNELS.rms_norm(x, weight, 1e-5), module(x))
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert torch.equal(normed, module(residual + x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [16, 8, 6])
def test_rope_is_the_module_rotation_bit_for_bit(rotary_dim: int, dtype: torch.dtype) -> None:
    """Whole heads and the partial rotation of phi3, at positions in any order."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(9, 4, 16, generator=generator).to(dtype), torch.randn(9, 2, 16, generator=generator).to(dtype)
    angles = torch.arange(50)[:, None] * torch.rand(rotary_dim // 2, generator=generator)
    positions = torch.tensor([7, 0, 49, 3, 3, 12, 1, 30, 8])
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    got = KERNELS.rope(q, k, cos, sin, positions)
    full = [torch.cat([table, table], dim=-1)[positions][None] for table in (cos, sin)]
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *full)
    for mine, theirs in zip(got, want):
        assert torch.equal(mine, theirs[0].transpose(0, 1))


def test_silu_and_mul_splits_gate_first() -> None:
    gate, up = (torch.randn(5, 12, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    got = KERNELS.silu_and_mul(torch.cat([gate, up], dim=-1))
    torch.testing.assert_close(got, torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=0)
    half = KERNELS.silu_and_mul(torch.cat([gate, up], dim=-1).bfloat16())
    assert torch.equal(half, torch.nn.functional.silu(gate.bfloat16()) * up.bfloat16())


def test_rows_do_not_depend_on_threads_or_row_count() -> None:
    x = 3 * torch.randn(301, 3072, generator=torch.Generator().manual_seed(0))
    weight = torch.ones(3072)
    functions = (KERNELS.silu_and_mul, lambda rows: KERNELS.rms_norm(rows, weight, 1e-5))
    alone = [torch.cat([f(row) for row in x.split(1)]) for f in functions]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            for f, want in zip(functions, alone):
                assert torch.equal(f(x), want)
                assert torch.equal(f(x[:171]), want[:171])
    finally:
        torch.set_num_threads(threads)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels='fast'; allowed: auto, reference"):
        get_kernels("fast")
