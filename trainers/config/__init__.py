"""The YAML of a run as typed, frozen classes. No torch.

A recipe is `recipe:` (the algorithm) plus its sections; an unknown key is an error that names the nearest known one
(recipes.settings formats it). Values are resolved once, written to `output_dir/config.yaml`, and never change afterwards.

Rooms:
    models      the model that a run starts from
    teachers    teachers, and the divergence from them
    sections    sections that recipes share
    policy      policy optimisation: rewards, the KL, the clipped loss, the critic
    recipes     a whole recipe, by algorithm
"""

from trainers.config.models import ModelConfig, NewModel
from trainers.config.policy import (
    Advantages,
    Critic,
    DynamicSampling,
    Estimator,
    Mismatch,
    PolicyLoss,
    PretrainingMix,
    Reference,
    RewardComponent,
    RewardKL,
    RewardModelRef,
    RewardShaping,
    Updates,
)
from trainers.config.recipes import CONFIGS, GRPOConfig, OPSDConfig, PolicyConfig, PPOConfig, RewardRecipe, RunConfig, SFTConfig
from trainers.config.sections import (
    CertificateConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    PairLoss,
    RolloutSection,
    SamplingConfig,
    TrainSection,
)
from trainers.config.teachers import DistillLoss, FrozenTeacher, SelfTeacher, Teacher

__all__ = [
    "CONFIGS",
    "Advantages",
    "CertificateConfig",
    "CheckpointConfig",
    "Critic",
    "DataConfig",
    "DistillLoss",
    "DynamicSampling",
    "Estimator",
    "EvalConfig",
    "FrozenTeacher",
    "GRPOConfig",
    "LogConfig",
    "Mismatch",
    "ModelConfig",
    "NewModel",
    "OPSDConfig",
    "PPOConfig",
    "PairLoss",
    "PolicyConfig",
    "PolicyLoss",
    "PretrainingMix",
    "Reference",
    "RewardComponent",
    "RewardKL",
    "RewardModelRef",
    "RewardRecipe",
    "RewardShaping",
    "RolloutSection",
    "RunConfig",
    "SFTConfig",
    "SamplingConfig",
    "SelfTeacher",
    "Teacher",
    "TrainSection",
    "Updates",
]
