"""What a checkpoint of a TrainingEngine holds beside tensors, as JSON: counters, rates, schedule, loss scaler."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybrid.optim import state as optim_state
from hybrid.training.json_values import decode, encode

if TYPE_CHECKING:
    from hybrid.training.engine import TrainingEngine

log = logging.getLogger(__name__)

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
# How an optimizer is carried out: of the run, not of its state.
_OF_THE_RUN = ("params", "foreach", "fused", "capturable", "differentiable")


def named_tensors(engine: TrainingEngine, *, exclude_frozen: bool = False) -> dict[str, Tensor]:
    """Masters by parameter name, those in host memory where the optimizer steps there, and the buffers of the state dict."""
    update = engine._update
    held = update.parameters if update.mirror is None else update.mirror.named(update.parameters)
    tensors: dict[str, Tensor] = {n: p for n, p in held.items() if not exclude_frozen or update.parameters[n].requires_grad}
    return tensors | buffers(engine)


def buffers(engine: TrainingEngine) -> dict[str, Tensor]:
    """Those that a state dict has. Every rank holds them whole; of a checkpoint they are one rank's."""
    found: dict[str, Tensor] = {}
    for path, child in engine.module.named_modules():
        for name, value in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = value
    return found


def frozen(engine: TrainingEngine) -> set[str]:
    return {name for name, p in engine._update.parameters.items() if not p.requires_grad}


def capture(engine: TrainingEngine, *, without_frozen: bool) -> dict[str, Any]:
    """Raises ValueError for a schedule, a loss scaler or an optimizer whose state is not made of plain values."""
    update = engine._update
    values = {} if update.optimizer is None else optim_state.values(update.optimizer, named_tensors(engine))
    return {
        **{name: getattr(engine, name) for name in COUNTERS},
        "without_frozen": without_frozen,
        "groups": [_encoded_group(group) for group in engine._groups()],
        "optimizer_values": {slot: encode(value, f"the optimizer's {slot}") for slot, value in values.items()},
        "schedule": _state_of(update.schedule, "the schedule's state"),
        "loss_scaler": _state_of(update.scaler, "the loss scaler's state"),
    }


def _encoded_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of it is plain; the rest is the caller's to set again."""
    encoded: dict[str, Any] = {"parameters": len(group["params"])}
    for key, value in group.items():
        if key in _OF_THE_RUN:
            continue
        try:
            encoded[key] = encode(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value, key)
        except ValueError:
            log.debug("%s of an optimizer's group is a %s and stays as configured", key, type(value).__name__)
    return encoded


def _state_of(part: Any, what: str) -> Any:
    return encode(part.state_dict(), what) if hasattr(part, "state_dict") else None


def restore(engine: TrainingEngine, state: Mapping[str, Any], *, optimizer: bool, schedule: bool) -> None:
    """All but tensors and what `finish` does. Raises ValueError for what does not fit; use it inside `unchanged_on_error`."""
    update = engine._update
    if optimizer:
        _restore_groups(engine._groups(), state["groups"])
        if update.scaler is not None and state["loss_scaler"] is not None:
            update.scaler.load_state_dict(decode(state["loss_scaler"]))
        elif update.scaler is not None:
            log.warning("the checkpoint has no loss scale; it starts anew at %g", update.scaler.scale)
    if schedule and update.schedule is not None and hasattr(update.schedule, "load_state_dict"):
        if state["schedule"] is None:
            raise ValueError(
                "the checkpoint holds no schedule, and there is one here; resume without, or with load_lr_scheduler_states=False"
            )
        update.schedule.load_state_dict(decode(state["schedule"]))
        if not optimizer and hasattr(update.schedule, "get_last_lr"):  # else the groups have brought their rates
            for group, lr in zip(engine._groups(), update.schedule.get_last_lr()):
                group["lr"] = lr
    elif schedule and state["schedule"] is not None:
        log.warning("the checkpoint holds a learning-rate schedule, and there is none here: rates stay at %s", engine.get_lr())


def _restore_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    here, there = [len(group["params"]) for group in groups], [group["parameters"] for group in saved]
    if here != there:
        raise ValueError(
            f"the optimizer does not fit: groups of {here} parameters here, of {there} there; resume with the same groups, or "
            "with load_optimizer_states=False"
        )
    for group, values in zip(groups, saved):
        for key, value in values.items():
            if key == "parameters":
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(decode(value))
            else:
                group[key] = decode(value)


def finish(engine: TrainingEngine, state: Mapping[str, Any], *, optimizer: bool) -> None:
    """After the tensors: counters, and what of the optimizer's state is no tensor."""
    for name in COUNTERS:
        setattr(engine, name, state[name])
    engine.last = None
    if optimizer and engine.optimizer is not None:
        parameters = optim_state.parameter_names(engine.optimizer, named_tensors(engine))
        for slot, value in state["optimizer_values"].items():
            key, _, name = slot.partition(".")
            engine.optimizer.state[parameters[name]][key] = decode(value)


@contextmanager
def unchanged_on_error(engine: TrainingEngine) -> Iterator[None]:
    """After an exception inside, groups, schedule and loss scaler are as before."""
    update = engine._update
    parts: list[Any] = [part for part in (update.scaler, update.schedule) if hasattr(part, "load_state_dict")]
    states = [copy.deepcopy(part.state_dict()) for part in parts]
    groups = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in g.items() if k != "params"} for g in engine._groups()]
    try:
        yield
    except BaseException:
        for part, kept in zip(parts, states):
            part.load_state_dict(kept)
        for group, values in zip(engine._groups(), groups):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value
        raise
