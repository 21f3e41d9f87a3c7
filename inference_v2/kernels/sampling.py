"""The sampler in plain PyTorch: from fp32 logits to tokens and both log-probs. Nothing depends on what else is in the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_AT_ONCE = 8  # rows of a pass: their temporaries stay in the CPU's cache
SEGMENT = 256  # tokens of one step of the coarse walk
MIN_CANDIDATES = 256  # tokens looked at first under truncation
MORE_CANDIDATES = 16  # times as many where those do not decide
MASS_SLACK = 1e-7  # a mass of top_p up to fp32 rounding is reached


def sample(
    logits: Tensor, edited: Tensor | None, temperature: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One token a row, by an inverse-CDF walk in token-id order after temperature, top-k, top-p and min-p.

    logits [S, V] fp32; `edited` what to draw from where that is not the logits; temperature [S] fp32, 0 for the most likely
    token; uniform, top_p, min_p [S] fp64; top_k [S] int64, 0 for all. Returns token ids, their log-prob under the distribution
    drawn from (0 where greedy), and log_softmax(logits / temperature) of them (temperature 1 where greedy). Not finite where
    the logits were not, or where no id was left to draw.
    """
    parts = []
    for start in range(0, logits.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        source = None if edited is None else edited[rows]
        limits = (top_k[rows], top_p[rows], min_p[rows])
        parts.append(_sample_rows(logits[rows], source, temperature[rows], uniform[rows], *limits))
    if not parts:
        return logits.new_zeros(0, dtype=torch.int64), logits.new_zeros(0), logits.new_zeros(0)
    ids, logprobs, raw = (torch.cat(column) for column in zip(*parts, strict=True))
    return ids, logprobs, raw


def _sample_rows(
    z: Tensor, edited: Tensor | None, temperature: Tensor, uniform: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    greedy = temperature == 0
    temperature = torch.where(greedy, 1.0, temperature)
    plain = _Scaled.of(z, temperature)
    scaled = plain if edited is None else _Scaled.of(edited, temperature)
    ids, mass = scaled.values.argmax(-1), scaled.mass
    logprobs = torch.where(mass.isfinite(), 0.0, torch.nan).double()
    truncated = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    for rows, cut in ((~greedy & ~truncated, False), (~greedy & truncated, True)):
        index = rows.nonzero().squeeze(-1)
        if not len(index):
            continue
        part = scaled if len(index) == len(z) else scaled.rows(index)
        limits = (top_k[index], top_p[index], min_p[index])
        ids[index], mass = _truncated_walk(part, uniform[index], *limits) if cut else _walk(part, uniform[index])
        logprobs[index] = part.at(ids[index]) - mass.log()
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


def _truncated_walk(scaled: _Scaled, u: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Top-k, top-p and min-p, then the inverse CDF over what is kept: (ids, mass kept)."""
    size = scaled.values.shape[-1]
    top_k = torch.where(top_k > 0, top_k.clamp(max=size), size)
    limits = (top_k, top_p, min_p)
    ids = torch.empty_like(top_k)
    mass = torch.empty_like(u)
    open_rows = torch.arange(len(u), device=u.device)
    asked = torch.where(top_k < size, top_k, 0).max()
    count = max(MIN_CANDIDATES, int(asked) + 1)
    while len(open_rows):  # more candidates for the rows whose outcome they do not decide, in the end all tokens
        part = scaled if len(open_rows) == len(u) else scaled.rows(open_rows)
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
