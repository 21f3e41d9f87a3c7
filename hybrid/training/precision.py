"""The dtype in which each module computes, the dtype of its shards, and the casts between modules that differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from hybrid.training.config.dtypes import TORCH_NAMES, ModuleRule, PrecisionPlan

_LOSSES = "torch.nn.modules.loss"
_RUNNING_STATISTICS = ModuleRule(match="class:_BatchNorm", dtype="fp32")  # are fp32, and so are the weights beside them


@dataclass(frozen=True)
class ModuleDtypes:
    """What holds for one module."""

    compute: torch.dtype | None  # its own parameters are gathered in it; None: it has none and no rule
    rule: ModuleRule | None
    casts: bool  # whether its inputs are cast to `compute`


def dtypes_of(module: nn.Module, plan: PrecisionPlan) -> dict[nn.Module, ModuleDtypes]:
    """For every submodule. The first rule that matches a module holds for it and what is below it; else the plan's dtype; under
    autocast that of a safe module; else that of its parameters. Raises ValueError for a rule that matches nothing, and for a
    module that keeps its parameters' dtypes and has two."""
    found: dict[nn.Module, ModuleDtypes] = {}
    used: set[str] = set()

    def visit(path: str, child: nn.Module, inherited: ModuleRule | None) -> None:
        rule = next((r for r in plan.rules if matches(r.match, path, child)), None)
        if rule is not None:
            used.add(rule.match)
        rule = rule or inherited
        if child not in found:  # a module that stands in two places has the dtype of the first
            found[child] = _dtypes(path, child, rule, plan)
        for name, below in child.named_children():
            visit(f"{path}.{name}" if path else name, below, rule)

    visit("", module, None)
    if unused := [r.match for r in plan.rules if r.match not in used]:
        raise ValueError(f"module_precision: {unused[0]!r} matches no module of {type(module).__name__}")
    _settle_shared(module, plan, found)
    return found


def _settle_shared(module: nn.Module, plan: PrecisionPlan, found: dict[nn.Module, ModuleDtypes]) -> None:
    """A parameter that several modules share is gathered once: under autocast as it is, since each operation casts it; else all
    of them must want one dtype. Raises ValueError where they do not."""
    holders: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            holders.setdefault(parameter, []).append((f"{path}.{name}", child))
    for parameter, held in holders.items():
        if len({found[child].compute for _, child in held}) == 1:
            continue
        if plan.autocast.enabled and all(found[child].rule is None for _, child in held):
            for _, child in held:
                found[child] = ModuleDtypes(parameter.dtype, None, casts=False)
            continue
        wanted = ", ".join(f"{name} in {found[child].compute}" for name, child in held)
        raise ValueError(
            f"one parameter is to be gathered in two dtypes: {wanted}; allowed: one for all that are tied; give each of these "
            "modules the rule"
        )


def _dtypes(path: str, module: nn.Module, rule: ModuleRule | None, plan: PrecisionPlan) -> ModuleDtypes:
    held = {p.dtype for p in module.parameters(recurse=False) if p.is_floating_point() and p.numel()}
    if rule is None and plan.compute is not None and isinstance(module, _BatchNorm):
        rule = _RUNNING_STATISTICS
    if rule is not None:
        return ModuleDtypes(_torch(rule.dtype), rule, casts=True)
    if not held:
        return ModuleDtypes(None, None, casts=False)
    if plan.compute is not None:
        return ModuleDtypes(_torch(plan.compute), None, casts=True)
    if plan.autocast.enabled:
        if any(is_a(module, name) for name in plan.autocast.lower_precision_safe_modules):
            return ModuleDtypes(getattr(torch, plan.autocast.dtype), None, casts=False)
        return ModuleDtypes(_only(path, module, held), None, casts=False)
    return ModuleDtypes(_only(path, module, held), None, casts=True)


def _only(path: str, module: nn.Module, held: set[torch.dtype]) -> torch.dtype:
    if len(held) > 1:
        raise ValueError(
            f"{path or type(module).__name__} itself holds parameters of {sorted(map(str, held))}; allowed: one dtype per "
            "module; cast them, or enable bf16 or fp16"
        )
    return next(iter(held))


def matches(match: str, path: str, module: nn.Module) -> bool:
    """Whether a rule's `match` is of this module."""
    kind, _, what = match.partition(":")
    if match == "norms":
        return "norm" in type(module).__name__.lower() and not list(module.children())
    if match == "losses":
        return any(cls.__module__ == _LOSSES for cls in type(module).__mro__)
    if kind == "class":
        return is_a(module, what)
    return path == what if kind == "name" else re.search(what, path) is not None


def is_a(module: nn.Module, name: str) -> bool:
    """Whether the module's class or one it derives from has that name; a dotted one must agree in its package too."""
    package, _, short = name.rpartition(".")
    return any(
        cls.__name__ == short and (not package or cls.__module__.partition(".")[0] == package.partition(".")[0])
        for cls in type(module).__mro__
    )


def master_dtype(parameter: nn.Parameter, plan: PrecisionPlan) -> torch.dtype:
    """Of the shards of a trained parameter, its gradient and its optimizer state."""
    if parameter.dtype == torch.float64 and plan.compute is None:
        return torch.float64
    keeps = plan.data_types.optimizer_dtype == "param" and parameter.dtype == torch.bfloat16
    if keeps or plan.bf16_masters:
        return torch.bfloat16
    return torch.float32


def cast_at_boundaries(dtypes: Mapping[nn.Module, ModuleDtypes], layers: Iterable[nn.Module] = ()) -> None:
    """Hooks that cast what goes into a module with parameters, or into one of `layers` all of one dtype, to the dtype in which it
    computes, and what comes out as its rule says."""
    casts = {module: found.compute for module, found in dtypes.items() if found.casts}
    for layer in layers:
        inside = {dtypes[child].compute for child in layer.modules() if dtypes[child].compute is not None}
        if len(inside) == 1 and all(dtypes[child].casts for child in layer.modules() if dtypes[child].compute is not None):
            casts.setdefault(layer, next(iter(inside)))
    for module, dtype in casts.items():
        if dtype is not None:
            module.register_forward_pre_hook(_inputs_to(dtype), with_kwargs=True)
    for module, found in dtypes.items():
        if found.rule is not None and found.rule.output != "keep":
            _cast_outputs(module, found.rule.output)


def _inputs_to(dtype: torch.dtype) -> Callable[..., tuple[Any, Any] | None]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return tree_map(lambda x: _to(x, dtype), args), tree_map(lambda x: _to(x, dtype), kwargs)

    return hook


def _cast_outputs(module: nn.Module, output: str) -> None:
    """`input`: what came in, before it was cast, so that hook is the first to run."""
    wanted: list[torch.dtype | None] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        floats = (x.dtype for x in [*args, *kwargs.values()] if isinstance(x, Tensor) and x.is_floating_point())
        wanted.append(next(floats, None))

    def cast(module: nn.Module, args: Any, result: Any) -> Any:
        dtype = wanted.pop() if output == "input" else _torch(output)
        return result if dtype is None else tree_map(lambda x: _to(x, dtype), result)

    if output == "input":
        module.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    module.register_forward_hook(cast)


def _to(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, Tensor) and value.is_floating_point() and value.dtype in _CAST
    return value.to(dtype) if is_float else value


_CAST = (torch.float32, torch.bfloat16, torch.float16)  # fp64 is somebody's wish


def _torch(name: str) -> torch.dtype:
    dtype = getattr(torch, TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype
