"""A whole recipe, by the algorithm that `recipe:` names."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hybrid.config import HybridConfig, Strict
from trainers.config.models import ModelConfig
from trainers.config.sections import (
    CertificateConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    RolloutSection,
    TrainSection,
)
from trainers.config.teachers import DistillLoss, Teacher


class RunConfig(Strict):
    """What every recipe has."""

    output_dir: str
    seed: int = Field(0, ge=0)
    max_steps: int = Field(100, ge=1)
    model: ModelConfig
    data: DataConfig
    engine: HybridConfig = HybridConfig()
    train: TrainSection = TrainSection()
    eval: EvalConfig = EvalConfig()
    certificate: CertificateConfig = CertificateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class OPSDConfig(RunConfig):
    recipe: Literal["opsd"]
    teacher: Teacher
    rollout: RolloutSection = RolloutSection()
    loss: DistillLoss = DistillLoss()

    @model_validator(mode="after")
    def _check(self) -> OPSDConfig:
        if self.loss.divergence == "sampled_token" and self.rollout.given_fraction > 0:
            raise ValueError("loss.divergence=sampled_token needs tokens drawn from the policy; set rollout.given_fraction=0")
        if self.loss.cross_entropy > 0 and self.rollout.given_fraction == 0:
            raise ValueError("loss.cross_entropy acts on given responses, and rollout.given_fraction=0 uses none; raise it")
        return self


class SFTConfig(RunConfig):
    """Unlike on-policy recipes, keeps the checkpoint's dropout unless `engine.dropout` says otherwise."""

    recipe: Literal["sft"]
    engine: HybridConfig = HybridConfig(dropout=True)

    @field_validator("engine", mode="before")
    @classmethod
    def _keep_dropout(cls, engine: Any) -> Any:
        return {"dropout": True, **engine} if isinstance(engine, dict) else engine


CONFIGS: dict[str, type[RunConfig]] = {"opsd": OPSDConfig, "sft": SFTConfig}
