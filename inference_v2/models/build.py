"""From an opened checkpoint to a decoder and its weights: the generic decoder for registered families, else the module."""

from __future__ import annotations

import torch

from inference_v2.config import EngineConfig
from inference_v2.kernels import get_kernels
from inference_v2.loading import LoadedModel
from inference_v2.models import REGISTRY
from inference_v2.models.decoder import Decoder
from inference_v2.models.fallback import ModuleDecoder, ModuleWeights, open_module
from inference_v2.rope import RopeTable
from inference_v2.weights import FusedWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: torch.dtype | str) -> torch.dtype:
    """The compute dtype of this name ("bfloat16"). Raises ValueError for one that nothing here computes in."""
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}; allowed: {', '.join(DTYPES)}")
    return DTYPES[name]


def build_decoder(
    model: LoadedModel, config: EngineConfig, *, dtype: torch.dtype, device: torch.device | str, trust_remote_code: bool = False
) -> tuple[Decoder, FusedWeights] | tuple[ModuleDecoder, ModuleWeights]:
    """Weights are loaded, as version 0. Raises ValueError for an unregistered model type under `config.strict`, or with
    settings that only registered families honour."""
    kernels = get_kernels(config.kernels, device, dtype)
    if model.hf_config.model_type in REGISTRY or config.strict:
        spec = model.spec
        weights = FusedWeights(spec, dtype, device, None, model.vocab_limit, config.batch_invariant, kernels)
        weights.refresh(model.source, version=0)
        positions = config.max_model_len or spec.max_position_embeddings
        return Decoder(spec, kernels, RopeTable.build(spec.rope, positions, dtype, device)), weights
    if config.batch_invariant:
        raise ValueError(f"batch_invariant with model_type={model.hf_config.model_type!r}; allowed: {', '.join(REGISTRY)}")
    decoder, module = open_module(
        model.path,
        kernels,
        dtype=dtype,
        device=device,
        max_positions=config.max_model_len,
        vocab_limit=model.vocab_limit,
        trust_remote_code=trust_remote_code,
    )
    longest = decoder.spec.max_position_embeddings
    if (config.max_model_len or 0) > longest:
        raise ValueError(
            f"max_model_len={config.max_model_len} with model_type={decoder.spec.model_type!r}; allowed: <= {longest}"
        )
    return decoder, module
