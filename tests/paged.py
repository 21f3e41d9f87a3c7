"""Hand-built batches over a paged cache, for tests that drive a decoder without the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from inference_v2.batch import Batch, GroupMeta
from inference_v2.cache import KVCache
from inference_v2.kernels import get_kernels
from inference_v2.loading import FolderSource
from inference_v2.models.decoder import Decoder
from inference_v2.models.spec import DecoderSpec
from inference_v2.rope import RopeTable
from inference_v2.weights import FusedWeights

BLOCK = 4


class ModuleSource(FolderSource):
    """The weights of a HF module in memory as a WeightSource."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._tensors = {name: p.detach() for name, p in module.named_parameters()}

    def names(self):
        return self._tensors.keys()

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        tensor = self._tensors[name]
        return tensor if rows is None else tensor[rows]


@dataclass
class Runner:
    """Up to `num_requests` requests of at most `max_len` tokens. Blocks are dealt out in an interleaved order, block 0 is
    never owned (it stays NaN), and blocks that a window has left behind are taken out of the table."""

    spec: DecoderSpec
    weights: FusedWeights
    dtype: torch.dtype = torch.float32
    num_requests: int = 8
    max_len: int = 64
    computed: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blocks = -(-self.max_len // BLOCK)
        kernels = get_kernels("auto", "cpu", self.dtype)
        self.decoder = Decoder(self.spec, kernels, RopeTable.build(self.spec.rope, self.max_len, self.dtype))
        counts = [1 + self.num_requests * self.blocks] * len(self.spec.windows)
        self.cache = KVCache(self.spec, counts, BLOCK, self.dtype, "cpu", poison=True)

    def step(self, pieces: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """(request, its next token ids) -> fp32 logits of each piece [len, V]. One forward for all pieces."""
        starts = [self.computed.get(r, 0) for r, _ in pieces]
        lens = [len(ids) for _, ids in pieces]
        positions = [torch.arange(start, start + n) for start, n in zip(starts, lens)]
        tables = [1 + r + self.num_requests * torch.arange(self.blocks) for r, _ in pieces]
        slots = [table[p // BLOCK] * BLOCK + p % BLOCK for table, p in zip(tables, positions)]
        groups = []
        for window in self.spec.windows:
            kept = [table.clone() for table in tables]
            for table, start in zip(kept, starts):
                if window is not None:
                    table[: max(0, start - window + 1) // BLOCK] = 0
            groups.append(GroupMeta(torch.stack(kept).int(), torch.cat(slots)))
        batch = Batch(
            token_ids=torch.cat([ids for _, ids in pieces]),
            positions=torch.cat(positions),
            cu_query_lens=torch.tensor([0, *lens]).cumsum(0).int(),
            context_lens=torch.tensor([start + n for start, n in zip(starts, lens)]).int(),
            groups=tuple(groups),
            logit_rows=torch.arange(sum(lens)),
        )
        for (r, _), start, n in zip(pieces, starts, lens):
            self.computed[r] = start + n
        with torch.no_grad():
            logits = self.decoder.forward(batch, self.cache, self.weights, lambda hidden, head: head.logits(hidden))
        return list(logits.split(lens))
