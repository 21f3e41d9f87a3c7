"""Log-probs of given tokens: a prefill whose hidden states are all read, a few rows of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inference_v2.head import Head
from inference_v2.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Scored:
    """The n tokens of one sequence from its start on."""

    logprobs: Tensor  # [n] fp32
    hidden: Tensor | None  # [n, H] in the compute dtype: after the final norm, at the position before each token


@dataclass(slots=True)
class ScoreJob:
    """Fills one Scored as the chunks of its sequence pass by."""

    start: int
    temperature: float
    logprobs: Tensor  # [n] fp32
    hidden: Tensor | None  # [n, H], if it is wanted

    def read(self, chunk: Chunk, hidden: Tensor, head: Head, rows_at_once: int) -> None:
        """hidden [len(chunk.wanted), H]."""
        if not len(chunk.wanted):
            return
        first = chunk.wanted.start + 1  # the token that the first row predicts
        targets = torch.tensor(chunk.seq.tokens[first : first + len(hidden)], device=hidden.device)
        at = first - self.start
        for i in range(0, len(hidden), rows_at_once):
            part = slice(i, i + rows_at_once)
            z = head.logits(hidden[part]) / (self.temperature or 1.0)
            chosen = z.gather(-1, targets[part, None]).squeeze(-1)
            self.logprobs[at + i : at + i + len(z)] = chosen - z.logsumexp(-1)
        if self.hidden is not None:
            self.hidden[at : at + len(hidden)] = hidden
