"""The one decoder: a DecoderSpec, kernels and a rotary table make a forward over a ragged batch and a paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

import torch.nn.functional as F
from torch import Tensor

from inference_v2.batch import Batch
from inference_v2.cache import KVCache
from inference_v2.head import Head
from inference_v2.kernels import Kernels
from inference_v2.models.spec import DecoderSpec
from inference_v2.rope import RopeTable
from inference_v2.weights import LayerWeights, ModelWeights

R = TypeVar("R")


class Decoder:
    """Holds no weights and no cache: both come with each forward, so one decoder serves any weight version."""

    def __init__(self, spec: DecoderSpec, kernels: Kernels, rope_table: RopeTable) -> None:
        self.spec = spec
        self.kernels = kernels
        self.rope_table = rope_table

    @overload
    def forward(self, batch: Batch, cache: KVCache, weights: ModelWeights) -> Tensor: ...
    @overload
    def forward(self, batch: Batch, cache: KVCache, weights: ModelWeights, read: Callable[[Tensor, Head], R]) -> R: ...
    def forward(
        self, batch: Batch, cache: KVCache, weights: ModelWeights, read: Callable[[Tensor, Head], R] | None = None
    ) -> Tensor | R:
        """Run T tokens; their keys and values are added to the cache. Returns the normed hidden states [S, H] of
        `batch.logit_rows`, or what `read(hidden, head)` makes of them inside the scope of the final weights (streamed weights
        are gathered once for norm and head). With T = 0 the scopes of all weights are still entered, in the same order:
        other ranks may be gathering them.
        """
        eps = self.spec.norm_eps
        with weights.embed() as table:
            residual = F.embedding(batch.token_ids, table)  # [T, H]
        branch: Tensor | None = None  # output of the last branch, not yet added to the residual
        if self.kernels.bind_layers is not None and weights.stack is not None:  # the same kernels, without Python in between
            residual, branch = weights.stack(batch, cache, (self.rope_table.cos, self.rope_table.sin), residual)
        else:
            for i in range(self.spec.num_layers):
                with weights.layer(i) as layer:
                    residual, branch = self._layer(i, layer, batch, cache, residual, branch)
        with weights.final() as final:
            assert branch is not None, "a spec without layers"
            rows = batch.logit_rows
            hidden, _ = self.kernels.add_rms_norm(branch[rows], residual[rows], final.norm, eps)
            return hidden if read is None else read(hidden, final.head)

    def _layer(
        self, i: int, w: LayerWeights, batch: Batch, cache: KVCache, residual: Tensor, branch: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._enter(residual, branch, w.pre_attention_norm)
        branch = self._leave(self._attention(i, w, batch, cache, x), w.post_attention_norm)
        x, residual = self._enter(residual, branch, w.pre_mlp_norm)
        branch = self._leave(w.down(self.kernels.silu_and_mul(w.gate_up(x))), w.post_mlp_norm)
        return residual, branch

    def _enter(self, residual: Tensor, branch: Tensor | None, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """(input of the next branch, residual with the last branch added)."""
        if branch is None:
            return (residual if norm is None else self.kernels.rms_norm(residual, norm, self.spec.norm_eps)), residual
        if norm is not None:
            return self.kernels.add_rms_norm(branch, residual, norm, self.spec.norm_eps)
        residual = residual + branch
        return residual, residual

    def _leave(self, branch: Tensor, norm: Tensor | None) -> Tensor:
        return branch if norm is None else self.kernels.rms_norm(branch, norm, self.spec.norm_eps)

    def _attention(self, i: int, w: LayerWeights, batch: Batch, cache: KVCache, x: Tensor) -> Tensor:
        spec, kernels, layer = self.spec, self.kernels, self.spec.layers[i]
        heads = w.qkv(x).unflatten(-1, (-1, spec.head_dim))  # [T, Hq + 2 Hk, D]
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        k_pool, v_pool = cache.layer(i)
        group = batch.groups[layer.cache_group]
        table = (self.rope_table.cos, self.rope_table.sin) if layer.rope else None
        q = kernels.enter_attention(
            q, k, v, k_pool, v_pool, group.slots, batch.positions, table, w.q_norm, w.k_norm, spec.norm_eps
        )
        seen = kernels.paged_attention(
            q, k_pool, v_pool, batch.cu_query_lens, batch.context_lens, group.block_tables, spec.scale, layer.window
        )
        return w.o(seen.flatten(1))
