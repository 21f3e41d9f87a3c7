"""A model family is a table: `REGISTRY` maps a config's model_type to the function that reads its DecoderSpec. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from inference_v2.models import families
from inference_v2.models.spec import DecoderSpec, LayerSpec, RopeSpec, WeightNames

__all__ = ["REGISTRY", "DecoderSpec", "LayerSpec", "RopeSpec", "WeightNames", "spec_of"]

REGISTRY: dict[str, Callable[[Any], DecoderSpec]] = {
    "llama": families.llama,
    "qwen2": families.qwen2,
    "qwen3": families.qwen3,
    "mistral": families.mistral,
    "exaone4": families.exaone4,
    "exaone4_5": families.exaone4_5,
}


def spec_of(hf_config: Any) -> DecoderSpec:
    """The spec of a Hugging Face config. Raises ValueError for a model type outside the registry, with the nearest names."""
    model_type = hf_config.model_type
    if model_type not in REGISTRY:
        near = difflib.get_close_matches(model_type, REGISTRY, n=3, cutoff=0.4)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ValueError(f"model_type={model_type!r} is not registered{hint}; allowed: {', '.join(REGISTRY)}")
    return REGISTRY[model_type](hf_config)
