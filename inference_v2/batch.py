"""The ragged metadata of one step: which tokens run, where their keys go, and what they may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inference_v2.scheduler import Chunk


@dataclass(frozen=True)
class GroupMeta:
    """Block tables of one cache group (the layers that share an attention window).

    A block id counts inside the group's own pools. Entries of blocks behind the window, and padding, are 0: the window mask or
    the context length hides whatever they hold.
    """

    block_tables: Tensor  # [R, M] int32
    slots: Tensor  # [T] int64: block id * block_size + offset, where token t's key and value are written


@dataclass(frozen=True)
class Batch:
    """R requests give T tokens to this step; a decode gives one, a prefill chunk gives many."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, 0 at a sequence's first token
    cu_query_lens: Tensor  # [R + 1] int32: request r owns tokens cu_query_lens[r] : cu_query_lens[r + 1]
    context_lens: Tensor  # [R] int32: keys in the cache after this step's are written (position of its last query + 1)
    groups: tuple[GroupMeta, ...]  # indexed by DecoderSpec.layers[i].cache_group
    logit_rows: Tensor  # [S] int64: the tokens whose hidden states are wanted

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        return self.context_lens.shape[0]


def build_batch(chunks: Sequence[Chunk], num_groups: int, block_size: int, device: torch.device | str) -> Batch:
    """The metadata of a planned step. No chunks give an empty batch: a forward in lock step with other ranks."""
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    lengths = np.array([chunk.length for chunk in chunks], dtype=np.int64)
    cu_query_lens = np.concatenate(([0], lengths.cumsum())).astype(np.int32)
    rows = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(len(rows)) - cu_query_lens[rows] + starts[rows]
    token_ids = np.array([token for c in chunks for token in c.seq.tokens[c.start : c.end]], dtype=np.int64)
    logit_rows = np.array([cu_query_lens[r] + p - c.start for r, c in enumerate(chunks) for p in c.wanted], dtype=np.int64)

    groups = []
    for g in range(num_groups):
        width = max((-(-c.end // block_size) for c in chunks), default=0)
        tables = np.zeros((len(chunks), width), dtype=np.int32)
        for row, chunk in zip(tables, chunks):
            ids = chunk.seq.tables[g].ids
            row[: len(ids)] = ids[:width]
        slots = tables[rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
        groups.append(GroupMeta(_tensor(tables, device), _tensor(slots, device)))
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        cu_query_lens=_tensor(cu_query_lens, device),
        context_lens=_tensor((starts + lengths).astype(np.int32), device),
        groups=tuple(groups),
        logit_rows=_tensor(logit_rows, device),
    )


def _tensor(array: np.ndarray, device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)
