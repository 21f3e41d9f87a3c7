"""Every backend's kernels against plain formulas, against the reference, and the properties the engine builds on."""

from __future__ import annotations

import functools
import itertools
import os
import sys

import pytest
import torch
from cpu_builds import BUILDS
from torch import Tensor

from inference_v2.kernels import REFERENCE, Kernels, cpu_kernels, get_kernels, triton_kernels
from inference_v2.kernels.cpu import BuildError
from inference_v2.kernels.reference import KEY_TILE

KERNELS: Kernels = REFERENCE  # set for each test by the fixture `backend`
BLOCK = 16
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a process of test_triton.py: only the Triton kernels, on fewer numbers
BACKENDS = {"reference": lambda: REFERENCE} | {name: functools.partial(cpu_kernels, march) for name, march in BUILDS.items()}
if INTERPRETED:
    BACKENDS = {"triton": lambda: triton_kernels("cpu")}
SHAPES = ((9, 3, 64), (14, 2, 80), (40, 8, 16), (4, 1, 96), (20, 1, 8))  # heads, kv heads, head dim
FEATURES: tuple[dict, ...] = ({}, {"window": 24}, {"softcap": 2.0}, {"sinks": True}, {"window": 7, "sinks": True})
THREADS = (1,) if INTERPRETED else (1, 2, 5)
LONG = ((530, None), (600, 90)) if INTERPRETED else ((1200, None), (1200, 700), (513, None), (64, None))  # length, window


@pytest.fixture(autouse=True, params=list(BACKENDS))
def backend(request, monkeypatch) -> Kernels:
    """Every test runs with every backend."""
    try:
        kernels = BACKENDS[request.param]()
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(sys.modules[__name__], "KERNELS", kernels)
    return kernels


