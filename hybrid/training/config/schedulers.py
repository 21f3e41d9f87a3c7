"""DeepSpeed's section `scheduler`: a type, and its parameters under their own names and defaults. No torch.

What they mean is in hybrid/optim/rates.py. In all of them the index of an optimizer step counts from -1: the first step runs at
index -1, the one after k calls of the scheduler's `step` at index k - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError, model_validator

from hybrid.config import Strict
from hybrid.training.config.fields import Section, Whole, nearest, one_line

Rate = Annotated[float, Field(ge=0)]
RatePerGroup = Rate | Annotated[tuple[Rate, ...], Field(strict=False, min_length=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
MomentumPerGroup = Momentum | Annotated[tuple[Momentum, ...], Field(strict=False, min_length=1)]


class ScheduleParams(Section):
    """What every schedule takes."""

    last_batch_iteration: Whole = Field(-1, ge=-1, description="the index of the first step; -1: from the beginning")


class Warmup(ScheduleParams):
    """The first `warmup_num_steps` indices rise.

    `warmup_num_steps`: 5, 1e3 (as JSON reads it, a float), numpy integers are taken. 0 is no warm-up: the first step runs at the
    full rate. (DeepSpeed refuses it now and made 2 of it before; in every other framework it is no warm-up, and so it is in
    configurations out there.) 1 counts as 2, as in DeepSpeed, whose logarithmic rise has no other meaning for it. null, true,
    -5, 1.5, NaN and text are refused.
    """

    warmup_num_steps: Whole = Field(1000, ge=0, description="steps of the rise; 0: none")
    warmup_type: Literal["log", "linear"] = Field("log", description="the rise at index i: log(i + 1) / log(steps), or i / steps")

    @property
    def warmup_end(self) -> int:
        """The first index after the rise."""
        return max(2, self.warmup_num_steps) if self.warmup_num_steps else 0


class Decay(Warmup):
    """A rise, then a fall that ends at `total_num_steps`. Where that is not after the rise, the floor follows the rise at once,
    with a warning: a short trial of a long recipe is no mistake."""

    AUTO: ClassVar[Mapping[str, Any]] = {"total_num_steps": None}

    total_num_steps: Annotated[Whole, Field(ge=1)] | None = Field(
        description='"auto" or null: whoever knows the number fills it in (SchedulerConfig.until)'
    )


class WarmupLR(Warmup):
    """From `warmup_min_lr` to `warmup_max_lr`, then constant."""

    AUTO: ClassVar[Mapping[str, Any]] = {"warmup_max_lr": None}

    warmup_min_lr: RatePerGroup = Field(0.0, description="where the rise begins")
    warmup_max_lr: RatePerGroup | None = Field(None, description='null or "auto": the optimizer\'s own rates')

    @model_validator(mode="after")
    def _check_order(self) -> WarmupLR:
        in_order(self, "warmup_min_lr", "warmup_max_lr")
        return self


class WarmupDecayLR(Decay):
    """From `warmup_min_lr` to `warmup_max_lr`, then down a line to `warmup_min_lr` at `total_num_steps`."""

    AUTO: ClassVar[Mapping[str, Any]] = {"total_num_steps": None, "warmup_max_lr": None}

    warmup_min_lr: RatePerGroup = Field(0.0, description="where the rise begins")
    warmup_max_lr: RatePerGroup | None = Field(0.001, description='null or "auto": the optimizer\'s own rates')

    @model_validator(mode="after")
    def _check_order(self) -> WarmupDecayLR:
        in_order(self, "warmup_min_lr", "warmup_max_lr")
        return self


class WarmupCosineLR(Decay):
    """Shares of the optimizer's own rates: from `warmup_min_ratio` to 1, then along half a cosine to `cos_min_ratio`."""

    warmup_min_ratio: float = Field(0.0, ge=0, le=1, description="share of the rate where the rise begins")
    cos_min_ratio: float = Field(0.0001, ge=0, le=1, description="share of the rate at the end")


