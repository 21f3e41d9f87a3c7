"""Carries out a planned step: block copies, one forward, and the reading of its hidden states into tokens and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_v2 import sampler
from inference_v2.batch import Batch, build_batch
from inference_v2.cache import KVCache
from inference_v2.graphs import DecodeGraphs
from inference_v2.head import Head
from inference_v2.kernels import Kernels
from inference_v2.models.decoder import Decoder
from inference_v2.models.spec import DecoderSpec
from inference_v2.pages import advised
from inference_v2.scheduler import Plan
from inference_v2.scoring import ScoreJob
from inference_v2.sequence import Sequence
from inference_v2.weights import FusedWeights, ModelWeights

LOGIT_BYTES = 64 * 2**20  # logits that exist at once


class DecoderLike(Protocol):
    """models.decoder.Decoder, or another with the same forward."""

    @property
    def spec(self) -> DecoderSpec: ...

    @property
    def kernels(self) -> Kernels: ...

    def forward(self, batch: Batch, cache: KVCache, weights: ModelWeights, read: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """The next token of `seq`, a fork of `leader` where that is another sequence."""

    seq: Sequence
    leader: Sequence
    token_id: int
    logprob: float
    logprob_raw: float


class Runner:
    """The decoder and its KV pool, which is allocated at the first step. `num_blocks[g]` blocks for cache group g."""

    def __init__(
        self,
        decoder: DecoderLike,
        num_blocks: tuple[int, ...],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        poison: bool = False,
        cuda_graphs: bool = True,
    ) -> None:
        self._decoder = decoder
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._poison = poison
        self._cache: KVCache | None = None
        # Only Triton's kernels never wait for the host. Tests set this on a CPU, where the buffers are static without a graph.
        self._static_decodes = cuda_graphs and device.type == "cuda" and decoder.kernels.name == "triton"
        self._graphs: DecodeGraphs | None = None
        self._logits = torch.empty(0, 0)
        self.num_forwards = 0

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the KV pool that are allocated now."""
        return 0 if self._cache is None else self._cache.nbytes

    def release(self) -> None:
        self._cache, self._graphs, self._logits = None, None, torch.empty(0, 0)

    @torch.no_grad()
    def run(self, plan: Plan, weights: ModelWeights, jobs: Mapping[int, ScoreJob]) -> list[DrawnToken]:
        """Compute the plan's tokens; draw the next token of every sequence that catches up and of the forks that wait for it,
        and fill the score jobs (by request id). An empty plan enters the scopes of all weights and does nothing else."""
        if self._cache is None:
            num_blocks = [n + self._static_decodes for n in self._num_blocks]  # the last one is scratch
            self._cache = KVCache(
                self._decoder.spec, num_blocks, self._block_size, self._dtype, self._device, poison=self._poison
            )
        for group, pairs in enumerate(plan.copies):
            self._cache.copy_blocks(group, pairs)
        self.num_forwards += 1
        if (graphs := self._graphs_for(plan, weights, self._cache)) is not None:
            return self._replay(graphs, plan, weights, jobs)
        batch = build_batch(plan.chunks, len(self._num_blocks), self._block_size, self._device)
        return self._decoder.forward(batch, self._cache, weights, lambda hidden, head: self._read(plan, jobs, hidden, head))

    def _graphs_for(self, plan: Plan, weights: ModelWeights, cache: KVCache) -> DecodeGraphs | None:
        """For a plain decode with weights whose addresses stay. What has moved since the last one is captured again."""
        if not isinstance(self._decoder, Decoder) or not isinstance(weights, FusedWeights):
            return None
        if not self._static_decodes or not DecodeGraphs.takes(plan.chunks):
            return None
        if self._graphs is None or not self._graphs.serves(cache, weights):
            self._graphs = None  # its memory first
            self._graphs = DecodeGraphs(
                self._decoder, cache, weights, self._block_size, self._num_blocks, self._device, LOGIT_BYTES
            )
        return self._graphs

    def _replay(self, graphs: DecodeGraphs, plan: Plan, weights: ModelWeights, jobs: Mapping[int, ScoreJob]) -> list[DrawnToken]:
        hidden, tokens = graphs.run(plan.chunks, [_draw_of(chunk.seq) for chunk in plan.chunks])
        if tokens is None:
            with weights.final() as final:
                return self._read(plan, jobs, hidden, final.head)
        columns = zip(plan.chunks, tokens.token_ids, tokens.logprobs, tokens.logprobs_raw)
        return [DrawnToken(chunk.seq, chunk.seq, token, logprob, raw) for chunk, token, logprob, raw in columns]

    def _memory(self, rows: int, vocab_size: int) -> Tensor | None:
        """For logits of the CPU, the same at every step."""
        if self._device.type != "cpu":
            return None
        if len(self._logits) < rows:
            self._logits = advised(torch.empty(rows, vocab_size))
        return self._logits

    def _read(self, plan: Plan, jobs: Mapping[int, ScoreJob], hidden: Tensor, head: Head) -> list[DrawnToken]:
        """hidden [S, H], in the order of the chunks' wanted positions."""
        rows_at_once = head.rows_within(LOGIT_BYTES)
        rows: list[int] = []
        pairs: list[tuple[Sequence, Sequence]] = []  # (sample, its leader)
        at = 0
        for chunk in plan.chunks:
            count = len(chunk.wanted)
            if chunk.seq.score_start is not None:
                if count:  # a trunk has no job of its own
                    jobs[chunk.seq.request_id].read(chunk, hidden[at : at + count], head, rows_at_once)
            elif count:
                alike = (*chunk.seq.forks, chunk.seq)  # forks first: they start from blocks that the leader may give up
                pairs += [(seq, chunk.seq) for seq in alike]
                rows += [at] * len(alike)
            at += count
        drawn: list[DrawnToken] = []
        for i in range(0, len(rows), rows_at_once):
            part = slice(i, i + rows_at_once)
            chosen = hidden[torch.tensor(rows[part], device=hidden.device)]
            logits = head.logits(chosen, self._memory(len(chosen), head.vocab_size))
            tokens = sampler.draw(logits, [_draw_of(seq) for seq, _ in pairs[part]], self._decoder.kernels.sample)
            columns = zip(pairs[part], tokens.token_ids, tokens.logprobs, tokens.logprobs_raw)
            drawn += [DrawnToken(seq, leader, token, logprob, raw) for (seq, leader), token, logprob, raw in columns]
        return drawn


def _draw_of(seq: Sequence) -> sampler.Draw:
    sampling = seq.request.sampling
    suppressed = seq.stop_ids if seq.num_output < sampling.min_new_tokens else frozenset()
    return sampler.Draw(sampling, seq.request.key, seq.sample_index, seq.tokens, seq.num_prompt, suppressed)
