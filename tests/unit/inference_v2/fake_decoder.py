"""A decoder whose logits are a hash of the tokens it finds in the paged cache: a wrong, stale or missing key changes them."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from inference_v2.config import EngineConfig
from inference_v2.engine import InferenceEngine
from inference_v2.head import Head
from inference_v2.kernels import get_kernels
from inference_v2.models.spec import DecoderSpec, LayerSpec, RopeSpec
from inference_v2.types import SamplingParams

VOCAB = 32


@dataclass
class FakeWeights:
    version: int = 0
    salt: int = 0
    vocab_limit: int | None = None

    def final(self):
        return nullcontext(Head(torch.eye(VOCAB), vocab_limit=self.vocab_limit))


def logits_of(tokens: list[int], windows: tuple[int | None, ...], salt: int) -> np.ndarray:
    """What the decoder must find for the last of these tokens."""
    seen = [[token + salt for token in (tokens if w is None else tokens[-w:])] for w in windows]
    return _hashed(seen, [[len(tokens) - len(part) + i for i in range(len(part))] for part in seen])


def _hashed(values: list[list[float]], positions: list[list[float]]) -> np.ndarray:
    text = repr([[float(x) for x in part] for part in (*values, *positions)])
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).normal(size=VOCAB).astype(np.float32) * 2


class FakeDecoder:
    def __init__(self, windows: tuple[int | None, ...] = (None,), max_positions: int = 512, logits=None) -> None:
        layers = tuple(LayerSpec(window=w, cache_group=g) for g, w in enumerate(windows))
        self.spec = DecoderSpec("fake", VOCAB, VOCAB, 1, 1, 1, 1, 1e-6, layers, RopeSpec("default", 1e4, 1), max_positions)
        self.kernels = get_kernels()  # its sampler
        self.batches = []
        self.override = logits  # logits to return for every row instead

    def forward(self, batch, cache, weights, read):
        self.batches.append(batch)
        for i, layer in enumerate(self.spec.layers):
            k_pool, v_pool = cache.layer(i)
            slots = batch.groups[layer.cache_group].slots
            k_pool.view(-1)[slots] = (batch.token_ids + weights.salt).float()
            v_pool.view(-1)[slots] = batch.positions.float()
        hidden = [self._row(batch, cache, int(row)) for row in batch.logit_rows]
        with weights.final() as head:
            return read(torch.from_numpy(np.array(hidden, dtype=np.float32).reshape(-1, VOCAB)), head)

    def _row(self, batch, cache, row: int) -> np.ndarray:
        if self.override is not None:
            return self.override
        request = int(torch.searchsorted(batch.cu_query_lens, row, right=True)) - 1
        position = int(batch.positions[row])
        values, places = [], []
        for i, layer in enumerate(self.spec.layers):
            k_pool, v_pool = cache.layer(i)
            size = k_pool.shape[1]
            seen = torch.arange(0 if layer.window is None else max(0, position - layer.window + 1), position + 1)
            slots = batch.groups[layer.cache_group].block_tables[request][seen // size].long() * size + seen % size
            values.append(k_pool.view(-1)[slots].tolist())
            places.append(v_pool.view(-1)[slots].tolist())
        return _hashed(values, places)


def fake_engine(windows=(None,), *, blocks: int | None = None, weights=None, logits=None, **settings) -> InferenceEngine:
    """`blocks`: KV blocks of a pool with one cache group. Further settings are EngineConfig's and some of the engine's own."""
    rest = {name: settings.pop(name) for name in ("eos_token_ids", "tokenizer", "vocab_limit") if name in settings}
    if blocks is not None:
        settings["cache_bytes"] = blocks * 2 * settings.get("block_size", 16) * 4
    config = EngineConfig(debug_poison=True, **settings)
    return InferenceEngine(FakeDecoder(windows, logits=logits), weights or FakeWeights(), config=config, **rest)


def greedy_oracle(prompt: list[int], count: int, windows=(None,), salt: int = 0, eos: tuple[int, ...] = ()) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(tokens, windows, salt).argmax()))
        if tokens[-1] in eos:
            break
    return tuple(tokens[len(prompt) :])


def greedy(count: int, **settings) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, temperature=0.0, **settings)
