"""TrainingConfig: every section, the batch triangle, and what each given key does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from hybrid.config import Strict, describe_errors
from hybrid.training.config.dtypes import AutocastConfig, DataTypesConfig, Dtype, ModuleRule, PrecisionPlan
from hybrid.training.config.fields import Count
from hybrid.training.config.foreign import KNOBS, ONLY, REFUSED, RENAMED
from hybrid.training.config.load import ConfigSource, load
from hybrid.training.config.monitoring import CommsLoggerConfig, FlopsProfilerConfig
from hybrid.training.config.optimizers import OptimizerSection
from hybrid.training.config.precision import Bf16Config, Fp16Config
from hybrid.training.config.schedulers import SchedulerConfig
from hybrid.training.config.sections import (
    ActivationCheckpointingConfig,
    CheckpointConfig,
    CompressionConfig,
    CsvConfig,
    EigenvalueConfig,
    HybridEngineConfig,
    TensorboardConfig,
    WandbConfig,
)
from hybrid.training.config.zero import ZeroConfig

AUTO = "auto"
LEVELS = ("debug", "info", "warning", "error", "critical")


class TrainingConfig(Strict):
    train_batch_size: Count | None = Field(None, description="samples per optimizer step, over all ranks")
    train_micro_batch_size_per_gpu: Count | None = Field(None, description="samples per forward of one rank")
    gradient_accumulation_steps: Count | None = Field(None, description="backwards per optimizer step")
    optimizer: OptimizerSection | None = Field(None, description="made here; null: one is given to initialize")
    scheduler: SchedulerConfig | None = Field(None, description="of the learning rate, stepped with the optimizer")
    gradient_clipping: float = Field(1.0, ge=0, description="global norm that raw gradients are scaled down to; 0: no clipping")
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    torch_autocast: AutocastConfig = AutocastConfig()
    module_precision: tuple[ModuleRule, ...] = Field((), strict=False, description="ours: dtype by module")
    data_types: DataTypesConfig = DataTypesConfig()
    zero_optimization: ZeroConfig = ZeroConfig()
    communication_data_type: Dtype | None = Field(None, description="gradients are reduced in; null: fp32")
    prescale_gradients: bool = Field(False, description="divided by the number of ranks before the sum over them")
    gradient_predivide_factor: float = Field(1.0, gt=0, description="else by this before it, by the rest after it")
    gradient_allreduce_op: Literal["mean", "sum"] = Field("mean", description="over ranks")
    gradient_compression: CompressionConfig = Field(
        CompressionConfig(), description="ours: the largest entries only, with feedback"
    )
    managed_gradient_accumulation: bool = Field(
        True, description="step() counts backwards; false: every step() is one, and the loss is not divided"
    )
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    hybrid_engine: HybridEngineConfig = HybridEngineConfig()
    eigenvalue: EigenvalueConfig = EigenvalueConfig()
    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    wandb: WandbConfig = WandbConfig()
    csv_monitor: CsvConfig = CsvConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    dataloader_drop_last: bool = Field(False, description="the loader leaves out a last batch that is not whole")
    steps_per_print: Count | None = Field(
        10, description="optimizer steps between log lines (level info: see log_level); null: none"
    )
    wall_clock_breakdown: bool = Field(False, description="forward, backward and step times in those lines")
    peak_tflops: float | None = Field(None, gt=0, description="ours: of the device, of which throughput gives the share (MFU)")
    log_level: str | None = Field(
        None, description="of this engine's log, shown on the console if logging is not set up; null: left alone"
    )
    seed: int = Field(0, ge=0, description="ours: of the training data's order")
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="ours: a collective that waits longer than this ends the run; if given, also in a group there is",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="ours")

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, every: Any) -> Any:
        return None if every == math.inf else every  # accelerate writes it so

    @field_validator("log_level")
    @classmethod
    def _check_level(cls, level: str | None) -> str | None:
        if level is not None and level.lower() not in LEVELS:
            raise ValueError(f"{level!r}; allowed: {', '.join(LEVELS)}, or null")
        return level and level.lower()

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.fp16.enabled and self.bf16.enabled:
            raise ValueError("fp16 and bf16 are both enabled; allowed: one of them")
        if self.hybrid_engine.enabled and self.fp16.enabled:
            raise ValueError("hybrid_engine with fp16: its kernels compute in fp32 and bf16; use bf16")
        if self.gradient_predivide_factor != 1.0 and self.prescale_gradients:
            raise ValueError("gradient_predivide_factor with prescale_gradients, which divides by the ranks first; keep one")
        in_bf16 = self.data_types.optimizer_dtype == "param" or self.bf16.bf16_master_weights_and_grads
        if self.data_types.grad_accum_dtype == "fp32" and (in_bf16 or self.communication_data_type not in (None, "fp32")):
            raise ValueError(
                "data_types.grad_accum_dtype=fp32 with gradients that are sent or kept in another dtype; leave it out, or "
                "communication_data_type, optimizer_dtype=param and bf16_master_weights_and_grads"
            )
        if self.gradient_compression.ratio < 1 and self.zero_optimization.stage == 0:
            raise ValueError("gradient_compression needs zero_optimization.stage 1, 2 or 3; given: stage 0")
        if self.gradient_compression.ratio < 1 and self.fp16.enabled:
            raise ValueError("gradient_compression with fp16, whose scale would change under what is kept back; use bf16")
        if self.eigenvalue.enabled:
            self._check_eigenvalue()
        self.precision()
        return self

    def _check_eigenvalue(self) -> None:
        for name in ("fp16", "bf16", "torch_autocast"):
            if getattr(self, name).enabled:
                raise ValueError(f"eigenvalue with {name}, in which products with a Hessian have no digits left; train in fp32, "
                                 "or switch eigenvalue off")  # fmt: skip
        if self.hybrid_engine.enabled:
            raise ValueError("eigenvalue with hybrid_engine, whose attention cannot be differentiated twice; switch one off")

    def num_shards(self, world_size: int) -> int:
        """Into how many shards a weight is cut."""
        zero = self.zero_optimization
        if zero.stage == 0:
            return 1
        return zero.mics_shard_size if zero.mics_shard_size > 0 else world_size

    def divisors(self, world_size: int) -> tuple[float, float]:
        """By what a gradient is divided before and after the sum over ranks."""
        whole = float(world_size) if self.gradient_allreduce_op == "mean" else 1.0
        before = whole if self.prescale_gradients else self.gradient_predivide_factor
        return before, whole / before

    def precision(self) -> PrecisionPlan:
        compute: Dtype | None = "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else None
        return PrecisionPlan(
            compute=compute,
            bf16_masters=self.bf16.enabled and self.bf16.bf16_master_weights_and_grads,
            autocast=self.torch_autocast,
            rules=self.module_precision,
            data_types=self.data_types,
        )

    def with_batch(self, world_size: int) -> TrainingConfig:
        """With the three batch sizes settled: train = micro x accumulation x ranks; one or two of them give the others. Raises
        ValueError where they do not fit, or where only the accumulation is given."""
        train, micro, steps = self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        if train is None and micro is None:
            raise ValueError("give train_batch_size or train_micro_batch_size_per_gpu (or both); the rest is derived")
        if train is None:
            assert micro is not None
            steps = steps or 1
            train = micro * steps * world_size
        elif micro is None:
            steps = steps or 1
            micro = _divided(train, steps * world_size, f"gradient_accumulation_steps={steps} x {world_size} ranks")
        elif steps is None:
            steps = _divided(train, micro * world_size, f"train_micro_batch_size_per_gpu={micro} x {world_size} ranks")
        if train != micro * steps * world_size:
            raise ValueError(
                f"train_batch_size={train} is not train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps={steps} x "
                f"{world_size} ranks = {micro * steps * world_size}; leave one of the three out"
            )
        return self.model_copy(
            update={"train_batch_size": train, "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": steps}
        )


def _divided(train: int, by: int, what: str) -> int:
    if train % by:
        below, above = train // by * by, (train // by + 1) * by
        near = f"{below} or {above}" if below else str(above)
        raise ValueError(f"train_batch_size={train} cannot be divided by {what} = {by}; nearest: {near}")
    return train // by


@dataclass(frozen=True)
class Effect:
    """What one given key does."""

    key: str  # its path, with dots
    value: Any
    text: str


def resolve_training(source: ConfigSource | TrainingConfig) -> tuple[TrainingConfig, list[Effect]]:
    """The checked config, and what each key that was given does. "auto" stands for a key that is not given. Raises ValueError,
    one line that names every problem with its path."""
    if isinstance(source, TrainingConfig):
        return source, []
    given = load(source)
    problems: list[str] = []
    effects: list[Effect] = []
    kept = _kept(given, "", problems, effects)
    try:
        config = TrainingConfig.model_validate(kept)
    except ValidationError as error:
        problems += describe_errors(error, TrainingConfig)
    if problems:
        raise ValueError(f"config: {'; '.join(problems)}")
    effects = [replace(e, text=f"not given: {_taken(config, e.key)!r}") if e.text == "not given" else e for e in effects]
    effects += list(_effects(kept, TrainingConfig, "", config))
    return config, sorted(effects, key=lambda effect: _position(given, effect.key))


def _kept(given: Mapping[str, Any], path: str, problems: list[str], effects: list[Effect]) -> dict[str, Any]:
    """`given` under today's names, without "auto", knobs and what is refused, which are noted."""
    kept: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{path}{key}"
        if where in RENAMED:
            today, of_value = RENAMED[where]
            effects.append(Effect(where, value, f"the old name of {path}{today}"))
            if not _asks(value):
                continue
            if today in given:
                problems.append(f"{where} is the old name of {path}{today}, and both are given; keep {path}{today}")
            key, where, value = today, f"{path}{today}", of_value(value)
        if where in KNOBS:
            effects.append(Effect(where, value, f"no effect here: {KNOBS[where]}"))
        elif where in REFUSED:
            if _asks(value):
                problems.append(f"{where}: {REFUSED[where]}")
        elif where in ONLY:
            only, why = ONLY[where]
            if value not in (only, AUTO):
                problems.append(f"{where}={value!r}; allowed: {only}, {why}")
        elif isinstance(value, str) and value == AUTO and where == "optimizer.params.lr":
            problems.append(f'{where} is "auto", which a trainer fills in; give the number')
        elif isinstance(value, str) and value == AUTO:
            effects.append(Effect(where, value, "not given"))
        elif value is None and where in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
            effects.append(Effect(where, value, "off"))
        elif isinstance(value, Mapping) and where != "scheduler.params":  # which has a meaning of its own for some
            kept[key] = _kept(value, f"{where}.", problems, effects)
        else:
            kept[key] = value
    return kept


