"""From fp32 logits to tokens and both log-probs.

Order: allowed / bad ids, min_new_tokens, penalties, temperature, top-k, top-p, min-p, draw. One uniform a token, and an
inverse-CDF walk in token-id order. Nothing depends on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from inference_v2.types import SamplingParams

ROWS_AT_ONCE = 8  # rows of a pass: their temporaries stay in the CPU's cache
SEGMENT = 256  # tokens of one step of the coarse walk
MIN_CANDIDATES = 256  # tokens looked at first under truncation
MORE_CANDIDATES = 16  # times as many where those do not decide
MASS_SLACK = 1e-7  # a mass of top_p up to fp32 rounding is reached


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw. `suppressed` ids are those that `min_new_tokens` rules out at this place."""

    sampling: SamplingParams
    key: int
    sample_index: int
    tokens: Seq[int]  # prompt and output so far
    num_prompt: int
    suppressed: Collection[int] = ()

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0.0

    @property
    def is_truncated(self) -> bool:
        p = self.sampling
        return not self.is_greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)

    @property
    def is_penalised(self) -> bool:
        p = self.sampling
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    @property
    def is_edited(self) -> bool:
        """Its logits are changed before the temperature."""
        p = self.sampling
        return p.allowed_token_ids is not None or bool(p.bad_token_ids) or bool(self.suppressed) or self.is_penalised


@dataclass(frozen=True, slots=True)
class Drawn:
    """Per row: the token, its log-prob under the distribution it was drawn from, and log_softmax(z / temperature) of it.
    Not finite where the logits were not, or where no id was left to draw."""

    token_ids: list[int]
    logprobs: list[float]
    logprobs_raw: list[float]


def draw(logits: Tensor, draws: Seq[Draw]) -> Drawn:
    """logits fp32 [S, V], cut to the tokenizer's size; row s belongs to draws[s]."""
    kinds = [(d.is_greedy, d.is_edited, d.is_truncated) for d in draws]
    token_ids = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(len(draws), dtype=torch.float32, device=logits.device)
    raw = torch.empty(len(draws), dtype=torch.float32, device=logits.device)
    for kind in dict.fromkeys(kinds):
        rows = [i for i, other in enumerate(kinds) if other == kind]
        for start in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[start : start + ROWS_AT_ONCE]
            index = torch.tensor(part, device=logits.device)
            out = _draw_alike(logits[index], [draws[i] for i in part], *kind)
            for target, values in zip((token_ids, logprobs, raw), out):
                target[index] = values
    return Drawn(token_ids.tolist(), logprobs.tolist(), raw.tolist())


