"""Attention over packed sequences: the rollout's bits forward, plain autograd's gradients backward."""

from __future__ import annotations

import pytest
import torch
from cpu_builds import BUILDS
from torch import Tensor

from inference_v2.kernels import cpu_kernels
from inference_v2.kernels.cpu.varlen import token_tables, varlen_backward, varlen_forward

EACH_BUILD = pytest.mark.parametrize("march", BUILDS.values(), ids=BUILDS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
CU_SEQLENS = torch.tensor([0, 1, 1, 70, 71, 135, 300])  # one token, none, a tile and a bit, exactly a tile, two and a half


def random_tensors(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v, d_out over the tokens of CU_SEQLENS."""
    generator = torch.Generator().manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(int(CU_SEQLENS[-1]), h, head_dim, generator=generator).to(dtype) for h in counts]


def plain_scores(q: Tensor, k: Tensor, window: int | None, softcap: float | None) -> Tensor:
    """[Hq, L, L] of one sequence, -inf where a key is not seen."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    return scores.masked_fill((distance < 0) | (distance >= (window or len(q))), float("-inf"))


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp), sequence by sequence."""
    outs, sums = [], []
    for start, stop in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        scores = plain_scores(q[start:stop], k[start:stop], window, softcap)
        values = v[start:stop].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(sums)


def gradients(q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, march: str = "native", **features) -> list[Tensor]:
    """(out, lse, dq, dk, dv) of the kernels."""
    scale = q.shape[-1] ** -0.5
    out, lse = varlen_forward(q, k, v, CU_SEQLENS, token_tables(CU_SEQLENS), scale, march=march, **features)
    return [out, lse, *varlen_backward(d_out, q, k, v, out, lse, CU_SEQLENS, scale, march=march, **features)]


@EACH_BUILD
@pytest.mark.parametrize("features", [{}, {"window": 2}, {"window": 64}, {"window": 65}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (5, 1, 40), (2, 2, 128), (4, 2, 8)])
def test_the_gradients_are_those_of_plain_attention(heads, kv_heads, head_dim, features, march):
    q, k, v, d_out = random_tensors(heads, kv_heads, head_dim)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = plain_attention(*leaves, features.get("window"), features.get("softcap"))
    wanted = [out, lse, *torch.autograd.grad(out, leaves, d_out.double())]
    for given, expected in zip(gradients(q, k, v, d_out, march, **features), wanted, strict=True):
        torch.testing.assert_close(given.double(), expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_bf16_gradients_are_those_of_fp32_rounded_once():
    """The same arithmetic on widened inputs; only the forward's rounded output enters differently."""
    tensors = random_tensors(6, 2, 64, torch.bfloat16)
    wide = gradients(*(x.float() for x in tensors))
    for given, expected in zip(gradients(*tensors), wide, strict=True):
        torch.testing.assert_close(given.float(), expected, rtol=0, atol=6e-3 * expected.abs().max().item())


@DTYPES
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_forward_has_the_bits_of_a_rollout(dtype, window, block_size):
    """Token by token over a paged cache whose blocks lie in any order."""
    q, k, v, _ = random_tensors(6, 2, 64, dtype)
    features = {"window": window}
    trained, _ = varlen_forward(q, k, v, CU_SEQLENS, token_tables(CU_SEQLENS), 0.125, **features)
    start, stop = CU_SEQLENS[-2:].tolist()
    length = stop - start
    blocks = -(-length // block_size)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(1))
    slots = order[torch.arange(length) // block_size] * block_size + torch.arange(length) % block_size
    pools = [torch.full((blocks * block_size, *x.shape[1:]), float("nan"), dtype=dtype) for x in (k, v)]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[slots] = x[start:stop]
    pools = [pool.view(blocks, block_size, *pool.shape[1:]) for pool in pools]
    attend, table, one = cpu_kernels().paged_attention, order[None].int(), torch.tensor([0, 1])
    for position in (0, 1, 63, 64, length - 1):
        row = q[start + position : start + position + 1]
        decoded = attend(row, *pools, one, torch.tensor([position + 1]), table, 0.125, **features)
        assert torch.equal(decoded[0], trained[start + position])


@DTYPES
def test_bits_do_not_depend_on_threads_or_neighbours(dtype):
    tensors = random_tensors(6, 2, 64, dtype)
    alone = gradients(*tensors)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for given, expected in zip(gradients(*tensors), alone, strict=True):
            assert torch.equal(given, expected)
    finally:
        torch.set_num_threads(threads)
    others = [torch.cat([x[:71], torch.zeros_like(x[71:135]), x[135:]]) for x in tensors]
    for given, expected in zip(gradients(*others), alone, strict=True):
        assert torch.equal(given[:71], expected[:71])
        assert torch.equal(given[135:], expected[135:])


def test_a_nan_stays_in_its_sequence():
    tensors = random_tensors(2, 1, 16)
    expected = gradients(*tensors)
    for x in tensors:
        x[100:] = torch.where(torch.arange(100, 300)[:, None, None] < 135, float("nan"), x[100:])
    for given, finite in zip(gradients(*tensors), expected, strict=True):
        assert torch.isnan(given[100:135]).any()
        assert torch.equal(given[:71], finite[:71])
        assert torch.equal(given[135:], finite[135:])
