"""`zero_optimization`: how parameters, gradients and optimizer state are spread over ranks and host memory."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from hybrid.config import Strict
from hybrid.training.config.fields import Whole

OFFLOAD_DEVICES = ("none", "cpu")


class OffloadConfig(Strict):
    """Where a part lives between its uses."""

    device: str = Field("none", description="where: none (on the device) or cpu")
    pin_memory: bool = Field(True, description="page-locked, so that copies run beside the computation (on CUDA)")

    @field_validator("device")
    @classmethod
    def _check_device(cls, device: str) -> str:
        if device not in OFFLOAD_DEVICES:
            raise ValueError(f"{device!r}; allowed: {', '.join(OFFLOAD_DEVICES)} (there is no off-load to NVMe)")
        return device

    @property
    def on(self) -> bool:
        return self.device == "cpu"


class ZeroConfig(Strict):
    stage: Whole = Field(
        0,
        ge=0,
        le=3,
        description="0: every rank holds everything; 1: optimizer state and masters are sharded, 2: gradients, 3: weights",
    )
    offload_optimizer: OffloadConfig = Field(OffloadConfig(), description="optimizer state, and the step on it, in host memory")
    offload_param: OffloadConfig = Field(
        OffloadConfig(), description="shards of weights, gradients and optimizer state in host memory, and the step there"
    )
    zero_hpz_partition_size: int = Field(
        1, ge=1, description="above 1: after its forward a layer stays spread over that many ranks, so backward gathers from them"
    )
    mics_shard_size: int = Field(
        -1,
        ge=-1,
        description="above 0: so many ranks hold one copy of the weights together, and copies add their gradients (HSDP)",
    )
    ignore_unused_parameters: bool = Field(
        True, description="a parameter that a backward does not reach keeps no gradient; false: that is an error"
    )
    gather_16bit_weights_on_model_save: bool = Field(
        False, alias="stage3_gather_16bit_weights_on_model_save", description="save_16bit_model works at stage 3"
    )

    @model_validator(mode="after")
    def _check(self) -> ZeroConfig:
        if self.offload_param.on and self.stage != 3:
            raise ValueError(f"offload_param needs stage 3, where weights are sharded; given: stage {self.stage}")
        if self.offload_optimizer.on and self.stage == 0:
            raise ValueError("offload_optimizer needs stage 1, 2 or 3; given: stage 0, where nothing is sharded")
        if self.zero_hpz_partition_size > 1 and self.stage != 3:
            raise ValueError(f"zero_hpz_partition_size needs stage 3; given: stage {self.stage}")
        if self.mics_shard_size == 0:
            raise ValueError("mics_shard_size=0; allowed: a number of ranks, or -1 for none")
        if self.mics_shard_size > 0 and self.stage == 0:
            raise ValueError("mics_shard_size needs stage 1, 2 or 3; given: stage 0, where nothing is sharded")
        return self
