"""Decode steps in static buffers, each size captured once as a CUDA graph: on a GPU the host's work for a step is then a few
copies and one launch.

A step runs in the smallest bucket that holds its rows. What is left over is padding: token 0 at position 0, whose key goes to a
scratch block that no sequence owns and which sees nothing else. Positions, slots, context lengths and block tables are device
tensors that are written over, so that one graph serves every step of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from inference_v2 import sampler
from inference_v2.batch import Batch, GroupMeta, build_batch
from inference_v2.cache import KVCache
from inference_v2.head import Head
from inference_v2.models.decoder import Decoder
from inference_v2.scheduler import Chunk
from inference_v2.weights import FusedWeights

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # rows
LEAST_WIDTH = 64  # blocks of a table; wider ones have 4, 16, ... times as many
Outputs = tuple[Tensor, Tensor]  # hidden [rows, H], and [3, rows] fp64: token ids, logprobs, raw logprobs


class StaticDecode:
    """The buffers of one bucket: a Batch of `rows` requests with one token each, and the sampler's settings."""

    def __init__(self, rows: int, width: int, scratch: Sequence[int], block_size: int, device: torch.device) -> None:
        """`scratch[g]` is the block of cache group g that padding writes to."""
        each = torch.arange(rows, device=device)
        padding = torch.zeros(rows, dtype=torch.int64)
        self._host: list[Tensor] = []  # what the host writes, page-locked where a GPU reads it
        self._padded: list[Tensor] = []  # the same, all rows padding
        self._device: list[Tensor] = []
        columns = [padding, padding, (padding + 1).int()]
        for block in scratch:
            columns += [(padding[:, None].expand(rows, width) + block).int(), padding + block * block_size]
        columns += [padding.float(), padding.double(), padding, padding.double() + 1.0, padding.double()]
        for column in columns:
            host = column.clone()
            self._host.append(host.pin_memory() if device.type == "cuda" else host)
            self._padded.append(column.clone())
            self._device.append(column.to(device, copy=True))
        token_ids, positions, context_lens, *rest = self._device
        tables_and_slots, settings = rest[:-5], rest[-5:]
        groups = tuple(GroupMeta(*tables_and_slots[i : i + 2]) for i in range(0, len(tables_and_slots), 2))
        cu_query_lens = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.batch = Batch(token_ids, positions, cu_query_lens, context_lens, groups, each)
        self.settings = tuple(settings)  # temperature, uniform, top_k, top_p, min_p

    def write(self, batch: Batch, settings: Sequence[Tensor]) -> None:
        """A step of n <= rows requests, on the host; the rows after them become padding. The last step must have ended."""
        columns = [batch.token_ids, batch.positions, batch.context_lens]
        for group in batch.groups:
            columns += [group.block_tables, group.slots]
        for host, padded, device, column in zip(self._host, self._padded, self._device, [*columns, *settings], strict=True):
            n = column.shape[0]
            if column.dim() == 2:  # what an older step left to the right lies beyond the context
                host[:n, : column.shape[1]] = column
            else:
                host[:n] = column
            host[n:] = padded[n:]
            device.copy_(host, non_blocking=True)


class DecodeGraphs:
    """Decodes of one decoder, cache and placement of weights. `block_size` blocks; `scratch` as in StaticDecode. On a CPU the
    same buffers are used without a graph."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, weights: FusedWeights, block_size: int, scratch: Sequence[int],
        device: torch.device, logit_bytes: int,
    ) -> None:  # fmt: skip
        self._decoder, self._cache, self._weights = decoder, cache, weights
        self._block_size = block_size
        self._scratch = tuple(scratch)
        self._device = device
        self._logit_bytes = logit_bytes
        self._placement = weights.placement
        self._steps: dict[tuple[int, int], tuple[StaticDecode, Callable[[], Outputs]]] = {}  # by (rows, table width)
        self._pool: Any = None  # memory that all graphs share

    def serves(self, cache: KVCache, weights: FusedWeights) -> bool:
        """Whether all that the graphs point to is still where it was."""
        return cache is self._cache and weights is self._weights and weights.placement == self._placement

    @staticmethod
    def takes(chunks: Sequence[Chunk]) -> bool:
        """Whether a step is a plain decode: one token of each sequence, and one to draw."""
        plain = all(c.length == 1 and c.is_last and c.seq.score_start is None and not c.seq.forks for c in chunks)
        return plain and 0 < len(chunks) <= BUCKETS[-1]

    def run(self, chunks: Sequence[Chunk], draws: Sequence[sampler.Draw]) -> tuple[Tensor, sampler.Drawn | None]:
        """(hidden states [n, H], which the next step overwrites; the tokens drawn, or None where the logits of some row are to be
        edited first)."""
        batch = build_batch(chunks, len(self._scratch), self._block_size, "cpu")
        width = LEAST_WIDTH
        while width < batch.groups[0].block_tables.shape[1]:
            width *= 4
        n = len(chunks)
        buffers, step = self._step(next(rows for rows in BUCKETS if rows >= n), width)
        with self._weights.final() as final:
            buffers.write(batch, sampler.settings(draws, final.head.vocab_size))
        hidden, drawn = step()
        if any(draw.is_edited for draw in draws):
            return hidden[:n], None
        token_ids, logprobs, raw = drawn[:, :n].tolist()
        return hidden[:n], sampler.Drawn([int(token) for token in token_ids], logprobs, raw)

    def _step(self, rows: int, width: int) -> tuple[StaticDecode, Callable[[], Outputs]]:
        if (rows, width) not in self._steps:
            buffers = StaticDecode(rows, width, self._scratch, self._block_size, self._device)
            on_gpu = self._device.type == "cuda"
            self._steps[rows, width] = buffers, (self._capture(buffers) if on_gpu else lambda: self._forward(buffers))
        return self._steps[rows, width]

    def _capture(self, buffers: StaticDecode) -> Callable[[], Outputs]:
        """While the buffers are all padding. The first run, outside the graph, compiles kernels and opens libraries."""
        with torch.cuda.device(self._device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self._forward(buffers)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # NCCL's own thread may go on
                outputs = self._forward(buffers)
        self._pool = graph.pool()

        def replay() -> Outputs:
            with torch.cuda.device(self._device):
                graph.replay()
            return outputs

        return replay

    def _forward(self, buffers: StaticDecode) -> Outputs:
        def read(hidden: Tensor, head: Head) -> Outputs:
            rows_at_once = head.rows_within(self._logit_bytes)
            parts = []
            for i in range(0, hidden.shape[0], rows_at_once):
                part = slice(i, i + rows_at_once)
                found = self._decoder.kernels.sample(
                    head.logits(hidden[part]), None, *(column[part] for column in buffers.settings)
                )
                parts.append(torch.stack([column.double() for column in found]))
            return hidden, torch.cat(parts, dim=1)

        return self._decoder.forward(buffers.batch, self._cache, self._weights, read)
