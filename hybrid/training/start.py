"""`hybrid.initialize`: a module and a config to an engine, with DeepSpeed's signature."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import Dataset

from hybrid import sharding
from hybrid.mesh import Mesh, open_mesh, raise_together
from hybrid.optim.host import HostMirror
from hybrid.optim.loss_scale import LossScaler, check_loss_scaler, loss_scaler_of
from hybrid.optim.peer_schedules import make_schedule
from hybrid.optim.update import Update
from hybrid.training.config.dtypes import TORCH_NAMES
from hybrid.training.config.load import ConfigSource
from hybrid.training.config.top import Effect, TrainingConfig, resolve_training
from hybrid.training.data import TrainingLoader
from hybrid.training.engine import TrainingEngine
from hybrid.training.parameters import (
    NamedGroup,
    OptimizerSource,
    ParameterGroups,
    adopt,
    make_optimizer,
    named_groups,
    sharded_groups,
)
from hybrid.training.precision import ModuleDtypes, cast_at_boundaries, dtypes_of, master_dtype
from hybrid.training.units import find_units
from hybrid.zero import note_owners

Started = tuple[TrainingEngine, torch.optim.Optimizer, TrainingLoader | None, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerSource | None = None,
    model_parameters: ParameterGroups | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | TrainingConfig | None = None,
    config_params: ConfigSource | None = None,
    loss_scaler: LossScaler | None = None,
    dist_init_required: bool | None = None,
    mpu: None = None,
) -> Started:
    """DeepSpeed's entry: (engine, optimizer, dataloader, lr_scheduler).

    model: any module, sharded in place (use the engine afterwards); all ranks get rank 0's weights. optimizer: one made for its
    parameters, or a function of parameter groups; without, the config's. model_parameters: which are trained, as a list or as
    groups. lr_scheduler: one made for the optimizer, or a function of it; without, the config's. config: a mapping, a JSON file
    or base64 of one (config_params and args.deepspeed_config are older places for it); its keys are those of TrainingConfig.
    loss_scaler: in place of fp16's own.

    Raises ValueError, the same on every rank, for a config or a model that does not fit, before anything is sharded.
    """
    source = next((c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None), None)
    if source is None:
        raise ValueError("no config; give config=, a mapping or the path of a JSON file")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    if mpu is not None:
        raise ValueError("mpu is given; there is no model parallelism here: one model is trained whole on each rank's share")
    settings, effects = resolve_training(source)
    log = _log_of(settings, model)
    mesh = open_mesh(settings)
    settings, effects = _settled(settings, effects, mesh)
    chosen = optimizer if isinstance(optimizer, torch.optim.Optimizer) else model_parameters
    groups = named_groups(model, chosen)
    dtypes = dtypes_of(model, settings.precision())
    scaler = _scaler(settings, loss_scaler)
    _shard(model, settings, mesh, dtypes)
    parameters = dict(model.named_parameters())
    made = _optimizer(optimizer, settings, groups, model)
    trained = {name for group in groups for name in group.names}
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in trained)
    mirror = None
    if settings.zero_optimization.offload_optimizer.on and not settings.zero_optimization.offload_param.on:
        mirror = HostMirror(parameters.values(), pin=settings.zero_optimization.offload_optimizer.pin_memory)
        mirror.adopt(made)
    schedule = _schedule(lr_scheduler, settings, made)
    update = Update(
        parameters,
        made,
        schedule,
        mesh,
        max_norm=settings.gradient_clipping or None,
        scaler=scaler,
        check=not settings.bf16.enabled or settings.bf16.check_grad_overflow,
        mirror=mirror,
        divisor=_divisor(settings, mesh),
    )
    engine = TrainingEngine(model, settings, mesh, update, effects=effects, log=log)
    loader = None
    if training_data is not None:
        loader = TrainingLoader(
            training_data,
            mesh,
            batch_size=engine.train_micro_batch_size_per_gpu(),
            drop_last=settings.dataloader_drop_last,
            seed=settings.seed,
            collate=collate_fn,
        )
    if mesh.rank == 0 and effects:
        log.info("what the config does:\n%s", engine.describe())
    return engine, engine.optimizer, loader, schedule


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, as DeepSpeed's launcher expects them, and --local_rank."""
    group = parser.add_argument_group("engine", "config of the training engine")
    group.add_argument("--deepspeed", action="store_true", help="taken for scripts that ask for it; the engine is always used")
    group.add_argument("--deepspeed_config", type=str, default=None, help="JSON file of the engine's config")
    group.add_argument("--local_rank", type=int, default=-1, help="given by some launchers; the environment is what counts")
    return parser