class OneCycle(ScheduleParams):
    """Up from `cycle_min_lr` to `cycle_max_lr` and back while the momentum goes down and back, then a decay (Smith 2018,
    arXiv:1803.09820)."""

    cycle_min_lr: RatePerGroup = Field(description="at both ends of the cycle")
    cycle_max_lr: RatePerGroup = Field(description="at its top")
    decay_lr_rate: float = Field(0.0, ge=0, description="after the cycle, per decay_step_size steps")
    cycle_first_step_size: Whole = Field(2000, ge=1, description="steps of the way up")
    cycle_second_step_size: Annotated[Whole, Field(ge=0)] | None = Field(None, description="of the way down; null: as many")
    cycle_first_stair_count: Whole = Field(0, ge=0, description="stairs of the way up; 0: none, it is a line")
    cycle_second_stair_count: Annotated[Whole, Field(ge=0)] | None = Field(None, description="of the way down; null: as many")
    decay_step_size: Whole = Field(0, ge=0, description="0: no decay")
    cycle_momentum: bool = Field(True, description="the momentum goes the other way")
    cycle_min_mom: MomentumPerGroup = Field(0.8, description="at the top of the cycle")
    cycle_max_mom: MomentumPerGroup = Field(0.9, description="at both its ends")
    decay_mom_rate: float = Field(
        0.0, ge=0, description="after the cycle the momentum rises by this share per decay_step_size steps"
    )

    @model_validator(mode="after")
    def _check_order(self) -> OneCycle:
        in_order(self, "cycle_min_lr", "cycle_max_lr")
        in_order(self, "cycle_min_mom", "cycle_max_mom")
        return self

    @property
    def down_steps(self) -> int:
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def down_stairs(self) -> int:
        return self.cycle_first_stair_count if self.cycle_second_stair_count is None else self.cycle_second_stair_count


class LRRangeTest(ScheduleParams):
    """Up and up, to see where training breaks (Smith 2018, arXiv:1803.09820)."""

    lr_range_test_min_lr: RatePerGroup = Field(1e-3, description="the first rate")
    lr_range_test_step_size: Whole = Field(
        2000, ge=1, description="steps in which the rate rises once by step_rate times the first"
    )
    lr_range_test_step_rate: float = Field(1.0, ge=0, description="how much each rise adds, in first rates")
    lr_range_test_staircase: bool = Field(False, description="rise only at the end of each step_size steps")


SCHEDULES: dict[str, type[ScheduleParams]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


class SchedulerConfig(Strict):
    """`{"type": ..., "params": {...}}`. The type is matched as it is written."""

    type: str
    params: WarmupLR | WarmupDecayLR | WarmupCosineLR | OneCycle | LRRangeTest

    @model_validator(mode="before")
    @classmethod
    def _of_its_type(cls, given: Any) -> Any:
        if not isinstance(given, Mapping) or "type" not in given:
            return given
        name = given["type"]
        if not isinstance(name, str) or name not in SCHEDULES:
            raise ValueError(f"type {name!r} is unknown; {nearest(str(name), SCHEDULES)}")
        params = given.get("params", {})
        try:
            return {**given, "params": SCHEDULES[name].model_validate({} if params is None else params)}
        except ValidationError as error:
            raise ValueError(f"params of {name}: {one_line(error)}") from None

    def until(self, steps: int) -> SchedulerConfig:
        """With a decay that ends after `steps`, where its end is left to be filled in."""
        if not isinstance(self.params, Decay) or self.params.total_num_steps is not None:
            return self
        return SchedulerConfig.model_validate(
            {"type": self.type, "params": {**self.params.model_dump(), "total_num_steps": steps}}
        )


def in_order(params: BaseModel, low_name: str, high_name: str) -> None:
    """Raises ValueError where a lower bound is above its upper one, or their lists differ in length."""
    low, high = getattr(params, low_name), getattr(params, high_name)
    if high is None:
        return
    lows, highs = (v if isinstance(v, tuple) else (v,) for v in (low, high))
    if len(lows) != len(highs) and len(lows) > 1 and len(highs) > 1:
        raise ValueError(f"{low_name} has {len(lows)} values, {high_name} {len(highs)}; allowed: one, or one per parameter group")
    groups = max(len(lows), len(highs))
    if any(a > b for a, b in zip(lows * (groups // len(lows)), highs * (groups // len(highs)), strict=True)):
        raise ValueError(f"{low_name}={low} is above {high_name}={high}; exchange them")
