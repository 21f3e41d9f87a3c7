"""From fp32 logits to tokens and both log-probs.

Order: allowed / bad ids, min_new_tokens, penalties, temperature, top-k, top-p, min-p, draw. One uniform a token, and an
inverse-CDF walk in token-id order. Nothing depends on what else is in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference_v2.types import SamplingParams

LEAST_TEMPERATURE = 1e-30  # what is above 0 must stay so in fp32
Sample = Callable[..., tuple[Tensor, Tensor, Tensor]]


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


def draw(logits: Tensor, draws: Seq[Draw], sample: Sample) -> Drawn:
    """logits fp32 [S, V], cut to the tokenizer's size; row s belongs to draws[s]. `sample` is a backend's (kernels.sampling)."""
    edited = [i for i, d in enumerate(draws) if d.is_edited]
    if edited and len(edited) < len(draws):  # the logits of rows that nothing edits are not copied
        plain = [i for i, d in enumerate(draws) if not d.is_edited]
        parts = [draw(logits[rows], [draws[i] for i in rows], sample) for rows in (plain, edited)]
        return _interleave(parts, (plain, edited))
    columns = (column.to(logits.device) for column in settings(draws, logits.shape[-1]))
    found = sample(logits, _edit(logits, draws) if edited else None, *columns)
    token_ids, logprobs, raw = (column.tolist() for column in found)
    return Drawn(token_ids, logprobs, raw)


def settings(draws: Seq[Draw], vocab_size: int) -> tuple[Tensor, ...]:
    """(temperature, uniform, top_k, top_p, min_p) of each row, as a backend's `sample` takes them; on the host."""
    params = [d.sampling for d in draws]
    temperature = [0.0 if p.temperature == 0.0 else max(p.temperature, LEAST_TEMPERATURE) for p in params]
    return (
        torch.tensor(temperature, dtype=torch.float32),
        torch.from_numpy(uniforms(draws)),
        torch.tensor([min(p.top_k, vocab_size) for p in params], dtype=torch.int64),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
    )


def _interleave(parts: Seq[Drawn], places: Seq[Seq[int]]) -> Drawn:
    """Rows of several draws, each back in its place."""
    rows = [(0, 0.0, 0.0)] * sum(len(place) for place in places)
    for part, place in zip(parts, places):
        for i, row in zip(place, zip(part.token_ids, part.logprobs, part.logprobs_raw)):
            rows[i] = row
    token_ids, logprobs, raw = (list(column) for column in zip(*rows))
    return Drawn(token_ids, logprobs, raw)


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


def _edit(z: Tensor, draws: Seq[Draw]) -> Tensor:
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
