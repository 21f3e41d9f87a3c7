"""A paged-KV text generator for Hugging Face causal LMs: knows tensors and HF names; no FSDP, no optimizer, no loss.

Rooms, in the order a request meets them:
    types, config     what comes in and goes out (no torch)
    admission, sequence, blocks, scheduler, stopping   host decisions in plain Python (no torch)
    cache, batch      the KV pools and one step's ragged metadata
    models/           a family is a table: spec -> the one generic decoder
    kernels/          one signature per op; `reference` is written to be read
    weights, loading  WeightSource -> fused weights; a HF folder is one source
    rope, head, sampler, scoring
    runner            carries out one planned step
    engine            InferenceEngine: add / step / abort / stats, generate, score
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference_v2.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from inference_v2.engine import InferenceEngine

__all__ = ["Completion", "InferenceEngine", "Request", "SamplingParams"]


if not TYPE_CHECKING:  # a type checker that saw it would let every name pass

    def __getattr__(name: str) -> object:
        if name == "InferenceEngine":  # heavy (torch, transformers): imported on first use
            from inference_v2.engine import InferenceEngine

            return InferenceEngine
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
