"""Scores of given tokens: a prefill whose hidden states are read from a start on, log-probs a few rows of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_v2.head import Head
from inference_v2.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Scored:
    """The n tokens of one sequence from its start on."""

    logprobs: Tensor  # [n] fp32; [0] where they were not asked for
    hidden: Tensor | None  # [n, H] in the compute dtype, on the host: after the final norm, at the position before each token


@dataclass(slots=True)
class ScoreJob:
    """Fills one Scored as the chunks of its sequence pass by."""

    request_id: int
    start: int
    temperature: float
    scored: Scored

    def read(self, chunk: Chunk, hidden: Tensor, head: Head, rows_at_once: int) -> None:
        """hidden [len(chunk.wanted), H]."""
        if not len(chunk.wanted):
            return
        first = chunk.wanted.start + 1  # the token that the first row predicts
        at = first - self.start
        if self.scored.hidden is not None:
            self.scored.hidden[at : at + len(hidden)] = hidden
        if not len(self.scored.logprobs):
            return
        targets = torch.tensor(chunk.seq.tokens[first : first + len(hidden)], device=hidden.device)
        for i in range(0, len(hidden), rows_at_once):
            part = slice(i, i + rows_at_once)
            z = head.logits(hidden[part]) / (self.temperature or 1.0)
            chosen = z.gather(-1, targets[part, None]).squeeze(-1)
            self.scored.logprobs[at + i : at + i + len(z)] = chosen - z.logsumexp(-1)
