"""`hybrid.initialize`: a module and a config to an engine, with DeepSpeed's signature."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset

from hybrid.in_flight import let_parts_be_called
from hybrid.mesh import Mesh, check_same, check_same_module, in_text, join_group, open_mesh, raise_together
from hybrid.models import ShardedModel
from hybrid.optim.host import HostMirror
from hybrid.optim.loss_scale import LossScaler, check_loss_scaler, loss_scaler_of
from hybrid.optim.peer_schedules import make_schedule
from hybrid.optim.update import Update
from hybrid.sharding import divide_gradients
from hybrid.training.config.load import ConfigSource
from hybrid.training.config.schedulers import Decay
from hybrid.training.config.top import Effect, TrainingConfig, resolve_training
from hybrid.training.data import TrainingLoader
from hybrid.training.eigenvalue import open_eigenvalues
from hybrid.training.engine import TrainingEngine
from hybrid.training.generation import Rollouts, check_generates, hybrid_config
from hybrid.training.layout import shard_module
from hybrid.training.parameters import (
    NamedGroup,
    OptimizerSource,
    ParameterGroups,
    adopt,
    make_optimizer,
    named_groups,
    sharded_groups,
)
from hybrid.training.precision import dtypes_of
from hybrid.training.weights import guard_state_dict
from hybrid.zero import note_owners

Started = tuple[TrainingEngine, torch.optim.Optimizer | None, TrainingLoader | None, Any]


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
    asked, error = None, None
    try:
        if mpu is not None:
            raise ValueError("mpu is given; there is no model parallelism here: a model is trained whole on each rank's share")
        asked = _asked(source, model, optimizer, model_parameters, loss_scaler, lr_scheduler)
    except ValueError as caught:
        error = caught
    join_group(TrainingConfig() if asked is None else asked.settings)
    raise_together(error)  # what is wrong on one rank must not leave the others waiting
    assert asked is not None
    assert model is not None
    _check_same_on_all_ranks(asked, model)
    mesh = open_mesh(asked.settings)
    settings, effects = _settled(asked.settings, asked.effects, mesh)
    log, groups = _log_of(settings, model), asked.groups
    trained = {name for group in groups for name in group.names}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    eigenvalues = open_eigenvalues(model, settings, mesh, log)
    root, rollouts = _shard(model, settings, mesh)
    _, after = settings.divisors(mesh.world_size)
    divide_gradients(root, after)
    made = _optimizer(optimizer, settings, groups, model)
    zero, mirror = settings.zero_optimization, None
    if made is not None and zero.offload_optimizer.on and not zero.offload_param.on:
        mirror = HostMirror(model.parameters(), pin=zero.offload_optimizer.pin_memory)
        mirror.adopt(made)
    schedule = None if made is None else _schedule(lr_scheduler, settings, made)
    if made is not None:
        _check_same_rates(made, schedule, asked.scaler)
    update = Update(
        dict(model.named_parameters()),
        made,
        schedule,
        mesh,
        max_norm=settings.gradient_clipping or None,
        scaler=asked.scaler,
        check=not settings.bf16.enabled or settings.bf16.check_grad_overflow,
        mirror=mirror,
        divide_by=after,
    )
    if made is not None:
        update.own_optimizer()
    guard_state_dict(model)
    engine = TrainingEngine(
        model, settings, mesh, update, root=root, rollouts=rollouts, eigenvalues=eigenvalues, effects=effects, log=log
    )
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
    return engine, made, loader, schedule


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """--deepspeed and --deepspeed_config, as DeepSpeed's launcher expects them."""
    group = parser.add_argument_group("engine", "config of the training engine")
    group.add_argument("--deepspeed", action="store_true", help="taken for scripts that ask for it; the engine is always used")
    group.add_argument("--deepspeed_config", type=str, default=None, help="JSON file of the engine's config")
    return parser


def _check_same_on_all_ranks(asked: _Asked, model: nn.Module) -> None:
    """Collective. Raises ValueError where ranks were given another config or module, or are to train other parameters."""
    check_same("config", [line.rstrip(",") for line in asked.settings.model_dump_json(indent=0).split("\n")])
    check_same_module(model)
    check_same("parameter groups", [", ".join(group.names) for group in asked.groups])


