"""Teachers, and the divergence from them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from hybrid.config import Strict

Scoring = Literal["auto", "engine", "module"]
SCORING = (
    "how its hidden states are made: engine: packed prefills of the inference engine, a prompt once for all its samples; module: "
    "the training module's forward; auto: engine for registered model types"
)


class FrozenTeacher(Strict):
    kind: Literal["frozen"] = "frozen"
    path: str | None = Field(None, description="another HF folder or hub name")
    recipe: str | None = Field(
        None, description="a recipe that trains the teacher into output_dir/teacher/model if it is not there yet"
    )
    offload: bool = Field(False, description="move its shards to host memory between uses (CUDA)")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(None, description="None: as engine.compute_dtype")
    scoring: Scoring = Field("auto", description=SCORING)

    @model_validator(mode="after")
    def _one(self) -> FrozenTeacher:
        if (self.path is None) == (self.recipe is None):
            raise ValueError("give exactly one of path (a HF folder or hub name) and recipe (which trains it)")
        return self


class SelfTeacher(Strict):
    """The student itself, made better by what the `privileged` column adds to its prompt."""

    kind: Literal["self"]
    weights: Literal["start", "live", "ema"] = Field("start", description="frozen at the start, today's, or an average")
    ema_decay: float = Field(0.99, ge=0, lt=1, description="weights: ema only")
    offload: bool = Field(False, description="as a frozen teacher's; weights: live has none of its own to move")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(None, description="as a frozen teacher's; not for weights: live")
    scoring: Scoring = Field("auto", description=SCORING)

    @model_validator(mode="after")
    def _check(self) -> SelfTeacher:
        if self.weights == "live" and (self.offload or self.compute_dtype is not None):
            raise ValueError("weights=live reads the student's own weights; leave out offload and compute_dtype")
        return self


def _kind(teacher: Any) -> str | None:
    """A teacher is frozen unless it says otherwise."""
    return teacher.get("kind", "frozen") if isinstance(teacher, dict) else getattr(teacher, "kind", None)


Teacher = Annotated[Annotated[FrozenTeacher, Tag("frozen")] | Annotated[SelfTeacher, Tag("self")], Discriminator(_kind)]


class DistillLoss(Strict):
    """The per-token divergence (equations in trainers/losses/divergence.py); student and teacher share the rollout's
    temperature, and there is no tau^2 factor."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "jsd_normalised", "skew_forward", "skew_reverse", "sampled_token"] = (
        "reverse_kl"
    )
    beta: float = Field(0.5, ge=0, le=1, description="jsd, jsd_normalised")
    skew: float = Field(0.1, ge=0, le=1, description="lambda of skew_forward and skew_reverse")
    top_k: int | None = Field(None, ge=1, description="restrict the two KLs to a support of k tokens; None: all of them")
    support: Literal["teacher", "student"] = Field("teacher", description="whose top k")
    tail: Literal["bucket", "renormalise"] = "bucket"
    clip_element: float | None = Field(None, gt=0, description="cap of each vocabulary term, before the sum")
    clip_token: float | None = Field(None, gt=0, description="cap of a token's divergence, after the sum")
    ratio_clip: float | None = Field(None, gt=0, description="sampled_token: clip the ratio to 1 +- this")
    cross_entropy: float = Field(0.0, ge=0, description="weight of cross-entropy in the steps on given responses")
    reduction: Literal["token_mean", "sequence_mean", "sum_per_constant"] = "token_mean"
    constant_length: int | None = Field(None, ge=1, description="sum_per_constant: the L in sum / (sequences * L)")

    @model_validator(mode="after")
    def _check(self) -> DistillLoss:
        if self.top_k is not None and self.divergence not in ("forward_kl", "reverse_kl"):
            raise ValueError(f"loss.top_k with divergence={self.divergence}; allowed: forward_kl, reverse_kl")
        if self.ratio_clip is not None and self.divergence != "sampled_token":
            raise ValueError(f"loss.ratio_clip with divergence={self.divergence}; allowed: sampled_token")
        if self.clip_element is not None and self.divergence == "sampled_token":
            raise ValueError(
                "loss.clip_element with divergence=sampled_token, which has no sum over the vocabulary; use ratio_clip"
            )
        if self.reduction == "sum_per_constant" and self.constant_length is None:
            raise ValueError("loss.reduction=sum_per_constant needs loss.constant_length")
        return self
