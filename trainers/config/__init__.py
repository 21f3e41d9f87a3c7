"""The YAML of a run as typed, frozen classes. No torch.

A recipe is `recipe:` (the algorithm) plus its sections; an unknown key is an error that names the nearest known one
(recipes.settings formats it). Values are resolved once, written to `output_dir/config.yaml`, and never change afterwards.

Rooms:
    models      the model that a run starts from
    teachers    teachers, and the divergence from them
    sections    sections that recipes share
    recipes     a whole recipe, by algorithm
"""

from trainers.config.models import ModelConfig, NewModel
from trainers.config.recipes import CONFIGS, OPSDConfig, RunConfig, SFTConfig
from trainers.config.sections import (
    CertificateConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    RolloutSection,
    SamplingConfig,
    TrainSection,
)
from trainers.config.teachers import DistillLoss, FrozenTeacher, SelfTeacher, Teacher

__all__ = [
    "CONFIGS",
    "CertificateConfig",
    "CheckpointConfig",
    "DataConfig",
    "DistillLoss",
    "EvalConfig",
    "FrozenTeacher",
    "LogConfig",
    "ModelConfig",
    "NewModel",
    "OPSDConfig",
    "RolloutSection",
    "RunConfig",
    "SFTConfig",
    "SamplingConfig",
    "SelfTeacher",
    "Teacher",
    "TrainSection",
]
