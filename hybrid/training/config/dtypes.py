"""Which dtype computes, which is sent, and which holds the masters: `data_types`, `torch_autocast`, `module_precision`."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from hybrid.config import Strict

Dtype = Literal["fp32", "fp16", "bf16"]
TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
PRESETS = ("norms", "losses")


class DataTypesConfig(Strict):
    grad_accum_dtype: Literal["fp32"] | None = Field(
        None, description="of gradients over micro-batches: fp32, unless communication_data_type or bf16 masters say otherwise"
    )
    buffer_dtype: Dtype | None = Field(None, description="floating-point buffers are cast to it; null: they stay as they are")
    optimizer_dtype: Literal["fp32", "param"] = Field(
        "fp32",
        description="of masters and optimizer state. fp32: always; param: that of the parameter as it came, where it is bf16 or "
        "fp32 (an fp16 parameter has fp32 ones, since Adam's eps would underflow)",
    )


class AutocastConfig(Strict):
    enabled: bool = Field(False, description="the forward runs under torch.autocast")
    dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="of products; norms and softmaxes stay in fp32")
    lower_precision_safe_modules: tuple[str, ...] = Field(
        ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        strict=False,
        description="classes, with their subclasses, whose weights are gathered in that dtype",
    )


class ModuleRule(Strict):
    """One rule of `module_precision`: the first that a module matches holds for it and for what is below it."""

    match: str = Field(
        description="norms, losses, class:NAME (with subclasses; NAME may be dotted), name:MODULE.PATH, or re:PATTERN of it"
    )
    dtype: Dtype = Field("fp32", description="its weights are gathered in, its inputs cast to")
    output: Literal["input", "keep", "fp32", "fp16", "bf16"] = Field(
        "input", description="dtype of what it returns: that of its first floating-point input, as it computes, or one by name"
    )

    @field_validator("match")
    @classmethod
    def _check_match(cls, match: str) -> str:
        kind, _, what = match.partition(":")
        if match in PRESETS:
            return match
        if kind not in ("class", "name", "re") or not what:
            raise ValueError(f"{match!r}; allowed: {', '.join(PRESETS)}, class:NAME, name:PATH, re:PATTERN")
        if kind == "re":
            try:
                re.compile(what)
            except re.error as error:
                raise ValueError(f"{what!r} is no regular expression: {error}") from None
        return match


class PrecisionPlan(Strict):
    """What the sections say together; see TrainingConfig.precision."""

    compute: Dtype | None  # of every module without a rule; None: each parameter's own
    bf16_masters: bool  # of all parameters
    autocast: AutocastConfig
    rules: tuple[ModuleRule, ...]
    data_types: DataTypesConfig

    @model_validator(mode="after")
    def _check(self) -> PrecisionPlan:
        if self.autocast.enabled and self.compute is not None:
            raise ValueError(f"torch_autocast together with {self.compute}; allowed: one of them")
        return self