def _taken(config: TrainingConfig, key: str) -> Any:
    """What stands for a key that was not given."""
    part: Any = config
    for name in key.split("."):
        if isinstance(part, OptimizerSection) and name == "params":
            part = part.settings()
            continue
        aliases = {field.alias: own for own, field in type(part).model_fields.items()} if isinstance(part, Strict) else {}
        part = getattr(part, aliases.get(name) or name, None)
    return part


def _asks(value: Any) -> bool:
    """Whether a value asks for something."""
    if isinstance(value, Mapping):
        if "shared_parameters" in value:  # a technique of compression_training, which is off unless this enables it
            shared = value["shared_parameters"]
            return isinstance(shared, Mapping) and shared.get("enabled", False) not in (False, AUTO)
        if value and all(isinstance(part, Mapping) for part in value.values()):
            return any(_asks(part) for part in value.values())
        return bool(value) and value.get("enabled", True) not in (False, AUTO)
    return value not in (None, False, AUTO)


def _effects(
    kept: Mapping[str, Any], section: type[Strict], path: str, config: Any, of_section: str | None = None
) -> Iterator[Effect]:
    by_alias = {field.alias or name: (name, field) for name, field in section.model_fields.items()}
    for key, value in kept.items():
        name, field = by_alias[key]
        part = getattr(config, name)
        if isinstance(part, Strict) and isinstance(value, Mapping):
            yield from _effects(value, type(part), f"{path}{key}.", part, field.description)
        else:
            said = [text for text in (of_section, field.description) if text]
            yield Effect(f"{path}{key}", value, "; ".join(said))


def _position(given: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Where a key stands in the config."""
    found: list[int] = []
    part: Any = given
    for name in key.split("."):
        names = list(part) if isinstance(part, Mapping) else []
        found.append(names.index(name) if name in names else len(names))
        part = part.get(name) if isinstance(part, Mapping) else None
    return tuple(found)
