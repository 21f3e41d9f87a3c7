"""Which parts of a module are gathered together: its layers, found by class or by the lists they stand in."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def find_units(module: nn.Module) -> list[nn.Module]:
    """Layers, outermost first in each branch and none inside another: modules of a class that a HF model names as not to be
    split; in another module, what stands in its lists and sequences. A layer that shares a parameter with something outside
    itself is left to the root, which holds what all share."""
    named = set(getattr(module, "_no_split_modules", None) or ())
    found = list(_of_classes(module, named)) or list(_of_lists(module))
    counts: dict[int, int] = {}
    for child in module.modules():
        for parameter in child.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    return [unit for unit in found if _own_alone(unit, counts)]


def _of_classes(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    for child in module.children():
        if {cls.__name__ for cls in type(child).__mro__} & names:
            yield child
        else:
            yield from _of_classes(child, names)


def _of_lists(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            for item in child.children():
                if isinstance(item, nn.ModuleList | nn.ModuleDict):
                    yield from _of_lists(item)
                elif any(True for _ in item.parameters()):
                    yield item
        else:
            yield from _of_lists(child)


def _own_alone(unit: nn.Module, counts: dict[int, int]) -> bool:
    """Whether all uses of the unit's parameters are inside it."""
    inside: dict[int, int] = {}
    for child in unit.modules():
        for parameter in child.parameters(recurse=False):
            inside[id(parameter)] = inside.get(id(parameter), 0) + 1
    return all(counts[key] == number for key, number in inside.items())