def paged(k: Tensor, v: Tensor, num_requests: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [R, L, Hk, D] -> NaN-filled pools with them written in shuffled blocks, and the block tables."""
    requests, length = k.shape[:2]
    blocks = -(-length // BLOCK)
    tables = 1 + torch.randperm(requests * blocks, generator=torch.Generator().manual_seed(0)).view(requests, blocks)
    pools = [torch.full((1 + requests * blocks, BLOCK, *k.shape[2:]), float("nan"), dtype=k.dtype) for _ in range(2)]
    positions = torch.arange(length)
    for r in range(requests):
        slots = tables[r][positions // BLOCK] * BLOCK + positions % BLOCK
        KERNELS.enter_attention(k[r], k[r], v[r], *pools, slots, positions)
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


def assert_equal(got: Tensor, want: Tensor) -> None:
    """In bf16 bit for bit, where every operation is rounded; in fp32 up to the order of a sum and a fused multiply-add. The
    reference is bit-equal in fp32 too."""
    if got.dtype == torch.bfloat16 or KERNELS is REFERENCE:
        assert torch.equal(got, want)
    else:
        torch.testing.assert_close(got, want, rtol=5e-7, atol=1e-6)


def random_qkv(length: int, heads: int, kv_heads: int, head_dim: int, requests: int = 1, dtype=torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(requests, length, h, head_dim, generator=generator).to(dtype) for h in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(
    ("shape", "features"), zip(SHAPES, FEATURES) if INTERPRETED else itertools.product(SHAPES, FEATURES), ids=str
)
def test_paged_attention_matches_the_formula(shape: tuple[int, int, int], features: dict) -> None:
    heads, kv_heads, head_dim = shape
    length = 67 if INTERPRETED else 2 * KEY_TILE + 19
    q, k, v = random_qkv(length, heads, kv_heads, head_dim)
    features = features | ({"sinks": torch.linspace(-1, 2, heads)} if "sinks" in features else {})
    got = attend(q, paged(k, v), [(0, 0, 40), (0, 40, length - 1), (0, length - 1, length)], **features)
    want = plain_attention(q[0], k[0], v[0], features.get("window"), features.get("softcap"), features.get("sinks"))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_bits_do_not_depend_on_batch_or_chunks(dtype: torch.dtype, window: int | None) -> None:
    length = 71 if INTERPRETED else KEY_TILE + 50
    q, k, v = random_qkv(length, 6, 2, 32, requests=3, dtype=dtype)
    pools = paged(k, v)
    whole = attend(q, pools, [(1, 0, length)], window=window)
    for size in (7, 64) if INTERPRETED else (1, 7, 64):
        chunks = [(r, start, min(start + size, length)) for start in range(0, length, size) for r in range(3)]
        together = attend(q, pools, chunks, window=window)
        mine = torch.cat([torch.full((stop - start,), r == 1) for r, start, stop in chunks])
        assert torch.equal(together[mine], whole)


@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_of_a_prompt_that_share_its_blocks_have_the_bits_they_have_alone(dtype: torch.dtype, window: int | None) -> None:
    heads, kv_heads, head_dim = (3, 1, 32) if INTERPRETED else (6, 2, 64)
    lengths = [150, 130, 129, 128, 160, 40, 7] if INTERPRETED else [600, 577, 580, 640, 600, 513, 512, 90, 64, 17]
    common = [128, 128, 128, 112, 16, 32, 0] if INTERPRETED else [560, 560, 576, 576, 128, 512, 512, 64, 64, 16]
    q, k, v = random_qkv(max(lengths), heads, kv_heads, head_dim, len(lengths), dtype)
    for r, n in enumerate(common):
        k[r, :n], v[r, :n] = k[0, :n], v[0, :n]
    k_pool, v_pool, tables = paged(k, v)
    shared = tables.clone()
    for r, n in enumerate(common):
        shared[r, : n // BLOCK] = tables[0, : n // BLOCK]
    chunks = [(r, n - 1, n) for r, n in enumerate(lengths)]
    alone = torch.cat([attend(q, (k_pool, v_pool, tables), [chunk], window=window) for chunk in chunks])
    threads = torch.get_num_threads()
    try:
        for count in THREADS:
            torch.set_num_threads(count)
            assert torch.equal(attend(q, (k_pool, v_pool, shared), chunks, window=window), alone)
    finally:
        torch.set_num_threads(threads)


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
def test_norm_is_the_llama_module(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    x, residual = (3 * torch.randn(33, 48, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (1, 2))
    weight = module.weight.detach()
    assert_equal(KERNELS.rms_norm(x, weight, 1e-5), module(x))
    normed, total = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    assert_equal(normed, module(residual + x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary_dim", [16, 8, 6])
def test_rope_is_the_module_rotation(rotary_dim: int, dtype: torch.dtype) -> None:
    """Whole heads and the partial rotation of phi3, at positions in any order."""
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(9, 4, 16, generator=generator).to(dtype), torch.randn(9, 2, 16, generator=generator).to(dtype)
    angles = torch.arange(50)[:, None] * torch.rand(rotary_dim // 2, generator=generator)
    positions = torch.tensor([7, 0, 49, 3, 3, 12, 1, 30, 8])
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    v, slots = torch.randn(9, 2, 16, generator=generator).to(dtype), torch.randperm(24)[:9]
    k_pool, v_pool = torch.full((3, 8, 2, 16), float("nan"), dtype=dtype), torch.full((3, 8, 2, 16), float("nan"), dtype=dtype)
    qkv = torch.cat([q, k, v], dim=1)  # slices of one tensor, as the decoder gives them
    rotated = KERNELS.enter_attention(*qkv.split([4, 2, 2], dim=1), k_pool, v_pool, slots, positions, (cos, sin))
    got = (rotated, k_pool.flatten(0, 1)[slots])
    assert torch.equal(v_pool.flatten(0, 1)[slots], v)
    full = [torch.cat([table, table], dim=-1)[positions][None] for table in (cos, sin)]
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *full)
    assert k_pool.isnan().sum() == v_pool.isnan().sum() == (24 - 9) * 2 * 16
    for mine, theirs in zip(got, want):
        assert_equal(mine, theirs[0].transpose(0, 1))


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
        for count in THREADS:
            torch.set_num_threads(count)
            for f, want in zip(functions, alone):
                assert torch.equal(f(x), want)
                assert torch.equal(f(x[:171]), want[:171])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80, 20])
def test_heads_are_normed_before_they_are_rotated_and_written(head_dim: int, norms: bool, dtype: torch.dtype) -> None:
    """Against the reference, on slices of a wider tensor, with as many tokens as make threads share them."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(21, 8, head_dim, generator=generator).to(dtype)
    angles = torch.arange(30)[:, None] * torch.rand(head_dim // 2, generator=generator)
    table = (angles.cos().to(dtype), angles.sin().to(dtype))
    weights = [torch.rand(head_dim, generator=generator).to(dtype) if norms else None for _ in range(2)]
    positions, slots = torch.randint(30, (21,), generator=generator), torch.randperm(32, generator=generator)[:21]
    found = []
    for kernels in (KERNELS, REFERENCE):
        pools = [torch.zeros(4, 8, 2, head_dim, dtype=dtype) for _ in range(2)]
        q = kernels.enter_attention(*qkv.split([4, 2, 2], dim=1), *pools, slots, positions, table, *weights, 1e-5)
        found.append((q, *pools))
    for got, want in zip(*found):
        assert_equal(got, want)


@pytest.mark.parametrize(("length", "window"), LONG)
def test_long_decodes_have_the_bits_of_a_prefill_on_any_number_of_threads(length: int, window: int | None) -> None:
    """A few long decodes are cut into pieces for threads to share; a prefill of the same tokens is not."""
    q, k, v = random_qkv(length, 6, 2, 32, dtype=torch.bfloat16)
    pools = paged(k, v)
    whole = attend(q, pools, [(0, 0, length)], window=window)
    threads = torch.get_num_threads()
    try:
        for count in THREADS:
            torch.set_num_threads(count)
            for at in (0, length // 2, length - 1):
                assert torch.equal(attend(q, pools, [(0, at, at + 1)], window=window)[0], whole[at])
            assert torch.equal(attend(q, pools, [(0, 0, length)], window=window), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (70, 48), (33, 100), (1, 32), (200, 577)])
def test_packed_products_are_exact_and_a_row_is_alone_what_it_is_in_a_batch(
    out_features: int, in_features: int, bias: bool, dtype: torch.dtype
) -> None:
    if KERNELS.pack_linear is None:
        pytest.skip("this build has no packed product")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    added = torch.randn(out_features, generator=generator).to(dtype) if bias else None
    x = torch.randn(101, in_features + 3, generator=generator).to(dtype)[:, :in_features]  # rows lie apart
    want = x.double() @ weight.double().T + (0 if added is None else added.double())
    product = KERNELS.pack_linear(weight, added, out_dtype=torch.float32)
    weight.fill_(float("nan"))  # the copy is private
    whole = product(x)
    torch.testing.assert_close(whole.double(), want, rtol=0, atol=2e-6 * float(want.abs().max()))
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 15, 16, 17, 31, 32, 33, 48, 100):
        assert torch.equal(product(x[:rows]), whole[:rows])
        assert torch.equal(product(x[101 - rows :]), whole[101 - rows :])
    rounded = KERNELS.pack_linear(want.new_zeros(out_features, in_features).to(dtype), added)(x)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, torch.zeros_like(rounded) + (0 if added is None else added))


