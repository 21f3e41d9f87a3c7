"""DeepSpeed's universal checkpoints, read once to move a run over here.

TAG/zero/PARAMETER/
    fp32.pt                        {"param": the whole master, ...}
    exp_avg.pt, exp_avg_sq.pt, ... {"param": the whole state, ...}, as the optimizer has them
    step.pt                        a number

These files are pickles by their format, so this is the one place in the project that opens any: a run that was trained with
DeepSpeed could not be continued otherwise. They are read by torch's restricted unpickler alone (weights_only=True: tensors and
plain values, no code), and what it refuses is refused here. Save in this project's format at once, and resume from that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybrid import sharding
from hybrid.mesh import raise_together
from hybrid.optim import state as optim_state
from hybrid.training import engine_state

if TYPE_CHECKING:
    from hybrid.training.engine import TrainingEngine

MASTER, STEP = "fp32", "step"


@torch.no_grad()
def load(engine: TrainingEngine, folder: Path, *, strict: bool, optimizer: bool) -> None:
    """Collective: masters, and with `optimizer` its state, of every trained parameter. Frozen parameters, buffers, counters,
    schedule and generators stay: the folder has them, if at all, in files that need an unrestricted unpickler.

    Raises ValueError, the same on every rank and before any tensor changes, for a folder that is not one, a file that
    weights_only refuses, and names, shapes or states that do not fit.
    """
    tensors = engine_state.named_tensors(engine)
    trained = {name: tensors[name] for name, p in engine._update.parameters.items() if p.requires_grad}
    stepper = engine.optimizer if optimizer else None
    error: ValueError | None = None
    try:
        there = _there(folder, trained, strict)
        for name in there:  # once to look, mapped; once to copy
            _read_all(folder / "zero" / name, trained[name], stepper)
    except ValueError as caught:
        error = caught
    raise_together(error)
    names = {} if stepper is None else optim_state.parameter_names(stepper, tensors)
    for name in there:
        target = trained[name]
        found = _read_all(folder / "zero" / name, target, stepper)
        _fill(target, found.pop(MASTER))
        if stepper is not None:
            stepper.state[names[name]] = {key: _as_state(stepper, target, key, value) for key, value in found.items()}


def _there(folder: Path, trained: Mapping[str, Tensor], strict: bool) -> list[str]:
    """Names to read. With `strict` the folder and the trained parameters must agree."""
    root = folder / "zero"
    if not root.is_dir():
        raise ValueError(f"{folder} has no folder zero/, so it is no universal checkpoint; make one with ds_to_universal.py")
    held = {entry.name for entry in root.iterdir() if (entry / f"{MASTER}.pt").is_file()}
    missing, surplus = sorted(trained.keys() - held), sorted(held - trained.keys())
    if strict and (missing or surplus):
        raise ValueError(f"{folder} does not fit: missing in it: {missing}; only in it: {surplus}; train the same parameters")
    return [name for name in trained if name in held]


def _read_all(folder: Path, like: Tensor, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The master and, with an optimizer, every state, checked. Tensors are mapped, not read."""
    keys = {path.stem for path in folder.glob("*.pt")} if optimizer is not None else {MASTER}
    if optimizer is not None and (wanted := _states_of(optimizer)) is not None and keys - {MASTER, STEP} != {*wanted}:
        raise ValueError(
            f"{folder} holds {sorted(keys - {MASTER, STEP})}, {type(optimizer).__name__} has {sorted(wanted)}; give the "
            "optimizer that was saved, or load_optimizer_states=False"
        )
    found: dict[str, Any] = {}
    for key in sorted(keys):
        value = _read(folder / f"{key}.pt")
        if key == STEP:
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{folder / 'step.pt'} holds a {type(value).__name__}; allowed: a number")
            found[key] = number
            continue
        whole = value.get("param") if isinstance(value, dict) else None
        if not isinstance(whole, Tensor):
            raise ValueError(f"{folder / key}.pt holds no tensor under 'param'; make the folder again with ds_to_universal.py")
        if whole.shape != like.shape:
            raise ValueError(f"{folder / key}.pt is {list(whole.shape)}, the parameter here {list(like.shape)}")
        found[key] = whole
    return found


def _read(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # UnpicklingError, whose module no file here imports, or what a broken archive raises
        first = str(error).strip().splitlines()
        reason = first[0] if first else type(error).__name__
        raise ValueError(f"{path} is not only tensors and plain values, or broken, and is not read: {reason}") from error


def _states_of(optimizer: torch.optim.Optimizer) -> Collection[str] | None:
    """State tensors of the shape of their parameter; None where that is not known."""
    if isinstance(optimizer, torch.optim.Adam):  # AdamW too
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if optimizer.defaults.get("amsgrad") else []))
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if optimizer.defaults.get("momentum") else ()
    return None


def _as_state(optimizer: torch.optim.Optimizer, parameter: Tensor, key: str, value: Any) -> Any:
    if key == STEP:
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        on_device = group.get("fused") or group.get("capturable")
        return torch.tensor(float(value), device=parameter.device if on_device else "cpu")  # as torch's optimizers count
    made = torch.zeros_like(parameter, requires_grad=False)  # as torch's optimizers make it
    _fill(made, value)
    return made


def _fill(target: Tensor | nn.Parameter, whole: Tensor) -> None:
    if isinstance(target, sharding.DTensor):
        sharding.local(target).copy_(whole[sharding.own_rows(target)])
    else:
        target.copy_(whole)
