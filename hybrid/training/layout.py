"""How the config's keys lay a module out over ranks: units, dtypes, host memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from hybrid import sharding
from hybrid.checkpointing import recompute_in_backward
from hybrid.mesh import Mesh, from_rank_0
from hybrid.training.config.dtypes import TORCH_NAMES, PrecisionPlan
from hybrid.training.config.top import TrainingConfig
from hybrid.training.precision import ModuleDtypes, cast_at_boundaries, dtypes_of, master_dtype
from hybrid.training.release import release_at_last_use
from hybrid.training.units import find_units


def shard_module(module: nn.Module, settings: TrainingConfig, mesh: Mesh) -> None:
    """Shard in place, with rank 0's values on every rank. Raises ValueError as `dtypes_of`, before anything is changed."""
    plan, zero = settings.precision(), settings.zero_optimization
    _check_kept_over(zero.zero_hpz_partition_size, sharding.shard_count(mesh))
    dtypes = dtypes_of(module, plan)
    units = find_units(module)
    if settings.activation_checkpointing.layers and not units:
        raise ValueError(f"activation_checkpointing.layers: {type(module).__name__} has no list of layers; call "
                         "hybrid.checkpointing.checkpoint in its forward instead")  # fmt: skip
    _prepare_buffers(module, settings, mesh)
    layout = sharding.Layout(
        stage=zero.stage,
        gather_dtype=lambda child: dtypes[child].compute,
        reduce_dtype=getattr(torch, TORCH_NAMES[settings.communication_data_type or "fp32"]),
        cast_inputs=False,  # done layer by layer, by cast_at_boundaries
        kept_over=zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else None,
        # a parameter without a dimension cannot be cut, one without elements need not be
        unsharded={p for p in module.parameters() if p.ndim == 0 or p.numel() == 0},
        prepare=lambda unit: _prepare(unit, dtypes, plan, mesh),
    )
    if zero.offload_param.on:
        pin = zero.offload_param.pin_memory and mesh.device.type == "cuda"
        layout = replace(layout, offload=CPUOffloadPolicy(pin_memory=pin))
    sharding.shard(module, layers=units, mesh=mesh, layout=layout)
    if zero.stage in (0, 3):
        release_at_last_use(units)
    if settings.activation_checkpointing.layers:
        for unit in units:
            recompute_in_backward(unit)
    cast_at_boundaries(dtypes, units)


def _check_kept_over(ranks: int, shards: int) -> None:
    fitting = [n for n in range(2, shards) if shards % n == 0]
    if ranks > 1 and ranks not in fitting:
        allowed = ", ".join(map(str, [1, *fitting]))
        raise ValueError(
            f"zero_optimization.zero_hpz_partition_size={ranks}; allowed: {allowed}, as {shards} ranks share a weight and a part "
            "of them is to keep it between forward and backward"
        )


@torch.no_grad()
def _prepare(unit: nn.Module, dtypes: dict[nn.Module, ModuleDtypes], plan: PrecisionPlan, mesh: Mesh) -> None:
    """Each parameter that is still whole: rank 0's value, in the dtype of its shards. Only one unit is whole in it at a time."""
    for child in unit.modules():
        for parameter in child.parameters(recurse=False):
            if isinstance(parameter, DTensor):
                continue
            value = from_rank_0(parameter.data.to(mesh.device))
            if parameter.is_floating_point():
                value = value.to(master_dtype(parameter, plan) if parameter.requires_grad else dtypes[child].compute)
            parameter.data = value


@torch.no_grad()
def _prepare_buffers(module: nn.Module, settings: TrainingConfig, mesh: Mesh) -> None:
    for buffer in module.buffers():
        buffer.data = from_rank_0(buffer.data.to(mesh.device))
        if settings.data_types.buffer_dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(getattr(torch, TORCH_NAMES[settings.data_types.buffer_dtype]))
