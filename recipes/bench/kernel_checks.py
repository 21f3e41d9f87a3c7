"""Every kernel of a backend against the reference on the same device: random cases, each a function that gives (got, want)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_v2.kernels import REFERENCE, Kernels

BLOCK = 16
# Of the largest number in a tensor: two roundings, one of them met by a norm before a rotation that cancels
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Setting:
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    small: bool = False  # for the interpreter

    def randn(self, *shape: int, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def both(self, call: Callable[..., tuple[Tensor, ...]], *given: Any) -> Pairs:
        return list(zip(call(self.kernels, *given), call(REFERENCE, *given), strict=True))


def norms(s: Setting) -> Pairs:
    pairs: Pairs = []
    for rows, dim in ((3, 100),) if s.small else ((257, 576), (1, 4096), (64, 5120)):
        x, residual, weight = s.randn(rows, dim), s.randn(rows, dim, seed=1), s.randn(dim, seed=2)
        apart = s.randn(rows, 2 * dim)[:, :dim]
        pairs += s.both(lambda k, *given: k.add_rms_norm(*given), x, residual, weight, 1e-5)
        pairs += s.both(lambda k, *given: (k.rms_norm(*given),), apart, weight, 1e-5)
    return pairs


def activation(s: Setting) -> Pairs:
    gate_up = 3 * (s.randn(3, 40) if s.small else s.randn(257, 3072))
    return s.both(lambda k: (k.silu_and_mul(gate_up),))


def cache_entry(s: Setting) -> Pairs:
    pairs: Pairs = []
    for heads, kv_heads, dim, half in ((4, 2, 20, 4),) if s.small else ((9, 3, 64, 32), (14, 2, 80, 40), (32, 8, 128, 32)):
        tokens = 5 if s.small else 129
        qkv = s.randn(tokens, heads + 2 * kv_heads, dim)
        generator = torch.Generator().manual_seed(3)
        positions = torch.randint(500, (tokens,), generator=generator).to(s.device)
        slots = torch.randperm(10 * BLOCK, generator=generator)[:tokens].to(s.device)
        angles = torch.arange(500)[:, None] * torch.rand(half, generator=generator)
        table = (angles.cos().to(s.device, s.dtype), angles.sin().to(s.device, s.dtype))
        weight = s.randn(dim, seed=4)
        for extra in ((), (table,), (table, weight, weight.flip(0), 1e-5)):
            pairs += s.both(_entered, s, qkv.split((heads, kv_heads, kv_heads), dim=1), slots, positions, extra)
    return pairs


def _entered(
    k: Kernels, s: Setting, qkv: Sequence[Tensor], slots: Tensor, positions: Tensor, extra: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """The rotated queries, and the pools that keys and values were written to."""
    num_kv_heads, dim = qkv[1].shape[1:]
    pools = [torch.zeros(10, BLOCK, num_kv_heads, dim, dtype=s.dtype, device=s.device) for _ in range(2)]
    return k.enter_attention(*qkv, *pools, slots, positions, *extra), *pools


def paged(s: Setting, chunks: list[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> tuple[Tensor, ...]:
    """chunks: (query tokens, context) of each request. The arguments of paged_attention up to the block tables; slots that
    nobody may look at hold NaN."""
    width = max(-(-context // BLOCK) for _, context in chunks)
    tables = 1 + torch.randperm(len(chunks) * width, generator=torch.Generator().manual_seed(5)).view(len(chunks), width)
    pools = [s.randn(1 + tables.numel(), BLOCK, kv_heads, dim, seed=seed) for seed in (6, 7)]
    within = torch.arange(width * BLOCK)
    for row, (_, context) in zip(tables, chunks):
        unused = (row[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[within >= context].to(s.device)
        for pool in pools:
            pool.flatten(0, 1)[unused] = float("nan")
            pool[0] = float("nan")
    lens = torch.tensor([0] + [n for n, _ in chunks]).cumsum(0).int().to(s.device)
    contexts = torch.tensor([context for _, context in chunks]).int().to(s.device)
    return s.randn(int(lens[-1]), heads, dim, seed=8), *pools, lens, contexts, tables.int().to(s.device)


def attention(s: Setting) -> Pairs:
    decode = [(1, 1 + 37 * i % 900) for i in range(64)]
    mixed = [(700, 700), (1, 5), (64, 1600), (1, 2000), (17, 17)]
    sinks = torch.linspace(-1, 2, 8, device=s.device)
    cases: list[tuple[list[tuple[int, int]], int, int, int, dict[str, Any]]]
    if s.small:
        cases = [([(1, 600), (1, 3)], 4, 2, 16, {}), ([(9, 20), (1, 5)], 8, 8, 20, {"window": 7, "softcap": 2.0, "sinks": sinks})]
    else:
        shapes = ((9, 3, 64), (14, 2, 80), (32, 8, 128), (8, 4, 256), (8, 1, 96))
        cases = [(chunks, *shape, {}) for shape in shapes for chunks in (decode, [(1, 5000), (1, 3)], mixed)]
        features = ({"window": 100}, {"softcap": 5.0}, {"sinks": sinks}, {"window": 600, "softcap": 2.0, "sinks": sinks})
        cases += [(chunks, 8, 2, 64, extra) for extra in features for chunks in (decode, [(1, 5000), (1, 3)], mixed)]
    pairs: Pairs = []
    for chunks, heads, kv_heads, dim, extra in cases:
        given = (*paged(s, chunks, heads, kv_heads, dim), dim**-0.5)
        pairs += s.both(lambda k, extra, *given: (k.paged_attention(*given, **extra),), extra, *given)
    return pairs


def attention_alone_and_together(s: Setting) -> Pairs:
    """Bit for bit: the last tokens of a prefill against the same as decodes, alone (keys shared out) and with others (not)."""
    length, head = (530, (4, 2, 16)) if s.small else (3000, (9, 3, 64))
    q, *pools, lens, contexts, tables = paged(s, [(length, length)], *head)
    scale = head[2] ** -0.5
    asked = 20 if s.small else length  # only the last queries
    whole = s.kernels.paged_attention(q[-asked:], *pools, (lens > 0).int() * asked, contexts, tables, scale)
    pairs: Pairs = []
    for at, others in ((length - 1, 0), (length - 7, 0), (length - 1, 7), (length - 1, 7 if s.small else 255)):
        rows = q[[at, *range(length - others, length)]] if others else q[at : at + 1]
        count = torch.arange(len(rows) + 1, dtype=torch.int32, device=s.device)
        contexts = torch.tensor([at + 1, *range(length - others + 1, length + 1)], dtype=torch.int32, device=s.device)
        got = s.kernels.paged_attention(rows, *pools, count, contexts[: len(rows)], tables.expand(len(rows), -1), scale)
        pairs.append((got[0], whole[at - length]))
    return pairs


def sampling(s: Setting) -> Pairs:
    """Tokens and both log-probs."""
    rows, vocab = (4, 300) if s.small else (64, 49152)
    logits = 3 * s.randn(rows, vocab).float()
    logits[:, 3] = logits[:, 7]
    logits[1] = 0
    generator = torch.Generator().manual_seed(9)
    banned = torch.rand(rows, vocab, generator=generator).to(s.device) < 0.3
    pairs: Pairs = []
    for t, top_k, top_p, min_p in (
        (1, 0, 1, 0),
        (0.7, 5, 1, 0),
        (1.3, 0, 0.9, 0),
        (1, 0, 1, 0.05),
        (0, 0, 1, 0),
        (1, 50, 0.5, 0.01),
    ):
        uniform = torch.rand(rows, dtype=torch.float64, generator=generator).to(s.device)
        limits = (
            torch.full((rows,), float(t), device=s.device),
            uniform,
            torch.full((rows,), top_k, device=s.device),
            torch.full_like(uniform, top_p),
            torch.full_like(uniform, min_p),
        )
        for edited in (None, logits.masked_fill(banned, -torch.inf)):
            got, want = s.kernels.sample(logits, edited, *limits), REFERENCE.sample(logits, edited, *limits)
            pairs += zip(got, want, strict=True)
    return pairs


CASES: dict[str, Callable[[Setting], Pairs]] = {
    case.__name__: case for case in (norms, activation, cache_entry, attention, attention_alone_and_together, sampling)
}
EXACT = {"attention_alone_and_together"}


def compare(name: str, setting: Setting) -> dict[str, float | bool]:
    """The largest difference, the share of numbers that are equal, and whether all are within the dtype's tolerance."""
    pairs = CASES[name](setting)
    gaps = [(got.double() - want.double()).abs() for got, want in pairs]
    ok = all(bool((gap <= _allowed(name, want)).all()) for gap, (_, want) in zip(gaps, pairs))  # not so for NaN
    equal = sum(int((gap == 0).sum()) for gap in gaps) / max(1, sum(gap.numel() for gap in gaps))
    return {"ok": ok, "largest": max((float(gap.max()) for gap in gaps if gap.numel()), default=0.0), "equal": equal}


def _allowed(name: str, want: Tensor) -> float:
    exact = name in EXACT or not want.is_floating_point()
    return 0.0 if exact else TOLERANCE[want.dtype] * float(want.abs().max())
