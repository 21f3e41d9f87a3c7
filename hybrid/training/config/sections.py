"""The small sections."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from hybrid.config import Strict
from hybrid.training.config.fields import Count


class ActivationCheckpointingConfig(Strict):
    """How `hybrid.checkpointing.checkpoint` keeps what backward starts again from. Of one engine, not of the process."""

    partition_activations: bool = Field(
        False, description="spread over model-parallel ranks; of which there are none, so nothing is spread"
    )
    cpu_checkpointing: bool = Field(False, description="inputs of a checkpointed part wait in host memory")
    contiguous_memory_optimization: bool = Field(False, description="inputs of all checkpointed parts wait in one buffer")
    number_checkpoints: Count | None = Field(None, description="how many parts that buffer is for")
    boundary_dtype: str | None = Field(
        None, description="ours: fp32 keeps the inputs of a checkpointed part in fp32; null: as they are"
    )
    layers: bool = Field(False, description="ours: every layer is such a part, without a call in the model")

    @field_validator("boundary_dtype")
    @classmethod
    def _check_dtype(cls, dtype: str | None) -> str | None:
        if dtype not in (None, "fp32", "bf16", "fp16"):
            raise ValueError(f"{dtype!r}; allowed: fp32, bf16, fp16 or null")
        return dtype

    @model_validator(mode="after")
    def _check(self) -> ActivationCheckpointingConfig:
        if self.contiguous_memory_optimization and not self.partition_activations:
            raise ValueError("contiguous_memory_optimization needs partition_activations: true")
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            raise ValueError("contiguous_memory_optimization needs number_checkpoints, the number of checkpointed layers")
        return self


class HybridEngineConfig(Strict):
    enabled: bool = Field(False, description="engine.generate: rollouts with the weights that are trained")
    max_out_tokens: int = Field(512, ge=1, description="prompt and new tokens of one request, at most")
    inference_tp_size: int = Field(1, ge=1, description="ranks that decode one request together")
    release_inference_cache: bool = Field(False, description="the KV cache is freed when generation ends")
    pin_parameters: bool = Field(
        True, description="a full copy of the weights while generating; false: layer by layer, in step with the other ranks"
    )
    tp_gather_partition_size: int = Field(8, ge=1, description="of tensor-parallel decoding, which does not exist")

    @field_validator("inference_tp_size")
    @classmethod
    def _check_size(cls, size: int) -> int:
        if size > 1:
            raise ValueError(f"{size}; allowed: 1, until there is tensor-parallel decoding")
        return size


class EigenvalueConfig(Strict):
    enabled: bool = Field(
        False, description="the largest eigenvalue of each block's Hessian, by power iteration with all weights gathered"
    )
    verbose: bool = Field(False, description="each iteration in the log")
    max_iter: int = Field(100, ge=1, description="iterations, at most")
    tol: float = Field(
        1e-2, gt=0, description="relative change of the eigenvalue, and relative residual, at which the iteration ends"
    )
    stability: float = Field(1e-6, ge=0, description="added to magnitudes before a division: what is far smaller ends at once")
    gas_boundary_resolution: int = Field(1, ge=1, description="every how many optimizer steps")
    layer_name: str = Field("", description="path of the list of blocks; empty: the longest list of the module")
    layer_num: int | None = Field(None, ge=1, description="how many of its blocks; null: all")


class CheckpointConfig(Strict):
    tag_validation: str = Field("Warn", description="what to do where ranks give different tags: Ignore, Warn or Fail")
    async_save: bool = Field(
        False, description="ours: save_checkpoint returns when tensors are copied, and writes behind training"
    )
    load_universal: bool = Field(False, description="load_checkpoint reads a DeepSpeed universal checkpoint")
    use_node_local_storage: bool = Field(False, description="refused: all ranks write one folder")
    parallel_write: dict[str, bool] = Field({}, description="writing is parallel already")

    @field_validator("tag_validation")
    @classmethod
    def _check_tag(cls, given: str) -> str:
        if given.lower() not in ("ignore", "warn", "fail"):
            raise ValueError(f"{given!r}; allowed: Ignore, Warn, Fail")
        return given.lower()

    @field_validator("use_node_local_storage")
    @classmethod
    def _check_storage(cls, given: bool) -> bool:
        if given:
            raise ValueError("true; allowed: false, since all ranks write one folder, which they must all see")
        return given


class CompressionConfig(Strict):
    """`gradient_compression`, ours: each rank sends the largest entries of its gradient, and keeps the rest for later."""

    ratio: float = Field(1.0, gt=0, le=1, description="share of entries that are sent; 1: all, uncompressed")
    error_feedback: bool = Field(True, description="what was not sent is added to the next gradient")


class TensorboardConfig(Strict):
    enabled: bool = Field(False, description="scalars for TensorBoard")
    output_path: str = Field("", description="folder; empty: runs")
    job_name: str = Field("DeepSpeedJobName", description="folder below it")


class WandbConfig(Strict):
    enabled: bool = Field(False, description="scalars for Weights & Biases")
    group: str | None = Field(None, description="refused: give it by the environment (WANDB_RUN_GROUP)")
    team: str | None = Field(None, description="refused: give it by the environment (WANDB_ENTITY)")
    project: str = Field("deepspeed", description="of W&B")

    @model_validator(mode="after")
    def _check(self) -> WandbConfig:
        if self.enabled and (self.group is not None or self.team is not None):
            raise ValueError("group and team: give them by the environment, WANDB_RUN_GROUP and WANDB_ENTITY")
        return self


class CsvConfig(Strict):
    enabled: bool = Field(False, description="a CSV file for each scalar")
    output_path: str = Field("", description="folder; empty: csv_monitor")
    job_name: str = Field("DeepSpeedJobName", description="folder below it")
