"""A whole recipe, by the algorithm that `recipe:` names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from hybrid.config import HybridConfig, Strict, over
from trainers.config.models import ModelConfig
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
    RewardShaping,
    Updates,
)
from trainers.config.sections import (
    CertificateConfig,
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    PairLoss,
    RolloutSection,
    TrainSection,
)
from trainers.config.teachers import DistillLoss, Teacher
from trainers.rewards.config import RewardConfig

WITH_DROPOUT, NEAR_REFERENCE = HybridConfig(dropout=True), RewardKL(beta=0.05)


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

    @model_validator(mode="after")
    def _check_eval(self) -> RunConfig:
        if self.eval.by_training_rewards and "rewards" not in type(self).model_fields:
            raise ValueError("eval.reward=rewards are those that a policy is trained with; allowed here: a reward's own name")
        return self


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
    engine: Annotated[HybridConfig, over(WITH_DROPOUT)] = WITH_DROPOUT


class PolicyConfig(RunConfig):
    """What the recipes of policy optimisation share."""

    rollout: RolloutSection = RolloutSection()
    rewards: tuple[RewardComponent, ...] = Field(strict=False)
    shaping: RewardShaping = RewardShaping()
    reference: Reference | None = Field(Reference(), description="null: none, where no KL to it is asked for")
    reward_kl: RewardKL = RewardKL()
    updates: Updates = Updates()
    mismatch: Mismatch = Mismatch()
    loss: PolicyLoss = PolicyLoss()
    teacher: Teacher | None = Field(None, description="pulls the policy to it, beside the reward")
    distill: DistillLoss = DistillLoss()
    distill_weight: float = Field(1.0, gt=0, description="of the divergence from the teacher")
    ptx: PretrainingMix | None = None
    ema_decay: float | None = Field(None, gt=0, lt=1, description="of an average of the policy; exported to output_dir/model_ema")

    @model_validator(mode="after")
    def _check(self) -> PolicyConfig:
        if not self.rewards and self.rollout.environment is None:
            raise ValueError("rewards is empty; allowed: one component or more, each with `name`, `model` or `recipe`; none only "
                             "with rollout.environment, whose rewards count then")  # fmt: skip
        if self.rollout.given_fraction > 0:
            raise ValueError("rollout.given_fraction: a policy gradient needs tokens drawn from the policy; set it to 0")
        wants_reference = self.reward_kl.beta > 0 or self.reward_kl.target is not None or self.loss.kl > 0
        if self.reference is None and wants_reference:
            raise ValueError("reward_kl and loss.kl need a reference; leave out `reference: null`, or set them to 0")
        if self.reward_kl.target is not None and self.reward_kl.beta == 0:
            raise ValueError("reward_kl.target adapts reward_kl.beta, which is 0 and would stay so; give beta a start value")
        if self.loss.ratio == "sequence" and self.mismatch.correct != "off" and self.mismatch.level == "token":
            raise ValueError(
                "loss.ratio=sequence with mismatch.level=token; allowed: level=sequence, whose weight is one per response"
            )
        if self.teacher is not None and self.distill.divergence == "sampled_token":
            raise ValueError("distill.divergence=sampled_token is a policy gradient of its own; use recipe: opsd, or a KL here")
        if self.teacher is not None and self.distill.cross_entropy > 0:
            raise ValueError("distill.cross_entropy acts on given responses; use ptx")
        if self.mismatch.correct != "off" and self.updates.old_logprobs == "rollout":
            raise ValueError(
                "updates.old_logprobs=rollout takes the engine's log-probs for the trainer's: mismatch.correct would find no "
                "difference; allowed: auto, recompute"
            )
        if self.distill.reduction != "token_mean":
            raise ValueError(
                f"distill.reduction={self.distill.reduction}: the divergence is added to the loss of each token and shares "
                "loss.reduction; leave it out"
            )
        for component in self.rewards:
            if isinstance(component, RewardConfig) and component.seconds_at_most >= self.engine.timeout_s:
                raise ValueError(
                    f"rewards: {component.label} may take {component.seconds_at_most:g} s for a step, and other ranks wait "
                    f"engine.timeout_s={self.engine.timeout_s:g}; raise that, or set batch_timeout_s below it"
                )
        total = self.rollout.prompts_per_step * self.rollout.samples_per_prompt
        if self.updates.minibatches > total:
            raise ValueError(f"updates.minibatches={self.updates.minibatches}; allowed: up to the step's {total} responses")
        if self.reward_kl.target is not None and total >= 5 * self.reward_kl.horizon:
            raise ValueError(
                f"reward_kl.horizon={self.reward_kl.horizon} with {total} responses in a step could make beta 0 or negative; "
                "allowed: more than a fifth of them"
            )
        return self

    @property
    def num_updates(self) -> int:
        """Optimizer steps of the policy in the whole run."""
        return self.max_steps * self.updates.steps


class PPOConfig(PolicyConfig):
    """Actor, critic, reference and reward in one process group (Schulman et al. 2017; Ouyang et al. 2022)."""

    recipe: Literal["ppo"]
    reward_kl: Annotated[RewardKL, over(NEAR_REFERENCE)] = NEAR_REFERENCE
    critic: Critic = Critic()
    advantages: Advantages = Advantages()

    @model_validator(mode="after")
    def _check_warmup(self) -> PPOConfig:
        if self.critic.warmup_steps >= self.max_steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} with max_steps={self.max_steps}: the policy would never learn; "
                "allowed: fewer than max_steps"
            )
        return self

    @property
    def num_updates(self) -> int:
        return (self.max_steps - self.critic.warmup_steps) * self.updates.steps


class GRPOConfig(PolicyConfig):
    """Group-relative methods without a critic; the estimator, clips, ratio and reduction make GRPO, Dr. GRPO, RLOO, REINFORCE++,
    DAPO or GSPO of it (README has the table)."""

    recipe: Literal["grpo"]
    estimator: Estimator = "grpo"
    dynamic_sampling: DynamicSampling | None = None

    @model_validator(mode="after")
    def _check_groups(self) -> GRPOConfig:
        grouped = self.estimator in ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
        if grouped and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                f"rollout.samples_per_prompt={self.rollout.samples_per_prompt} with estimator={self.estimator}, which compares "
                "the samples of a prompt; allowed: 2 or more, or estimator=reinforce_pp"
            )
        if self.dynamic_sampling is not None and self.rollout.samples_per_prompt < 2:
            raise ValueError("dynamic_sampling compares the samples of a prompt; set rollout.samples_per_prompt to 2 or more")
        return self


class RewardRecipe(RunConfig):
    """Bradley-Terry on pairs: `chosen` is preferred to `rejected`. Keeps the checkpoint's dropout, as SFT does."""

    recipe: Literal["reward"]
    engine: Annotated[HybridConfig, over(WITH_DROPOUT)] = WITH_DROPOUT
    loss: PairLoss = PairLoss()

    @field_validator("data", mode="before")
    @classmethod
    def _chosen(cls, data: Any) -> Any:
        return {"response_column": "chosen", "rejected_column": "rejected", **data} if isinstance(data, dict) else data


CONFIGS: dict[str, type[RunConfig]] = {
    "opsd": OPSDConfig,
    "sft": SFTConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "reward": RewardRecipe,
}
