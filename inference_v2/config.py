"""Settings of the engine. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EngineConfig(BaseModel):
    """Sizes and switches of one InferenceEngine."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    block_size: int = Field(16, ge=1, description="tokens per KV block")
    cache_bytes: int | None = Field(
        None, ge=1, description="byte budget of the KV pool; None: what max_running requests of max_model_len need, at most 1 GiB"
    )
    max_model_len: int | None = Field(None, ge=1, description="prompt + new tokens; None: the checkpoint's limit")
    max_running: int = Field(256, ge=1, description="sequences that may decode at once")
    max_step_tokens: int = Field(2048, ge=1, description="token budget of one step (prefill chunks and decodes together)")
    prefix_caching: bool = True
    kernels: Literal["auto", "reference", "cpu", "triton"] = Field(
        "auto",
        description="auto: C++ on a CPU (compiled once, into the user's cache), Triton on a GPU, reference where missing",
    )
    cuda_graphs: bool = Field(True, description="on a GPU with kernels=triton, capture decode steps as CUDA graphs")
    batch_invariant: bool = Field(False, description="pad linears to row counts whose bits do not depend on the batch")
    strict: bool = Field(False, description="refuse model types outside the registry instead of running the HF module")
    debug_poison: bool = Field(False, description="fill the KV pool with NaN before use (tests)")

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len}; allowed: >= 2 (one prompt token and one new token)")
        return self
