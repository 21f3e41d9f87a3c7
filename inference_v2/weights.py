"""From named weights to the fused layout the decoder reads.

`WeightSource` is the one way in: a HF folder (loading.FolderSource) and the sharded trainer (hybrid.modes.ShardedSource) are two
of them, so loading from disk and refreshing from the trainer are the same code.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Weights by *module* name (`model.layers.0.self_attn.q_proj.weight`)."""

    def names(self) -> Iterable[str]:
        """Every name that `get` can serve."""
        ...

    def scope(self, prefix: str) -> AbstractContextManager[None]:
        """Inside it `get` serves the names below `prefix` ("" for those outside the layers); a sharded source gathers here,
        once, and reshards at exit. The same order of scopes on every rank."""
        ...

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        """The whole tensor or some of its rows (dim 0). The caller copies what it keeps. Raises KeyError."""
        ...
