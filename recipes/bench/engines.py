"""The engines that are timed: a checkpoint's, and random ones of chosen sizes, each with its weights at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from inference_v2 import InferenceEngine
from inference_v2.config import EngineConfig
from inference_v2.kernels import get_kernels
from inference_v2.loading import load_model
from inference_v2.models import spec_of
from inference_v2.models.build import build_decoder, dtype_of
from inference_v2.models.decoder import Decoder
from inference_v2.models.names import layer_names, layer_shapes, root_names
from inference_v2.models.spec import DecoderSpec
from inference_v2.rope import RopeTable
from inference_v2.weights import FusedWeights, ModelWeights


@dataclass(frozen=True)
class OpenedEngine:
    engine: InferenceEngine
    weights: ModelWeights

    @property
    def fused(self) -> FusedWeights | None:
        """The weights as linears; None for a model type that runs the HF module."""
        return self.weights if isinstance(self.weights, FusedWeights) else None

    def forget_prefixes(self) -> None:
        """As after an optimizer step: a new weight version, so that no run hits what the one before it has cached."""
        self.weights.version += 1
        self.engine.set_weights(self.weights)


def open_engine(path: str, dtype: str, config: EngineConfig | None = None) -> OpenedEngine:
    """What `InferenceEngine.from_pretrained` opens, on the CPU. Raises ValueError as it does."""
    config = config or EngineConfig()
    model = load_model(path)
    decoder, weights = build_decoder(model, config, dtype=dtype_of(dtype), device="cpu")
    engine = InferenceEngine(
        decoder,
        weights,
        config=config,
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
        vocab_limit=model.vocab_limit,
        dtype=dtype_of(dtype),
    )
    return OpenedEngine(engine, weights)


def random_engine(config: LlamaConfig, dtype: str) -> OpenedEngine:
    """An engine over random weights, made in memory."""
    spec, torch_dtype = spec_of(config), dtype_of(dtype)
    kernels = get_kernels("auto", "cpu", torch_dtype)
    weights = FusedWeights(spec, torch_dtype, "cpu", kernels=kernels)
    weights.refresh(RandomSource(spec), version=0)
    decoder = Decoder(spec, kernels, RopeTable.build(spec.rope, spec.max_position_embeddings, torch_dtype))
    return OpenedEngine(InferenceEngine(decoder, weights, dtype=torch_dtype), weights)


class RandomSource:
    """A WeightSource of normal weights, the same for the same spec."""

    def __init__(self, spec: DecoderSpec) -> None:
        shapes = layer_shapes(spec)
        self._shapes: dict[str, tuple[int, ...]] = dict.fromkeys(root_names(spec), (spec.vocab_size, spec.hidden_size))
        self._shapes[spec.names.final_norm] = (spec.hidden_size,)
        for i in range(spec.num_layers):
            self._shapes |= {name: shapes[field] for field, name in layer_names(spec, i).items()}
        self._generator = torch.Generator().manual_seed(0)

    @property
    def num_parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self._shapes.values())

    def names(self) -> Iterable[str]:
        return self._shapes

    @contextmanager
    def scope(self, prefix: str) -> Iterator[None]:
        yield

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        weight = torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5
        return weight if rows is None else weight[rows]


def versions_of(opened: OpenedEngine) -> dict[str, Any]:
    """What computes: kernels, and how linears are packed."""
    return {"kernels": opened.engine.decoder.kernels.name, "weight_bytes": opened.fused.nbytes if opened.fused else None}
