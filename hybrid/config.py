"""Settings of one HybridEngine. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from inference_v2.config import EngineConfig

Dtype = Literal["float32", "bfloat16"]


class Strict(BaseModel):
    """Frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerConfig(Strict):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(1e-5, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0, description="not applied to biases and norm weights (parameters of one dimension)")
    momentum: float = Field(0.0, ge=0, lt=1, description="SGD only")
    max_grad_norm: float | None = Field(1.0, gt=0, description="global norm; None: no clipping")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    total_steps: int | None = Field(None, ge=1, description="end of linear / cosine decay; recipes fill in max_steps")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="floor of the decay, as a share of lr")

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas={self.betas}; allowed: each in [0, 1)")
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} > total_steps={self.total_steps}; lower warmup_steps")
        return self


class RolloutConfig(Strict):
    """How the sharded model generates."""

    gather: Literal["full", "stream", "auto"] = Field(
        "auto", description="full: a fused copy per rank; stream: layer by layer in lock step; auto: by bytes, logged"
    )
    on_leave: Literal["keep", "offload", "free"] = Field(
        "free", description="what happens to the fused copy and the KV pool when generation ends"
    )
    max_copy_bytes: int | None = Field(
        None, ge=1, description="what `auto` lets the fused copy take; None: half of the memory that is free at the first swap"
    )
    engine: EngineConfig = EngineConfig()


class HybridConfig(Strict):
    zero_stage: Literal[0, 1, 2, 3] = 3
    master_dtype: Dtype = Field("float32", description="dtype of shards, gradients' reduction and optimizer state")
    compute_dtype: Dtype = Field("float32", description="dtype of gathered weights and activations, in training and in rollouts")
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    activation_checkpointing: bool = False
    dropout: bool = Field(False, description="keep the checkpoint's dropout in training forwards (SFT); off: deterministic")
    freeze: tuple[str, ...] = Field((), description="regular expressions; parameters whose name matches are not trained")
    loss_chunk_tokens: int | None = Field(
        None, ge=1, description="tokens per chunk of the loss head; None: as many as have 64 MiB of fp32 logits"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    rollout: RolloutConfig = RolloutConfig()
    vocab_limit: int | None = Field(None, ge=1, description="rows of the head that count; None: the tokenizer's size, or all")
    trust_remote_code: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer than this ends the run")
    debug_checksums: bool = Field(False, description="at each swap, verify that weights changed only where weight_version did")
