"""Policy optimisation: estimators, the clipped loss, the KL to a reference, the critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hybrid.config import OptimizerConfig, Strict
from trainers.rewards.config import RewardConfig

KLEstimator = Literal["k1", "k2", "k3"]


class PolicyLoss(Strict):
    """max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)) per token, and what is added to it (trainers/losses/policy.py)."""

    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.2, gt=0, description="above clip_low: DAPO's asymmetric clip")
    dual_clip: float | None = Field(None, gt=1, description="where A < 0 the loss is at most -A times this (Ye et al. 2020)")
    ratio: Literal["token", "sequence"] = Field("token", description="sequence: GSPO's ratio, the geometric mean over a response")
    entropy: float = Field(0.0, description="weight of the entropy bonus")
    kl: float = Field(0.0, ge=0, description="weight of the KL to the reference, as a loss")
    kl_estimator: Literal["k2", "k3", "k3_value"] = Field(
        "k2",
        description="of the KL loss. k2, and k3 (k3's value with k2's gradient): the reverse KL's gradient on-policy; k3_value: "
        "k3 with its own gradient, which is the forward KL's",
    )
    reduction: Literal["token_mean", "sequence_mean", "sum_per_constant"] = "token_mean"
    constant_length: int | None = Field(None, ge=1, description="sum_per_constant: the L in sum / (sequences * L) (Dr. GRPO)")

    @model_validator(mode="after")
    def _check(self) -> PolicyLoss:
        if self.reduction == "sum_per_constant" and self.constant_length is None:
            raise ValueError("loss.reduction=sum_per_constant needs loss.constant_length")
        return self


class Reference(Strict):
    """The policy that the KL is taken to: a frozen copy, or with LoRA the base with the adapter off."""

    path: str | None = Field(None, description="a HF folder or hub name; None: what the policy starts from")
    offload: bool = Field(False, description="move its copy to host memory between uses (CUDA)")


class Mismatch(Strict):
    """Correction for a rollout engine whose log-probs are not the trainer's: w = exp(log p_train - log p_rollout), detached.
    How far the two are apart is in the metrics always."""

    correct: Literal["off", "truncate", "mask"] = Field("off", description="truncate: min(w, high); mask: 0 outside [low, high]")
    level: Literal["token", "sequence"] = Field(
        "token", description="sequence: one w for a response, the product over its tokens"
    )
    low: float = Field(0.5, ge=0, description="mask only")
    high: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Mismatch:
        if self.correct == "mask" and self.low >= self.high:
            raise ValueError(f"mismatch: low={self.low:g} and high={self.high:g} leave no weight inside; allowed: low below high")
        return self


class RewardKL(Strict):
    """-beta k_t in the reward of each token."""

    beta: float = Field(0.0, ge=0)
    estimator: KLEstimator = "k1"
    target: float | None = Field(None, gt=0, description="adaptive beta: the KL per response to steer to (Ziegler et al. 2019)")
    horizon: int = Field(10_000, ge=1, description="adaptive beta: responses over which it may change by about the error")


class RewardModelRef(Strict):
    """A component of the reward: a sequence-classification folder (recipe: reward), read at a response's last token."""

    model: str | None = Field(None, description="a HF folder or hub name with one label")
    recipe: str | None = Field(None, description="a recipe that trains it into output_dir/reward/model if it is not there yet")
    weight: float = 1.0
    offload: bool = Field(False, description="move its shards to host memory between uses (CUDA)")

    @model_validator(mode="after")
    def _one(self) -> RewardModelRef:
        if (self.model is None) == (self.recipe is None):
            raise ValueError("give exactly one of model (a HF folder or hub name) and recipe (which trains it)")
        return self


def _reward_class(reward: Any) -> str:
    if not isinstance(reward, dict):
        return type(reward).__name__
    return "RewardModelRef" if "model" in reward or "recipe" in reward else "RewardConfig"


# Tags that are no keys, so that they can be told apart in the path of an error
RewardComponent = Annotated[
    Annotated[RewardConfig, Tag("RewardConfig")] | Annotated[RewardModelRef, Tag("RewardModelRef")], Discriminator(_reward_class)
]


class RewardShaping(Strict):
    """What becomes of a response's score before advantages are made of it."""

    normalise: Literal["none", "scale", "whiten"] = Field(
        "none", description="by running statistics over all responses so far; scale: the deviation only; whiten: the mean too"
    )
    clip: float | None = Field(None, gt=0, description="to +- this, after it was normalised")
    missing_eos_penalty: float = Field(0.0, ge=0, description="taken off where a response was cut by the length limit")
    mask_truncated: bool = Field(False, description="a response cut by the length limit is in no loss")


class Critic(Strict):
    """The value model: the backbone of a HF folder with one scalar head, in shards of its own."""

    path: str | None = Field(
        None, description="a HF folder (a causal LM, or a reward model with its head); None: the policy's start"
    )
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    clip: float | None = Field(0.2, gt=0, description="of a value's change, as the policy's ratio is clipped")
    warmup_steps: int = Field(0, ge=0, description="steps in which only the critic learns")
    offload: bool = Field(False, description="move its shards and optimizer state to host memory between uses (CUDA)")
    shared_weight: float | None = Field(
        None,
        gt=0,
        description="no model of its own: a scalar head on the policy's trunk, under the policy's optimizer, whose loss is added "
        "with this weight",
    )

    @model_validator(mode="after")
    def _check(self) -> Critic:
        if self.shared_weight is not None:
            for name in ("path", "optimizer", "warmup_steps", "offload"):
                if getattr(self, name) != Critic.model_fields[name].default:
                    raise ValueError(f"critic.{name} with critic.shared_weight, whose critic is the policy itself; leave one out")
        return self


class Advantages(Strict):
    """Generalised advantage estimation (Schulman et al. 2016)."""

    gamma: float = Field(1.0, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    bootstrap: bool = Field(True, description="a response cut by the length limit goes on with the value at its last token")
    whiten: bool = Field(True, description="to mean 0 and deviation 1 over all tokens of the step, on all ranks")


Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]


class DynamicSampling(Strict):
    """DAPO: prompts whose samples all have one reward teach nothing and are replaced by further prompts."""

    max_batches: int = Field(4, ge=1, description="draws of prompts in a step, at most; then it makes do with what there is")
    component: str | None = Field(
        None, description="compare this component of the reward (as metrics name it: reward/NAME); None: the whole reward"
    )


class PretrainingMix(Strict):
    """Adds weight x cross-entropy on given responses (or texts) to each update of the policy (PPO-ptx, Ouyang et al. 2022)."""

    data: str = Field(description="as data.train; its rows' prompt and response columns are named as there")
    weight: float = Field(1.0, gt=0)
    batch_size: int = Field(16, ge=1, description="sequences per update, over all ranks")
    completion_only: bool = True


class Updates(Strict):
    """Optimizer steps on one step's rollouts."""

    epochs: int = Field(1, ge=1)
    minibatches: int = Field(1, ge=1, description="per epoch, of as many responses each, over all ranks")
    old_logprobs: Literal["auto", "rollout", "recompute"] = Field(
        "auto",
        description="what the ratio is taken to: rollout: the engine's own log-probs, which the certificate proves equal to the "
        "trainer's; recompute: one more forward; auto: recompute where rollouts come from another engine, or are corrected",
    )

    @property
    def steps(self) -> int:
        return self.epochs * self.minibatches