def test_a_weight_that_is_a_view_is_packed_as_what_it_shows_and_another_dtype_is_refused() -> None:
    if KERNELS.pack_linear is None:
        pytest.skip("this build has no packed product")
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(512, 700, generator=generator).bfloat16().t(), torch.randn(5, 512, generator=generator).bfloat16()
    got = KERNELS.pack_linear(weight, None, out_dtype=torch.float32)(x)
    torch.testing.assert_close(got, x.float() @ weight.float().t(), rtol=0, atol=1e-3)
    with pytest.raises(ValueError, match=r"x in torch\.float32; allowed: torch\.bfloat16"):
        KERNELS.pack_linear(weight, None)(x.float())
    with pytest.raises(ValueError, match=r"x in torch\.bfloat16; allowed: torch\.float32"):
        KERNELS.pack_linear(weight.float(), None)(x)


def test_tensors_that_cpp_would_misread_are_refused() -> None:
    if KERNELS.name != "cpu":
        pytest.skip("other backends check on their own")
    q, k, v = random_qkv(4, 2, 1, 8)
    pools = [torch.zeros(1, 8, 1, 8) for _ in range(2)]
    slots = positions = torch.arange(4)
    with pytest.raises(ValueError, match="one dtype"):
        KERNELS.enter_attention(q[0], k[0], v[0].bfloat16(), *pools, slots, positions)
    with pytest.raises(ValueError, match=r"allowed: torch\.float32"):
        KERNELS.enter_attention(q[0], k[0], v[0], pools[0].bfloat16(), pools[1], slots, positions)
    with pytest.raises(ValueError, match=r"allowed: torch\.int64"):
        KERNELS.enter_attention(q[0], k[0], v[0], *pools, slots.int(), positions)
    with pytest.raises(ValueError, match="contiguous"):
        KERNELS.rms_norm(q[0, :, 0], torch.ones(16)[::2], 1e-5)