def _settled(settings: TrainingConfig, effects: list[Effect], mesh: Mesh) -> tuple[TrainingConfig, list[Effect]]:
    """With batch sizes for this many ranks, and what "auto" became."""
    error = None
    try:
        settings = settings.with_batch(mesh.world_size)
    except ValueError as caught:
        error = caught
    raise_together(error)
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return settings, [
        replace(effect, text=f"{getattr(settings, effect.key)}, from the other two") if effect.key in batch and
        effect.value == "auto" else effect
        for effect in effects
    ]  # fmt: skip


def _log_of(settings: TrainingConfig, model: nn.Module) -> logging.Logger:
    """This engine's own, so that two engines may have two levels."""
    log = logging.getLogger(f"hybrid.training.{type(model).__name__}.{id(model):x}")
    if settings.log_level is not None:
        log.setLevel(settings.log_level.upper())
    return log


def _scaler(settings: TrainingConfig, given: LossScaler | None) -> LossScaler | None:
    if given is not None:
        check_loss_scaler(given)
        return given
    return loss_scaler_of(settings.fp16) if settings.fp16.enabled else None


def _divisor(settings: TrainingConfig, mesh: Mesh) -> float:
    """By which the sum of gradients over ranks is divided."""
    whole = float(mesh.world_size) if settings.gradient_allreduce_op == "mean" else 1.0
    return whole / (settings.gradient_predivide_factor if settings.prescale_gradients else 1.0)


def _shard(model: nn.Module, settings: TrainingConfig, mesh: Mesh, dtypes: dict[nn.Module, ModuleDtypes]) -> None:
    """Units in the layout that the config says; parameters in the dtype of their masters, with rank 0's values."""
    plan, zero = settings.precision(), settings.zero_optimization
    prepared: set[int] = set()

    @torch.no_grad()
    def prepare(unit: nn.Module) -> None:
        for child in unit.modules():
            for parameter in child.parameters(recurse=False):
                if id(parameter) in prepared or isinstance(parameter, sharding.DTensor):
                    continue
                prepared.add(id(parameter))
                value = parameter.data.to(mesh.device)
                if mesh.world_size > 1 and value.numel():
                    dist.broadcast(value, 0)
                if parameter.is_floating_point():
                    dtype = master_dtype(parameter, plan) if parameter.requires_grad else dtypes[child].compute
                    value = value.to(dtype)
                parameter.data = value

    for buffer in model.buffers():
        buffer.data = buffer.data.to(mesh.device)
        if mesh.world_size > 1 and buffer.numel():
            dist.broadcast(buffer.data, 0)
        if settings.data_types.buffer_dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(getattr(torch, TORCH_NAMES[settings.data_types.buffer_dtype]))
    reduce = settings.communication_data_type or "fp32"
    layout = sharding.Layout(
        stage=zero.stage,
        gather_dtype=lambda module: dtypes[module].compute if module in dtypes else None,
        reduce_dtype=getattr(torch, TORCH_NAMES[reduce]),
        cast_inputs=False,
        kept_over=zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else None,
        # a parameter without a dimension cannot be cut, one without elements need not be
        unsharded={p for p in model.parameters() if p.ndim == 0 or p.numel() == 0},
        prepare=prepare,
    )
    if zero.offload_param.on:
        pin = zero.offload_param.pin_memory and mesh.device.type == "cuda"
        layout = replace(layout, offload=CPUOffloadPolicy(pin_memory=pin))
    sharding.shard(model, layers=find_units(model), mesh=mesh, layout=layout)
    cast_at_boundaries(dtypes)
    note_owners(model)


def _optimizer(
    given: OptimizerSource | None, settings: TrainingConfig, groups: list[NamedGroup], model: nn.Module
) -> torch.optim.Optimizer:
    """Over the sharded parameters."""
    if isinstance(given, torch.optim.Optimizer):
        adopt(given, model, groups)
        return given
    if given is not None:
        return given(sharded_groups(model, groups))
    if settings.optimizer is None:
        raise ValueError("no optimizer: give one to initialize, or a section `optimizer` in the config")
    return make_optimizer(settings.optimizer, sharded_groups(model, groups))


def _schedule(given: Any, settings: TrainingConfig, optimizer: torch.optim.Optimizer) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    return None if settings.scheduler is None else make_schedule(settings.scheduler, optimizer)
