"""The ragged metadata of one step: which tokens run, where their keys go, and what they may see."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


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
