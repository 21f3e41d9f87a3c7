"""The KV pools: one K and one V tensor a layer, cut into blocks."""

from __future__ import annotations

import ctypes
import functools
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor

from inference_v2.models.spec import DecoderSpec
from inference_v2.pages import advised


class KVCache:
    """`num_blocks[g]` blocks of `block_size` tokens for every layer of cache group g. The memory is not cleared, or filled with
    NaN under `poison`: nothing may be read before it is written."""

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        poison: bool = False,
    ) -> None:
        self.block_size = block_size
        self._groups = tuple(layer.cache_group for layer in spec.layers)
        self._pools: list[Tensor] = []  # per layer [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, values
        for group in self._groups:
            shape = (2, num_blocks[group], block_size, spec.num_kv_heads, spec.head_dim)
            pool = advised(torch.empty(shape, dtype=dtype, device=device))
            self._pools.append(pool.fill_(float("nan")) if poison else pool)

    def layer(self, i: int) -> tuple[Tensor, Tensor]:
        """K and V pools of layer i, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        pool = self._pools[i]
        return pool[0], pool[1]

    @functools.cached_property
    def pointers(self) -> ctypes.Array[ctypes.c_void_p]:
        """Addresses of K and V pool of each layer, one behind the other."""
        addresses = [pool.data_ptr() for i in range(len(self._pools)) for pool in self.layer(i)]
        return (ctypes.c_void_p * len(addresses))(*addresses)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) in every layer of the group; all are read before any is written."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self._pools[0].device).unbind(1)
        for pool, own in zip(self._pools, self._groups):
            if own == group:
                pool[:, target] = pool[:, source]

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)


def block_bytes(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of one block of each cache group: keys and values of all its layers."""
    per_layer = 2 * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
    counts = [0] * len(spec.windows)
    for layer in spec.layers:
        counts[layer.cache_group] += 1
    return tuple(per_layer * count for count in counts)


def pool_sizes(
    spec: DecoderSpec, block_size: int, dtype: torch.dtype, *, max_model_len: int, max_running: int, cache_bytes: int | None
) -> tuple[int, ...]:
    """Blocks of each cache group within a byte budget, in the proportion in which a sequence of `max_model_len` needs them (a
    windowed group keeps its window), or, where not even one of those fits, the longest that does. Without a budget: enough
    for `max_running` such sequences, at most 1 GiB.

    Raises ValueError where the budget does not hold one block a group.
    """
    size = block_bytes(spec, block_size, dtype)
    windows = [None if w is None else -(-(w - 1) // block_size) + 1 for w in spec.windows]

    def need(num_blocks: int) -> list[int]:
        return [num_blocks if w is None else min(num_blocks, w) for w in windows]

    def cost(num_blocks: int) -> int:
        return sum(n * b for n, b in zip(need(num_blocks), size))

    longest = -(-max_model_len // block_size)
    budget = min(cost(longest) * max_running, max(2**30, cost(1))) if cache_bytes is None else cache_bytes
    if budget < cost(1):
        raise ValueError(f"cache_bytes={budget}; allowed: >= {cost(1)}, one KV block in each of {len(size)} cache groups")
    if budget < cost(longest):
        return tuple(need(bisect_right(range(longest), budget, key=cost) - 1))
    return tuple(budget * n // cost(longest) for n in need(longest))
