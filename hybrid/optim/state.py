"""A torch optimizer's state as named tensors, for checkpoints: `STATE.PARAMETER`, e.g. `exp_avg.model.norm.weight`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from hybrid.optim.adafactor import FACTORS
from hybrid.optim.shards import zeros_beside


def parameter_names(optimizer: Optimizer, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The optimizer's parameters by their names in `model`, in its order. Raises ValueError for one that is not there."""
    names = {id(tensor): name for name, tensor in model.items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if unknown := sum(id(p) not in names for p in parameters):
        raise ValueError(f"{unknown} of the optimizer's {len(parameters)} parameters are not in `model`; pass the same objects")
    return {names[id(p)]: p for p in parameters}


def tensors(optimizer: Optimizer, model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor of its state; a parameter that was never stepped has none."""
    return {
        f"{key}.{name}": value
        for name, parameter in parameter_names(optimizer, model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def values(optimizer: Optimizer, model: Mapping[str, Tensor]) -> dict[str, Any]:
    """What of its state is no tensor (the step counts of some optimizers), by `STATE.PARAMETER`."""
    return {
        f"{key}.{name}": value
        for name, parameter in parameter_names(optimizer, model).items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, Tensor)
    }


def header(optimizer: Optimizer, model: Mapping[str, Tensor]) -> dict[str, Any]:
    """What is no tensor (JSON): the kind and the parameters' names. Hyper-parameters are the config's."""
    return {"kind": type(optimizer).__name__, "parameters": list(parameter_names(optimizer, model))}


def slots(
    optimizer: Optimizer,
    model: Mapping[str, Tensor],
    saved: Mapping[str, TensorStorageMetadata],
    scalars: Collection[str],
    saved_header: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Tensors to read the saved state into, by `STATE.PARAMETER`: the optimizer's own where they fit, else new ones.

    `saved` has the names in the checkpoint (`optim.STATE.PARAMETER`), of which `scalars` have no dimension (step counts).
    Raises ValueError for the state of another kind of optimizer, and with both lists when other parameters were trained.
    """
    here, there = type(optimizer).__name__, saved_header.get("kind")
    if here != there:
        raise ValueError(f"the optimizer does not fit: {here} here, {there} there; resume with the same one")
    parameters = parameter_names(optimizer, model)
    trained = set(saved_header.get("parameters", ()))
    if parameters.keys() != trained:
        missing, surplus = sorted(parameters.keys() - trained), sorted(trained - parameters.keys())
        raise ValueError(f"the optimizer does not fit: trained only here: {missing}; trained only there: {surplus}")
    on_device = {id(p) for g in optimizer.param_groups if g.get("capturable") or g.get("fused") for p in g["params"]}
    found = {}
    for full_name, stored in saved.items():
        kind, _, slot = full_name.partition(".")
        key, _, name = slot.partition(".")
        if kind != "optim":
            continue
        parameter, dtype = parameters[name], stored.properties.dtype
        own_shape = stored.size if key in FACTORS else parameter.shape
        shape = torch.Size() if full_name in scalars else own_shape
        own = optimizer.state.get(parameter, {}).get(key)
        if isinstance(own, Tensor) and (own.shape, own.dtype) == (shape, dtype):
            found[slot] = own
        elif full_name in scalars:
            of_weights = parameter.ndim == 0 and key != "step"  # the moments of a parameter without a dimension
            # else a count, where torch keeps them
            device = parameter.device if id(parameter) in on_device or of_weights else torch.device("cpu")
            found[slot] = torch.zeros((), dtype=dtype, device=device)
        else:
            found[slot] = zeros_beside(parameter, shape, dtype)
    return found


def fill(optimizer: Optimizer, model: Mapping[str, Tensor], slots: Mapping[str, Tensor]) -> None:
    """Makes filled `slots` the optimizer's whole state."""
    parameters = parameter_names(optimizer, model)
    optimizer.state.clear()
    for slot, tensor in slots.items():
        key, _, name = slot.partition(".")
        optimizer.state[parameters[name]][key] = tensor
