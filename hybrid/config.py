"""Settings of one HybridEngine. No torch."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from inference_v2.config import EngineConfig

Dtype = Literal["float32", "bfloat16"]


class Strict(BaseModel):
    """Frozen; an unknown key is an error, and so is a number that is not finite or a value of another type: "1" and true are
    not numbers. A list is taken for a tuple, since YAML and JSON have no other."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


def over(default: BaseModel) -> BeforeValidator:
    """For a section whose default is not its class's: what a user leaves out of it is as in `default`."""

    def merged(given: Any) -> Any:
        return {**default.model_dump(exclude_unset=True), **given} if isinstance(given, dict) else given

    return BeforeValidator(merged)


# Fields that only some optimizers have, and which: said of any other, they are refused.
OPTIMIZERS_WITH: dict[str, tuple[str, ...]] = {
    "betas": ("adamw", "adam", "lion", "muon"),
    "eps": ("adamw", "adam", "adafactor", "muon"),
    "momentum": ("sgd", "muon"),
    "nesterov": ("sgd", "muon"),
    "beta2_decay": ("adafactor",),
    "clip_threshold": ("adafactor",),
    "ns_steps": ("muon",),
    "muon_lr": ("muon",),
    "adam_lr": ("muon",),
    "muon_exclude": ("muon",),
}
# Defaults that depend on the optimizer, where it is not every field's own.
_DEFAULTS_OF: dict[str, dict[str, Any]] = {
    "lion": {"betas": (0.9, 0.99)},
    "muon": {"momentum": 0.95, "nesterov": True},
}


def _by_name(field: str, default: Any) -> Callable[[dict[str, Any]], Any]:
    """The default of `field`: the one that the chosen optimizer (validated before it) has, else `default`."""
    return lambda data: _DEFAULTS_OF.get(data.get("name", ""), {}).get(field, default)


def _require_patterns(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
    return patterns


class OptimizerConfig(Strict):
    """adamw: decoupled decay (Loshchilov and Hutter 2019). adam: decay added to the gradient. lion: Chen et al. 2023, needs the
    package lion-pytorch. adafactor: Shazeer and Stern 2018, with the step of torch.optim.Adafactor: at most lr, relative to each
    weight's RMS. muon: Jordan et al. 2024, matrices orthogonalized, the rest by AdamW."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor", "muon"] = "adamw"
    lr: float = Field(1e-5, ge=0)
    betas: tuple[float, float] = Field(
        default_factory=_by_name("betas", (0.9, 0.999)), strict=False, description="(0.9, 0.999); lion: (0.9, 0.99)"
    )
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0, description="not applied to biases and norm weights (parameters of one dimension)")
    momentum: float = Field(default_factory=_by_name("momentum", 0.0), ge=0, lt=1, description="sgd: 0; muon: 0.95")
    nesterov: bool = Field(default_factory=_by_name("nesterov", False), description="sgd: false; muon: true")
    beta2_decay: float = Field(-0.8, lt=0, description="adafactor: at step t, 1 - t^beta2_decay of the old mean square is kept")
    clip_threshold: float = Field(
        1.0, ge=1, description="adafactor: RMS that a tensor's update has at most, before the step size"
    )
    ns_steps: int = Field(5, ge=1, description="muon: Newton-Schulz steps")
    muon_lr: float | None = Field(None, ge=0, description="muon: of the matrices; None: lr")
    adam_lr: float | None = Field(None, ge=0, description="muon: of everything else; None: lr")
    muon_exclude: tuple[str, ...] = Field(
        ("embed", "lm_head", "score", "value_head", "wte", "wpe"),
        strict=False,
        description="muon: regular expressions; a matrix in whose name one is found goes to AdamW",
    )
    max_grad_norm: float | None = Field(1.0, gt=0, description="global norm of the raw gradients; None: no clipping")
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    total_steps: int | None = Field(None, ge=1, description="end of linear / cosine decay; recipes fill in max_steps")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="floor of the decay, as a share of lr")

    _patterns = field_validator("muon_exclude")(_require_patterns)

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ValueError(f"betas={self.betas}; allowed: each in [0, 1)")
        for key, owners in OPTIMIZERS_WITH.items():
            default = type(self).model_fields[key].get_default(call_default_factory=True, validated_data={"name": self.name})
            if self.name not in owners and (value := getattr(self, key)) != default:
                raise ValueError(f"{key}={value} with name={self.name}; allowed: name={', '.join(owners)}; or leave it out")
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov=true with momentum=0; allowed: momentum above 0")
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} > total_steps={self.total_steps}; lower warmup_steps")
        return self

    def until(self, steps: int) -> OptimizerConfig:
        """With a decay that ends at `steps`, where none is given."""
        return self if self.total_steps is not None else self.model_copy(update={"total_steps": steps})


class RolloutConfig(Strict):
    """How the sharded model generates."""

    gather: Literal["full", "stream", "auto"] = Field(
        "auto", description="full: a fused copy per rank; stream: layer by layer in lock step; auto: by bytes, logged"
    )
    on_leave: Literal["keep", "offload", "free"] = Field(
        "free", description="what happens to the fused copy and the KV pool when generation ends"
    )
    max_copy_bytes: int | None = Field(
        None, ge=1, description="what `auto` lets the fused copy take; None: half of the memory that is free at the first swap"
    )
    steal: Literal["auto", "on", "off"] = Field(
        "auto",
        description="gather: full: a rank with room takes over requests that another has not started. auto: with "
        "engine.batch_invariant; on: also without, where the last bits of log-probs, and so now and then a token, then depend on "
        "timing, and a resumed run is no longer bit-equal",
    )
    engine: EngineConfig = EngineConfig()


class LoraConfig(Strict):
    """Adapters on a frozen base (hybrid/lora.py). With `path`, its folder says all but dropout."""

    r: int = Field(16, ge=1, description="rank")
    alpha: int = Field(32, ge=1, description="the product counts alpha / r, with rslora alpha / sqrt(r)")
    dropout: float = Field(0.0, ge=0, lt=1, description="of what goes into A; only where engine.dropout is on")
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(strict=False)] = Field(
        "all-linear",
        description="ends of module names (q_proj); all-linear: every linear layer of the decoder, not embeddings and head",
    )
    exclude: tuple[str, ...] = Field((), strict=False, description="ends of module names that are left out of target_modules")
    rslora: bool = False
    init: Literal["default", "gaussian"] = Field("default", description="of A: uniform within 1 / sqrt(in), or normal, std 1 / r")
    seed: int = Field(0, ge=0, description="of A")
    path: str | None = Field(None, description="a folder of peft's to start from")

    @model_validator(mode="after")
    def _check(self) -> LoraConfig:
        if not self.target_modules:
            raise ValueError("target_modules=[]; allowed: all-linear, or names of modules")
        fixed = ("r", "alpha", "target_modules", "exclude", "rslora", "init")
        given = [name for name in fixed if getattr(self, name) != LoraConfig.model_fields[name].default]
        if self.path is not None and given:
            raise ValueError(f"{given[0]} is given and path={self.path} has its own; allowed with path: dropout, seed")
        return self


class HybridConfig(Strict):
    zero_stage: int = Field(3, ge=0, le=3)
    shard_ranks: int | None = Field(
        None, ge=1, description="stages 1 to 3: so many ranks hold one copy of the weights together (HSDP); None: all"
    )
    master_dtype: Dtype = Field(
        "float32", description="dtype of shards, their gradients and optimizer state (ranks add gradients in fp32)"
    )
    compute_dtype: Dtype = Field("float32", description="dtype of gathered weights and activations, in training and in rollouts")
    attn_implementation: Literal["auto", "packed", "sdpa", "eager"] = Field(
        "auto",
        description="packed: no padding, on a CPU the rollout's own attention; auto: packed where it can be, else sdpa; logged",
    )
    fused_layers: bool = Field(
        True,
        description="on a CPU, products, norms and activation of a registered family train and score with the rollout's kernels "
        "(rollout.engine.kernels); off: the module's own",
    )
    activation_checkpointing: bool = False
    dropout: bool = Field(False, description="keep the checkpoint's dropout in training forwards (SFT); off: deterministic")
    freeze: tuple[str, ...] = Field(
        (), strict=False, description="regular expressions; a parameter in whose name one is found is not trained"
    )
    loss_chunk_tokens: int | None = Field(
        None, ge=1, description="tokens per chunk of the loss head; None: as many as have 64 MiB of fp32 logits"
    )
    lora: LoraConfig | None = Field(
        None, description="train low-rank adapters; the base is frozen, in compute_dtype, and not in checkpoints"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    offload_optimizer: bool = Field(
        False, description="optimizer state, and a copy of the masters that it steps on, in host memory"
    )
    rollout: RolloutConfig = RolloutConfig()
    vocab_limit: int | None = Field(
        None, ge=1, description="rows of the head that count, at most all; None: the tokenizer's size, or all"
    )
    trust_remote_code: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = Field(600.0, gt=0, description="a collective that waits longer than this ends the run")
    debug_checksums: bool = Field(False, description="at each swap, verify that weights changed only where weight_version did")

    _patterns = field_validator("freeze")(_require_patterns)

    @model_validator(mode="after")
    def _check_shards(self) -> HybridConfig:
        if self.shard_ranks is not None and self.zero_stage == 0:
            raise ValueError(f"shard_ranks={self.shard_ranks} with zero_stage=0, where nothing is sharded; use stage 1, 2 or 3")
        return self

    def num_shards(self, world_size: int) -> int:
        """Into how many shards a weight is cut."""
        return 1 if self.zero_stage == 0 else self.shard_ranks or world_size


def resolve(config: HybridConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> HybridConfig:
    """Settings as they are, from a mapping, or from a JSON file of one. Raises ValueError, one line that names every problem."""
    if isinstance(config, HybridConfig):
        return config
    given: Any = {} if config is None else config
    if isinstance(given, str | os.PathLike):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"engine config {os.fspath(given)!r}: {error}; allowed: a mapping, or a JSON file of one") from None
    try:
        return HybridConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"engine config: {'; '.join(describe_errors(error, HybridConfig))}") from None


def describe_errors(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Each problem of a config of class `root`, with its path; an unknown key with the nearest known one."""
    return [_problem(root, each) for each in first_causes(error)]


def first_causes(error: ValidationError) -> list[ErrorDetails]:
    """Its problems without those that follow from another."""
    return [each for each in error.errors() if each["type"] != "default_factory_not_called"]


def in_words(problem: ErrorDetails) -> str:
    """What is wrong, and what was given where the message does not say it."""
    message = problem["msg"].removeprefix("Value error, ")
    given = repr(problem["input"])
    own = problem["type"] in ("value_error", "missing", "extra_forbidden", "model_type") or len(given) > 60
    return message if own else f"{message}; given: {given}"


def _problem(root: type[BaseModel], problem: ErrorDetails) -> str:
    path = problem["loc"]
    where = ".".join(map(str, path))
    if problem["type"] != "extra_forbidden":
        return f"{where}: {in_words(problem)}" if where else in_words(problem)
    section: Any = root
    for key in path[:-1]:
        if isinstance(key, str):
            section = _section(_by_alias(section)[key])
    known = list(_by_alias(section))
    near = difflib.get_close_matches(str(path[-1]), known, 1)
    return f"{where} is unknown; " + (f"nearest: {near[0]}" if near else f"allowed: {', '.join(known)}")


def _by_alias(section: type[BaseModel]) -> dict[str, Any]:
    """The annotations of a class by the names a user writes."""
    return {field.alias or name: field.annotation for name, field in section.model_fields.items()}


def _section(annotation: Any) -> Any:
    """The class in `X`, `X | None` or `tuple[X, ...]`."""
    parts = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return parts[0] if parts else annotation
