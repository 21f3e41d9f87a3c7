"""The KV pools: sizes from a byte budget, block copies, poison."""

from __future__ import annotations

import pytest
import torch

from inference_v2.cache import KVCache, block_bytes, pool_sizes
from inference_v2.models.spec import DecoderSpec, LayerSpec, RopeSpec


def spec_of(*windows):
    """One layer a window; layers of one window share a group."""
    groups = {w: g for g, w in enumerate(dict.fromkeys(windows))}
    layers = tuple(LayerSpec(window=w, cache_group=groups[w]) for w in windows)
    return DecoderSpec("test", 10, 8, 8, 2, 2, 4, 1e-6, layers, RopeSpec("default", 1e4, 4), 64)


def sizes(spec, cache_bytes, max_model_len=64, max_running=3):
    return pool_sizes(spec, 4, torch.float32, max_model_len=max_model_len, max_running=max_running, cache_bytes=cache_bytes)


def test_one_group_gets_the_whole_budget():
    spec = spec_of(None, None)
    (per_block,) = block_bytes(spec, 4, torch.float32)
    assert per_block == 2 * 2 * 4 * 2 * 4 * 4  # k and v, layers, tokens, heads, head_dim, bytes
    assert sizes(spec, 5 * per_block) == (5,)
    assert sizes(spec, 100 * per_block + per_block - 1) == (100,)
    assert sizes(spec, None) == (3 * 16,)


def test_a_windowed_group_gets_its_window_and_never_starves():
    spec = spec_of(None, 6, 6, 6)  # window of 6: 3 blocks of 4
    full, windowed = block_bytes(spec, 4, torch.float32)
    assert windowed == 3 * full
    assert sizes(spec, None) == (48, 9)
    assert sizes(spec, 2 * (16 * full + 3 * windowed)) == (32, 6)
    assert sizes(spec, 15 * full + 3 * windowed) == (15, 3)  # less than one longest sequence: a shorter one, its window whole
    assert sizes(spec, full + windowed) == (1, 1)
    with pytest.raises(ValueError, match=f"allowed: >= {full + windowed}"):
        sizes(spec, full + windowed - 1)


def test_copies_stay_in_their_group_and_read_before_they_write():
    cache = KVCache(spec_of(None, 6), (4, 3), 2, torch.float32, "cpu")
    for i in range(2):
        for pool in cache.layer(i):
            pool[:] = torch.arange(pool.shape[0], dtype=torch.float32)[:, None, None, None]
    cache.copy_blocks(0, [(0, 1), (1, 2)])
    for pool in cache.layer(0):
        assert pool[:, 0, 0, 0].tolist() == [0, 0, 1, 3]
    for pool in cache.layer(1):
        assert pool[:, 0, 0, 0].tolist() == [0, 1, 2]


def test_poison_fills_every_pool():
    cache = KVCache(spec_of(None, 6), (2, 2), 2, torch.bfloat16, "cpu", poison=True)
    assert all(pool.isnan().all() for i in range(2) for pool in cache.layer(i))
    assert cache.nbytes == 2 * 2 * (2 * 2 * 2 * 4) * 2