def test_a_product_next_to_onednn_leaves_its_tiles_alone() -> None:
    """Both configure the tile registers of a thread, and oneDNN remembers what it configured."""
    if KERNELS.pack_linear is None:
        pytest.skip("this build has no packed product")
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 160, generator=generator).bfloat16() for n in (96, 50))
    want = torch.nn.functional.linear(x, weight)
    for rows in (3, 17, 50):
        KERNELS.pack_linear(weight, None)(x[:rows])
        assert torch.equal(torch.nn.functional.linear(x, weight), want)


@pytest.mark.parametrize("vocab", [257] if INTERPRETED else [1000, 257, 31])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1, 0, 1, 0), (0.7, 5, 1, 0), (1.3, 0, 0.9, 0), (1, 0, 1, 0.05), (0, 0, 1, 0), (1, 50, 0.5, 0.01), (1e-30, 0, 1, 0),
     (5, 0, 0.999, 0), (1, 10**9, 0.5, 0.9)],
)  # fmt: skip
def test_tokens_and_logprobs_are_the_references(temperature: float, top_k: int, top_p: float, min_p: float, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = 8 if INTERPRETED else 64
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits[:, 3] = logits[:, 7]  # a tie
    logits[5] = 0  # all tokens alike
    logits[6, : vocab // 2] = -torch.inf
    limits = (torch.full((rows,), float(temperature)), torch.rand(rows, dtype=torch.float64, generator=generator),
              torch.full((rows,), top_k), torch.full((rows,), top_p, dtype=torch.float64),
              torch.full((rows,), min_p, dtype=torch.float64))  # fmt: skip
    for edited in (None, logits.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.3, -torch.inf)):
        got, want = KERNELS.sample(logits, edited, *limits), REFERENCE.sample(logits, edited, *limits)
        assert torch.equal(got[0], want[0])
        for mine, theirs in zip(got[1:], want[1:]):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(0, 1, 0), (700, 1, 0), (0, 0.95, 0), (5000, 0.9, 1e-3)])
def test_a_large_vocabulary_full_of_ties(top_k: int, top_p: float, min_p: float) -> None:
    """Ids in several pieces of a fast sampler, and many on the threshold: the lowest of those are kept."""
    generator = torch.Generator().manual_seed(2)
    rows, vocab = 3, 9001
    logits = torch.randn(rows, vocab, generator=generator).mul(2).round() / 2
    limits = (torch.full((rows,), 0.8), torch.tensor([0.1, 0.7, 0.9999], dtype=torch.float64), torch.full((rows,), top_k),
              torch.full((rows,), top_p, dtype=torch.float64), torch.full((rows,), min_p, dtype=torch.float64))  # fmt: skip
    got, want = KERNELS.sample(logits, None, *limits), REFERENCE.sample(logits, None, *limits)
    assert torch.equal(got[0], want[0])
    for mine, theirs in zip(got[1:], want[1:]):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("temperature", "top_p"), [(0, 1), (1, 1), (1, 0.9)])
def test_logits_that_are_not_finite_give_a_logprob_that_is_not(temperature: float, top_p: float) -> None:
    logits = torch.zeros(3, 300)
    logits[0, 5] = torch.nan
    logits[1] = -torch.inf
    wide = torch.full((3,), 0.5, dtype=torch.float64)
    limits = (torch.full((3,), float(temperature)), wide, wide.long(), wide + (top_p - 0.5), wide * 0)
    ids, logprobs, _ = KERNELS.sample(logits, None, *limits)
    assert ((ids >= 0) & (ids < 300)).all()
    assert torch.isfinite(logprobs).tolist() == [False, False, True]


def test_float16_and_other_devices_get_the_reference_and_a_backend_asked_for_by_name_says_why_not() -> None:
    assert get_kernels("auto", "cpu", torch.float16) is REFERENCE
    assert get_kernels("auto", "cpu", torch.bfloat16).name == "cpu"
    with pytest.raises(ValueError, match=r"kernels=cpu with device=cpu, dtype=float16; allowed: .* kernels=auto"):
        get_kernels("cpu", "cpu", torch.float16)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels='fast'; allowed: auto, reference, cpu, triton"):
        get_kernels("fast")
