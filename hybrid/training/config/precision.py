"""DeepSpeed's sections `fp16` and `bf16`. No torch."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from hybrid.training.config.fields import NumberOrText, Section, Whole, WholeOrText

MAX_SCALE_POWER = 126  # 2 ** 127 is the largest power of two in fp32, in which losses are scaled


class Fp16Config(Section):
    """Training in fp16: `loss_scale` 0 is a dynamic loss scale, any other a static one (hybrid/optim/loss_scale.py).

    What steers a dynamic scale is checked against each other only where there is one, `enabled` with `loss_scale` 0: else the
    window and the floor may be anything. Numbers that fit no dynamic scale at all are always refused.
    """

    enabled: bool = Field(False, description="weights are gathered, and compute, in fp16; masters are fp32")
    auto_cast: bool = Field(False, description="inputs of a layer are cast to its dtype, always")
    loss_scale: NumberOrText = Field(0.0, ge=0, description="0: dynamic")
    initial_scale_power: Whole = Field(16, ge=0, le=MAX_SCALE_POWER, description="a dynamic scale starts at 2 ** this")
    loss_scale_window: WholeOrText = Field(1000, description="clean updates from one growth to the next")
    hysteresis: Whole = Field(2, ge=1, description="the overflow that lowers the scale: 1 the first, 2 the second, ...")
    consecutive_hysteresis: bool = Field(False, description="a clean update forgets overflows; off: only a growth does")
    min_loss_scale: WholeOrText = Field(1, description="an overflow at this scale ends the run")
    fp16_master_weights_and_grads: bool = Field(False, description="refused: masters are fp32")
    max_loss_scale: float = Field(
        2.0**32,
        gt=0,
        le=2.0**MAX_SCALE_POWER,
        description="a growth goes no further. Not DeepSpeed's, which has no cap. At 2 ** 32 fp16 resolves gradients of "
        "2 ** -56, far under Adam's eps: a larger one changes no step",
    )
    growth_factor: float = Field(2.0, gt=1, description="not DeepSpeed's, whose is always 2; a power of two rounds nothing")
    backoff_factor: float = Field(0.5, gt=0, lt=1, description="not DeepSpeed's, whose is always 1/2")

    @field_validator("fp16_master_weights_and_grads")
    @classmethod
    def _no_fp16_masters(cls, given: bool) -> bool:
        if given:
            raise ValueError(
                "true is given; allowed: false: in fp16 Adam's eps, 1e-8, is 0 and small updates vanish; to save memory use bf16 "
                "with bf16_master_weights_and_grads and bf16_optimizer_states, or offload the optimizer"
            )
        return given

    @model_validator(mode="after")
    def _check_dynamic(self) -> Fp16Config:
        if not self.dynamic:
            return self
        if self.loss_scale_window <= 0:
            raise ValueError(f"loss_scale_window={self.loss_scale_window} with a dynamic scale; allowed: 1 or more")
        if self.min_loss_scale <= 0:
            raise ValueError(f"min_loss_scale={self.min_loss_scale} with a dynamic scale; allowed: 1 or more")
        given = f"initial_scale_power={self.initial_scale_power}, a scale of {self.initial_scale:g}"
        if self.initial_scale < self.min_loss_scale:
            raise ValueError(f"{given}, is under min_loss_scale={self.min_loss_scale}; lower the latter or raise the former")
        if self.initial_scale > self.max_loss_scale:
            raise ValueError(f"{given}, is over max_loss_scale={self.max_loss_scale:g}; raise the latter or lower the former")
        return self

    @property
    def dynamic(self) -> bool:
        return self.enabled and self.loss_scale == 0

    @property
    def initial_scale(self) -> float:
        return 2.0**self.initial_scale_power


class Bf16Config(Section):
    """Training in bf16, without a loss scale."""

    enabled: bool = Field(False, description="weights are gathered, and compute, in bf16; masters are fp32")
    immediate_grad_update: bool = Field(False, description="gradients are reduced to fp32 as soon as they are there, always")
    check_grad_overflow: bool = Field(True, description="skip a step whose gradients are not finite")
    bf16_master_weights_and_grads: bool = Field(False, description="no fp32 copy of weights and gradients")
    bf16_optimizer_states: bool = Field(False, description="the optimizer's state in bf16")

    @model_validator(mode="after")
    def _check_masters(self) -> Bf16Config:
        weights, states = self.bf16_master_weights_and_grads, self.bf16_optimizer_states
        if states and not weights:
            raise ValueError("bf16_optimizer_states=true needs bf16_master_weights_and_grads=true; set both, or neither")
        if weights and not states:
            raise ValueError(
                "bf16_master_weights_and_grads=true without bf16_optimizer_states; allowed: both or neither, since a state has "
                "the dtype of its weights here; set bf16_optimizer_states=true"
            )
        return self
