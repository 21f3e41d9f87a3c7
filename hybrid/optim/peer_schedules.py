"""DeepSpeed's learning-rate schedules over a torch optimizer: the rates of hybrid/optim/rates.py with torch's verbs."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hybrid.optim.rates import momenta, rates
from hybrid.training.config.schedulers import Decay, OneCycle, ScheduleParams, SchedulerConfig

log = logging.getLogger(__name__)

BETA2 = 0.99  # DeepSpeed's OneCycle sets it together with beta 1, whatever the optimizer's was


class PeerSchedule:
    """Sets the learning rates of an optimizer's groups, and for OneCycle their momentum: `betas` where the optimizer has them,
    else a `momentum` that is not 0 (which DeepSpeed leaves alone). A rate that is a tensor stays that tensor."""

    def __init__(self, params: ScheduleParams, optimizer: Optimizer) -> None:
        """Raises ValueError for a decay without an end, for a list whose length is not the number of groups, and for rates
        that are negative or not finite; the optimizer is as it was then."""
        if isinstance(params, Decay) and params.total_num_steps is None:
            raise ValueError(f"{type(params).__name__} needs total_num_steps; give it, or fill it in by SchedulerConfig.until")
        self._params = params
        self._optimizer = optimizer
        self._base = _checked_rates([float(group["lr"]) for group in optimizer.param_groups])
        self._momentum_key = _momentum_key(params, optimizer)
        self.seek(params.last_batch_iteration)
        for warning in _warnings(params, self._momentum_key):
            log.warning("%s: %s", type(params).__name__, warning)

    def seek(self, index: int) -> None:
        """Set the rates of the optimizer step with this index, from -1. Raises ValueError for one before that, and where the
        optimizer has got another number of groups."""
        if index < -1:
            raise ValueError(f"index {index} of a learning-rate schedule; allowed: from -1, the first step's")
        groups = self._optimizer.param_groups
        if len(groups) != len(self._base):
            raise ValueError(f"{len(groups)} parameter groups, {len(self._base)} when the schedule was made; make a new schedule")
        new_rates = rates(self._params, self._base, index)
        new_momenta = momenta(self._params, len(groups), index) if isinstance(self._params, OneCycle) else []
        for group, rate in zip(groups, new_rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self._momentum_key is not None:
            for group, momentum in zip(groups, new_momenta, strict=True):
                group[self._momentum_key] = (momentum, BETA2) if self._momentum_key == "betas" else momentum
        self.last_batch_iteration = index
        self._last_rates = new_rates

    def step(self, index: int | None = None) -> None:
        """To the next index, or to a given one."""
        self.seek(self.last_batch_iteration + 1 if index is None else index)

    def get_last_lr(self) -> list[float]:
        """The rates of the groups, in their order."""
        return list(self._last_rates)

    def state_dict(self) -> dict[str, Any]:
        """JSON: the index, and the rates that the optimizer was made with. Those cannot be read from an optimizer again once its
        own state was loaded, which has the rates of mid-schedule."""
        return {"last_batch_iteration": self.last_batch_iteration, "base_lrs": list(self._base)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was saved, whether the optimizer's own state was loaded before, will be, or not. Raises ValueError
        for a state that is damaged or of another number of groups, and changes nothing then."""
        index: Any = state.get("last_batch_iteration")
        base: Any = state.get("base_lrs")
        numbers = isinstance(base, list | tuple) and all(isinstance(rate, float | int) for rate in base)
        if isinstance(index, bool) or not isinstance(index, int) or index < -1 or not numbers:
            raise ValueError(
                f"schedule state {dict(state)}; allowed: last_batch_iteration from -1 and base_lrs, as state_dict gives"
            )
        if len(base) != len(self._base):
            raise ValueError(
                f"the schedule's state has {len(base)} groups, the optimizer {len(self._base)}; resume with the same"
            )
        self._base = _checked_rates([float(rate) for rate in base])
        self.seek(index)


def make_schedule(section: SchedulerConfig, optimizer: Optimizer) -> PeerSchedule:
    """The schedule that the section asks for; the optimizer's rates are those of the first step from here on. Raises as
    PeerSchedule does."""
    return PeerSchedule(section.params, optimizer)


def _checked_rates(values: list[float]) -> list[float]:
    if bad := [value for value in values if not 0 <= value < math.inf]:
        raise ValueError(f"learning rate {bad[0]} of the optimizer; allowed: finite and not negative")
    return values


def _momentum_key(params: ScheduleParams, optimizer: Optimizer) -> str | None:
    """Where the optimizer keeps what OneCycle cycles."""
    if not isinstance(params, OneCycle) or not params.cycle_momentum:
        return None
    if all("betas" in group for group in optimizer.param_groups):
        return "betas"
    return "momentum" if all(group.get("momentum") for group in optimizer.param_groups) else None


def _warnings(params: ScheduleParams, momentum_key: str | None) -> list[str]:
    """What was asked for and has no effect."""
    found = []
    if isinstance(params, Decay) and params.total_num_steps is not None and params.total_num_steps < params.warmup_end:
        total, warmup = params.total_num_steps, params.warmup_num_steps
        found.append(
            f"total_num_steps={total} ends within warmup_num_steps={warmup}; there is no decay, the floor follows at once"
        )
    if isinstance(params, OneCycle):
        if params.cycle_momentum and momentum_key is None:
            found.append("cycle_momentum has no effect: the optimizer has neither betas nor a momentum")
        if (params.decay_lr_rate or params.decay_mom_rate) and not params.decay_step_size:
            found.append("decay_lr_rate and decay_mom_rate have no effect with decay_step_size=0")
    return found
