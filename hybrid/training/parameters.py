"""Parameters and optimizers that were made before the module was sharded, found again after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hybrid.optim.optimizers import optimizer_over
from hybrid.training.config.optimizers import OptimizerSection

_OF_WHOLE_TENSORS = (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Muon, torch.optim.Rprop, torch.optim.SparseAdam)
ParameterGroups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
OptimizerSource = torch.optim.Optimizer | Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group by names, which outlive the parameters."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]  # the group's own keys beside "params"


def named_groups(module: nn.Module, given: ParameterGroups | torch.optim.Optimizer | None) -> list[NamedGroup]:
    """What is trained: the groups of an optimizer, a list of groups or of parameters, or all parameters in one group; frozen ones
    are left out. To be called before sharding. Raises ValueError for a module without parameters or with those on the meta
    device, a parameter that is not the module's, one that stands in two groups, an optimizer that has stepped, and where none is
    trained."""
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters")
    if meta := [name for name, p in parameters.items() if p.is_meta]:
        raise ValueError(f"{meta[0]} is on the meta device; give a module with values")
    names = {id(p): name for name, p in parameters.items()}
    found: list[NamedGroup] = []
    seen: set[str] = set()
    for group in _listed(parameters, given):
        chosen = []
        for parameter in [group["params"]] if isinstance(group["params"], nn.Parameter) else group["params"]:
            if not isinstance(parameter, nn.Parameter):
                raise ValueError(
                    f"model_parameters holds a {type(parameter).__name__}; give parameters: model.parameters(), or groups"
                )
            name = names.get(id(parameter))
            if name is None:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is not the model's; give the model's own, before it is sharded"
                )
            if name in seen:
                raise ValueError(f"{name} stands in two parameter groups; keep it in one")
            seen.add(name)
            if parameter.requires_grad:
                chosen.append(name)
        found.append(NamedGroup(tuple(chosen), {key: value for key, value in group.items() if key != "params"}))
    if not any(group.names for group in found):
        raise ValueError("no parameter is trained: all that are given are frozen")
    return found


def _listed(parameters: Mapping[str, nn.Parameter], given: Any) -> list[dict[str, Any]]:
    if given is None:
        return [{"params": list(parameters.values())}]
    if isinstance(given, torch.optim.Optimizer):
        kind = type(given).__name__
        if isinstance(given, _OF_WHOLE_TENSORS):
            raise ValueError(f"optimizer {kind}: its step does not work on shards; allowed: elementwise ones, or the config's "
                             "optimizer (Adafactor and Muon are there)")  # fmt: skip
        if any(given.state.values()):
            raise ValueError(
                f"optimizer {kind} has state: it has stepped before initialize, or makes state at once; give a fresh one, or a "
                "function of parameter groups that makes it"
            )
        return given.param_groups
    listed = list(given)
    return listed if listed and isinstance(listed[0], dict) else [{"params": listed}]


def sharded_groups(module: nn.Module, groups: Iterable[NamedGroup]) -> list[dict[str, Any]]:
    """The same of the module as it is now, without empty ones."""
    parameters = dict(module.named_parameters())
    return [{**group.settings, "params": [parameters[name] for name in group.names]} for group in groups if group.names]


def adopt(optimizer: torch.optim.Optimizer, module: nn.Module, groups: Iterable[NamedGroup]) -> None:
    """Let an `optimizer` that has the groups step on the parameters of the module as it is now. A scheduler bound to it
    stays so."""
    parameters = dict(module.named_parameters())
    for group, named in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in named.names]


def make_optimizer(section: OptimizerSection, groups: list[dict[str, Any]], module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a config section over groups of the module's parameters; a group's own keys win over the section's."""
    return optimizer_over(section.settings(), groups, dict(module.named_parameters()))