def _check_same_rates(optimizer: torch.optim.Optimizer, schedule: Any, scaler: LossScaler | None) -> None:
    """Collective. Raises ValueError where ranks would step differently."""
    groups = [{key: in_text(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    said = [f"group {i}: {key}={value}" for i, group in enumerate(groups) for key, value in sorted(group.items())]
    parts = [("schedule", schedule), ("loss scaler", scaler)]
    check_same("optimizers", [type(optimizer).__name__, *said, *(line for what, part in parts for line in _said(what, part))])


def _said(what: str, part: Any) -> list[str]:
    """Its type and state."""
    if part is None:
        return [f"no {what}"]
    state = part.state_dict() if hasattr(part, "state_dict") else {}
    values = [f"{what}: {key}={json.dumps(value, default=in_text, sort_keys=True)}" for key, value in sorted(state.items())]
    return [f"{what} {type(part).__name__}", *values]


@dataclass(frozen=True)
class _Asked:
    """What initialize was asked for, checked on this rank."""

    settings: TrainingConfig
    effects: list[Effect]
    groups: list[NamedGroup]
    scaler: LossScaler | None


def _asked(
    source: ConfigSource | TrainingConfig | None,
    model: nn.Module | None,
    optimizer: OptimizerSource | None,
    model_parameters: ParameterGroups | None,
    loss_scaler: LossScaler | None,
    lr_scheduler: Any,
) -> _Asked:
    """Raises ValueError for what does not fit; nothing is changed."""
    if source is None:
        raise ValueError("no config; give config=, a mapping or the path of a JSON file")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; allowed: a torch.nn.Module")
    settings, effects = resolve_training(source)
    if optimizer is not None:
        effects = _overruled(effects, "optimizer")
    if lr_scheduler is not None:
        effects = _overruled(effects, "scheduler")
    if settings.scheduler is not None and optimizer is None and settings.optimizer is None:
        raise ValueError("scheduler without an optimizer; give a section `optimizer`, or one to initialize")
    params = None if settings.scheduler is None else settings.scheduler.params
    if lr_scheduler is None and isinstance(params, Decay) and params.total_num_steps is None:
        raise ValueError(
            'scheduler.params.total_num_steps is "auto", which a trainer fills in; give the number of optimizer steps'
        )
    groups = _groups_of(model, optimizer, model_parameters, settings)
    if bounded := [
        path
        for path, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None
    ]:
        raise ValueError(
            f"{bounded[0]} has max_norm, by which its forward changes a weight that is whole only there; leave it out, and "
            "renormalise in hybrid.zero.GatheredParameters after the step"
        )
    if again := [name for name, p in model.named_parameters() if isinstance(p, DTensor)]:
        raise ValueError(f"{again[0]} is sharded already; give a module that no other engine was made of")
    if settings.hybrid_engine.enabled:
        hybrid_config(settings)
        check_generates(model)
    else:
        dtypes_of(model, settings.precision())
    return _Asked(settings, effects, groups, _scaler(settings, loss_scaler))


def _overruled(effects: list[Effect], section: str) -> list[Effect]:
    text = f"no effect: initialize was given {'an' if section == 'optimizer' else 'a'} {section}"
    return [replace(e, text=text) if e.key.split(".")[0] == section else e for e in effects]


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
        if not log.hasHandlers():  # the level was asked for, and nobody set up where lines go
            log.addHandler(logging.StreamHandler(sys.stdout))
    return log


def _scaler(settings: TrainingConfig, given: LossScaler | None) -> LossScaler | None:
    if given is not None:
        check_loss_scaler(given)
        return given
    under_fp16 = settings.torch_autocast.enabled and settings.torch_autocast.dtype == "float16"
    if settings.fp16.enabled or under_fp16:  # autocast takes the section's numbers too
        return loss_scaler_of(settings.fp16.model_copy(update={"enabled": True}))
    return None


def _groups_of(
    model: nn.Module, optimizer: OptimizerSource | None, model_parameters: ParameterGroups | None, settings: TrainingConfig
) -> list[NamedGroup]:
    """What is trained; nothing without an optimizer."""
    if optimizer is None and settings.optimizer is None:
        return []
    return named_groups(model, optimizer if isinstance(optimizer, torch.optim.Optimizer) else model_parameters)


def _shard(model: nn.Module, settings: TrainingConfig, mesh: Mesh) -> tuple[nn.Module, Rollouts | None]:
    """What is to be called, sharded, and the generating side if the config asks for one."""
    if settings.hybrid_engine.enabled:
        flags = [(child, child.training) for child in model.modules()]
        sharded = ShardedModel.from_module(model, hybrid_config(settings), mesh)
        for child, flag in flags:  # the caller's, as without this section
            child.training = flag
        rollouts = Rollouts(sharded)
        let_parts_be_called(sharded.module)
        note_owners(sharded.module)
        return sharded.module, rollouts
    shard_module(model, settings, mesh)
    let_parts_be_called(model)
    note_owners(model)
    return model, None


def _optimizer(
    given: OptimizerSource | None, settings: TrainingConfig, groups: list[NamedGroup], model: nn.Module
) -> torch.optim.Optimizer | None:
    """Over the sharded parameters; None where nothing is trained."""
    if not groups:
        return None
    if isinstance(given, torch.optim.Optimizer):
        adopt(given, model, groups)
        return given
    if given is not None:
        return given(sharded_groups(model, groups))
    assert settings.optimizer is not None, "else there are no groups"
    return make_optimizer(settings.optimizer, sharded_groups(model, groups), model)


def _schedule(given: Any, settings: TrainingConfig, optimizer: torch.optim.Optimizer) -> Any:
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    return None if settings.scheduler is None else make_schedule(settings.scheduler, optimizer)
