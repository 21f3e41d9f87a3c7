"""`optimizer`: a type and its parameters, as DeepSpeed and torch name them."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError, model_validator

from hybrid.config import OptimizerConfig, Strict
from hybrid.training.config.fields import nearest, one_line

_ADAM = ("lr", "betas", "eps", "weight_decay")
TYPES: dict[str, tuple[str, ...]] = {  # the parameters each takes
    "adam": (*_ADAM, "adam_w_mode"),
    "adamw": _ADAM,
    "sgd": ("lr", "momentum", "weight_decay", "nesterov"),
    "lion": ("lr", "betas", "weight_decay"),
    "adafactor": ("lr", "weight_decay"),
    "muon": (*_ADAM, "momentum", "muon_lr", "adam_lr", "ns_steps", "nesterov"),
}


_ALIASES = {"fusedadam": "adam", "deepspeedcpuadam": "adam", "cpuadam": "adam"}
_COMPRESSED = "gradients are compressed by gradient_compression, with any optimizer"
_NONE_HERE = {
    "onebitadam": _COMPRESSED,
    "zerooneadam": _COMPRESSED,
    "onebitlamb": _COMPRESSED,
    "lamb": "give one to initialize, as a function of parameter groups",
    "adagrad": "give torch.optim.Adagrad to initialize, as a function of parameter groups",
}


class OptimizerSection(Strict):
    type: str = Field(description="Adam, AdamW, SGD, Lion, Adafactor or Muon")
    params: dict[str, Any] = Field({}, description="of that type; weight_decay is applied to every parameter, as DeepSpeed does")

    @model_validator(mode="after")
    def _check(self) -> OptimizerSection:
        name = self._name
        if name in _NONE_HERE:
            raise ValueError(f"type={self.type!r} is not offered: {_NONE_HERE[name]}; allowed: {', '.join(TYPES)}")
        if "max_grad_norm" in self.params:
            raise ValueError("params.max_grad_norm: give it as gradient_clipping, beside the section")
        if name not in TYPES:
            raise ValueError(f"type={self.type!r}; {nearest(name, TYPES)}")
        for key in self.params:
            if key not in TYPES[name]:
                raise ValueError(f"params.{key} is unknown to {self.type}; {nearest(key, TYPES[name])}")
        if not isinstance(self.params.get("adam_w_mode", True), bool):
            raise ValueError(f"params.adam_w_mode={self.params['adam_w_mode']!r}; allowed: true, false")
        try:
            self.settings()
        except ValidationError as error:
            raise ValueError(f"params: {one_line(error)}") from None
        return self

    @property
    def _name(self) -> str:
        return _ALIASES.get(self.type.lower(), self.type.lower())

    def settings(self) -> OptimizerConfig:
        """The same in this project's words. DeepSpeed's "Adam" decays weights as AdamW does unless adam_w_mode is false."""
        given = {key: value for key, value in self.params.items() if key != "adam_w_mode"}
        name = self._name
        if name == "adam" and self.params.get("adam_w_mode", True):
            name = "adamw"
        given.setdefault("lr", 1e-3)
        return OptimizerConfig.model_validate({"name": name, **given, "max_grad_norm": None})
