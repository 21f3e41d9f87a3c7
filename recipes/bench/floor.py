"""The floor of a step: its matrix products alone, on prepared inputs, through the very layers that the engine uses."""

from __future__ import annotations

from typing import Any

import torch

from inference_v2.models.spec import DecoderSpec
from inference_v2.weights import FusedWeights
from recipes.bench.measure import seconds_of, spread


@torch.no_grad()
def gemm_floor_ms(
    weights: FusedWeights, spec: DecoderSpec, rows: int, *, head_rows: int | None = None, passes: int = 20
) -> dict[str, Any]:
    """Milliseconds of all linears of a step at `rows` tokens, the head at `head_rows` (None: the same), as a spread over
    `passes`. A pass goes through the whole model in its order, so a model larger than the caches is read from memory."""
    head_rows = rows if head_rows is None else head_rows
    hidden = _input(rows, spec.hidden_size, weights.dtype)
    attended = _input(rows, spec.num_heads * spec.head_dim, weights.dtype)
    activated = _input(rows, spec.intermediate_size, weights.dtype)
    read = _input(head_rows, spec.hidden_size, weights.dtype)

    def one_pass() -> None:
        for i in range(spec.num_layers):
            with weights.layer(i) as layer:
                layer.qkv(hidden)
                layer.o(attended)
                layer.gate_up(hidden)
                layer.down(activated)
        with weights.final() as final:
            size = final.head.rows_within(64 * 2**20)  # as the engine does: logits of all rows may be gigabytes
            for start in range(0, head_rows, size):
                final.head.logits(read[start : start + size])

    return spread([s * 1e3 for s in seconds_of(one_pass, passes, warmups=2)])


def step_bytes(weights: FusedWeights) -> int:
    """Bytes of weights that one decode step reads: all layers and the head, but not the embedding's table."""
    layers = 0
    for i in range(weights.spec.num_layers):
        with weights.layer(i) as layer:
            layers += layer.nbytes
    with weights.final() as final:
        head = final.head
        itemsize = 2 if head.product is not None else head.weight.element_size()
        return layers + head.vocab_size * weights.spec.hidden_size * itemsize


def _input(rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows)).to(dtype)