def uniforms(draws: Seq[Draw]) -> np.ndarray:
    """u in [0, 1) with 53 bits, a pure function of (seed, request key, sample index, position of the token)."""
    fields = [(d.sampling.seed, d.key, d.sample_index, len(d.tokens)) for d in draws]
    words = np.array([[value & 0xFFFFFFFFFFFFFFFF for value in row] for row in fields], dtype=np.uint64).reshape(-1, 4)
    state = np.zeros(len(fields), dtype=np.uint64)
    for column in words.T:
        state = _mix((state ^ column) + np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, https://doi.org/10.1145/2660193.2660195): a bijection of 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw_alike(
    z: Tensor, draws: list[Draw], greedy: bool, edited: bool, truncated: bool
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A few rows of one kind: (token ids, logprobs, raw logprobs)."""
    temperature = torch.tensor([max(d.sampling.temperature, 1e-30) for d in draws], dtype=torch.float32, device=z.device)
    if greedy:
        temperature.fill_(1.0)
    plain = _Scaled.of(z, temperature)
    scaled = _Scaled.of(_edit(z, draws), temperature) if edited else plain
    if greedy:
        ids = scaled.values.argmax(-1)
        logprobs = torch.where(scaled.mass.isfinite(), 0.0, torch.nan)
    else:
        u = torch.from_numpy(uniforms(draws)).to(z.device)
        ids, mass = _truncated_walk(scaled, u, draws) if truncated else _walk(scaled, u)
        logprobs = scaled.at(ids) - mass.log()
    return ids, logprobs.float(), (plain.at(ids) - plain.mass.log()).float()


@dataclass(frozen=True, slots=True)
class _Scaled:
    """values = (z - max z) / temperature <= 0, so that nothing overflows; weights = exp(values) in segments of the vocabulary;
    sums over the segments and the whole in fp64."""

    values: Tensor  # [R, V] fp32
    weights: Tensor  # [R, V / SEGMENT, SEGMENT] fp32, zeros at the end
    sums: Tensor  # [R, V / SEGMENT] fp64

    @classmethod
    def of(cls, z: Tensor, temperature: Tensor) -> _Scaled:
        values = (z - z.amax(-1, keepdim=True)).div_(temperature[:, None])
        weights = F.pad(values.exp(), (0, -z.shape[-1] % SEGMENT)).unflatten(-1, (-1, SEGMENT))
        return cls(values, weights, weights.sum(-1, dtype=torch.float64))

    def rows(self, index: Tensor) -> _Scaled:
        return _Scaled(self.values[index], self.weights[index], self.sums[index])

    @property
    def mass(self) -> Tensor:  # [R] fp64
        return self.sums.sum(-1)

    def at(self, ids: Tensor) -> Tensor:  # [R] fp64
        return self.values.gather(-1, ids[:, None]).squeeze(-1).double()


def _pick(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """weights fp64 [R, N], not all zero; u [R] in fp64 counts in units of weight. Returns the first n whose cumulative weight
    exceeds u, and u minus the weight before it. An n of zero weight is never picked."""
    cumulative = weights.cumsum(-1)
    below_end = torch.nextafter(cumulative[:, -1], cumulative.new_zeros(()))
    u = torch.minimum(u, below_end).clamp(min=0.0)[:, None]  # rounding must not leave the range
    n = torch.searchsorted(cumulative, u, right=True).clamp(max=weights.shape[-1] - 1)
    return n.squeeze(-1), (u - cumulative.gather(-1, n) + weights.gather(-1, n)).squeeze(-1)


def _walk(scaled: _Scaled, u: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the whole vocabulary, in two steps: (ids, mass)."""
    mass = scaled.mass
    segment, rest = _pick(scaled.sums, u * mass)
    inside = scaled.weights[torch.arange(len(segment), device=u.device), segment].double()
    offset, _ = _pick(inside, rest)
    return (segment * SEGMENT + offset).clamp(max=scaled.values.shape[-1] - 1), mass


def _truncated_walk(scaled: _Scaled, u: Tensor, draws: list[Draw]) -> tuple[Tensor, Tensor]:
    """Top-k, top-p and min-p, then the inverse CDF over what is kept: (ids, mass kept)."""
    size = scaled.values.shape[-1]
    top_k = torch.tensor([min(d.sampling.top_k or size, size) for d in draws], device=u.device)
    top_p = torch.tensor([d.sampling.top_p for d in draws], dtype=torch.float64, device=u.device)
    min_p = torch.tensor([d.sampling.min_p for d in draws], dtype=torch.float64, device=u.device)
    limits = (top_k, top_p, min_p)
    ids = torch.empty_like(top_k)
    mass = torch.empty_like(u)
    open_rows = torch.arange(len(draws), device=u.device)
    asked = max((d.sampling.top_k for d in draws if d.sampling.top_k < size), default=0)
    count = max(MIN_CANDIDATES, asked + 1)
    while len(open_rows):  # more candidates for the rows whose outcome they do not decide, in the end all tokens
        part = scaled if len(open_rows) == len(draws) else scaled.rows(open_rows)
        if count < size:
            candidates = part.values.topk(count, sorted=False).indices
        else:
            candidates = torch.arange(size, device=u.device).expand(len(open_rows), -1)
        found, kept, sure = _walk_candidates(part, candidates, u[open_rows], *(limit[open_rows] for limit in limits))
        ids[open_rows], mass[open_rows] = found, kept
        open_rows = open_rows[~sure]
        count *= MORE_CANDIDATES
    return ids, mass


def _walk_candidates(
    scaled: _Scaled, candidates: Tensor, u: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """candidates [R, C]: the C largest tokens of each row. Returns (ids, mass kept, whether the C decide the outcome)."""
    ids = candidates.sort(-1).values
    values, order = scaled.values.gather(-1, ids).double().sort(dim=-1, descending=True, stable=True)  # ties: lower id first
    weights = values.exp()
    place = torch.arange(values.shape[-1], device=u.device)
    kept = place < top_k[:, None]
    whole = torch.where(top_k < scaled.values.shape[-1], (weights * kept).sum(-1), scaled.mass)
    before = (weights * kept).cumsum(-1) - weights
    nucleus = (before < (top_p[:, None] - MASS_SLACK) * whole[:, None]) | (top_p[:, None] >= 1.0)
    kept &= nucleus & (weights >= min_p[:, None])
    kept[:, 0] = True
    num_kept = kept.sum(-1, keepdim=True)
    last_kept = values.gather(-1, num_kept - 1).squeeze(-1)
    sure = (last_kept > values[:, -1]) | (values.shape[-1] == scaled.values.shape[-1])

    by_id = torch.zeros_like(weights).scatter_(-1, order, weights * kept)
    mass = by_id.sum(-1)
    n, _ = _pick(by_id, u * mass)
    return ids.gather(-1, n[:, None]).squeeze(-1), mass, sure


def _edit(z: Tensor, draws: list[Draw]) -> Tensor:
    """A copy of the logits after allowed / bad ids, min_new_tokens and penalties."""
    z = z.clone()
    size = z.shape[-1]
    outside: dict[tuple[int, ...], Tensor] = {}  # allowed ids, often many and the same for all rows -> mask of the others
    for row, d in zip(z, draws):
        p = d.sampling
        if p.allowed_token_ids is not None:
            if p.allowed_token_ids not in outside:
                allowed = np.array(p.allowed_token_ids, dtype=np.int64)
                mask = torch.ones(size, dtype=torch.bool)
                mask[torch.from_numpy(allowed[(allowed >= 0) & (allowed < size)])] = False
                outside[p.allowed_token_ids] = mask.to(z.device)
            row.masked_fill_(outside[p.allowed_token_ids], -math.inf)
        banned = [i for i in (*p.bad_token_ids, *d.suppressed) if 0 <= i < size]
        if banned:
            row[torch.tensor(banned, device=z.device)] = -math.inf
        if d.is_penalised:
            _penalise(row, d)
    return z


def _penalise(row: Tensor, d: Draw) -> None:
    """Repetition counts prompt and output (https://arxiv.org/abs/1909.05858), presence and frequency the output only."""
    p, size = d.sampling, row.shape[-1]
    seen = np.unique(np.asarray(d.tokens, dtype=np.int64))
    seen_ids = torch.from_numpy(seen[seen < size]).to(row.device)
    z = row[seen_ids]
    row[seen_ids] = torch.where(z > 0, z / p.repetition_penalty, z * p.repetition_penalty)
    output, counts = np.unique(np.asarray(d.tokens[d.num_prompt :], dtype=np.int64), return_counts=True)
    output_ids = torch.from_numpy(output[output < size]).to(row.device)
    times = torch.from_numpy(counts[output < size]).to(row.device, row.dtype)
    row[output_ids] -= p.presence_penalty + p.frequency_penalty * times
