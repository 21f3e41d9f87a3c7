"""The weights of a Hugging Face folder, by name, into the module that an engine trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hybrid import sharding
from hybrid.mesh import raise_together
from hybrid.training import engine_state

if TYPE_CHECKING:
    from hybrid.training.engine import TrainingEngine


def is_one(folder: Path) -> bool:
    """A model's folder that is no checkpoint of ours."""
    return (folder / "config.json").is_file() and not (folder / "state.json").exists() and any(folder.glob("*.safetensors"))


@torch.no_grad()
def load(engine: TrainingEngine, folder: Path, *, strict: bool) -> None:
    """Collective: weights and buffers, in the dtypes they have here; nothing else changes. Raises ValueError, the same on every
    rank and before any tensor changes, for a file that cannot be read, names that are on one side only (with strict), and
    shapes that differ."""
    with ExitStack() as opened:
        error: ValueError | None = None
        chosen: dict[str, Any] = {}
        try:
            stored = opened.enter_context(_slices(folder))
            chosen = _chosen(engine, folder, stored, strict)
        except ValueError as caught:
            error = caught
        raise_together(error)
        tensors = engine_state.named_tensors(engine)
        for name, saved in chosen.items():
            _fill(tensors[name], saved)


@contextmanager
def _slices(folder: Path) -> Iterator[dict[str, Any]]:
    """Every stored tensor, unread."""
    with ExitStack() as files:
        found: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} cannot be read: {error}; fetch it again") from error
            found |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        yield found


def _chosen(engine: TrainingEngine, folder: Path, stored: Mapping[str, Any], strict: bool) -> dict[str, Any]:
    """By a parameter's first name: tied weights may lie in the folder under any of theirs."""
    tensors = engine_state.named_tensors(engine)
    names: dict[int, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    aliases = {group[0]: group for group in names.values()}
    chosen, missing, known = {}, [], set()
    for name in tensors:
        called = aliases.get(name, [name])
        known |= {*called}
        there = next((alias for alias in called if alias in stored), None)
        if there is None:
            missing.append(name)
        else:
            chosen[name] = stored[there]
    surplus = sorted(stored.keys() - known)
    if strict and (missing or surplus):
        raise ValueError(
            f"{folder} does not fit: missing in it: {missing}; only in it: {surplus}; load the model it is of, or with "
            "load_module_strict=False"
        )
    if wrong := [name for name, saved in chosen.items() if tuple(saved.get_shape()) != tuple(tensors[name].shape)]:
        here, there_shape = list(tensors[wrong[0]].shape), list(chosen[wrong[0]].get_shape())
        raise ValueError(f"{folder} does not fit: {wrong[0]} is {there_shape} in it, {here} here")
    return chosen


def _fill(tensor: Tensor, saved: Any) -> None:
    if isinstance(tensor, sharding.DTensor):
        sharding.local(tensor).copy_(saved[sharding.own_rows(tensor)])
    else:
        tensor.copy_(saved[:] if tensor.ndim else saved[...])
