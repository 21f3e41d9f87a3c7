"""One optimizer step over shards: what is checked, unscaled, clipped and stepped, in this order, on every rank alike."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid.mesh import Mesh
from hybrid.optim.gradients import clip_factor, not_finite, scale_, squared_norms
from hybrid.optim.host import HostMirror
from hybrid.optim.loss_scale import LossScaler


@dataclass(frozen=True)
class Stepped:
    """What one call of `Update.step` did, the same on every rank."""

    grad_norm: float  # of the whole gradient, unscaled, before clipping; not finite where it overflowed
    lr: float  # that was used
    skipped: bool  # no weight, moment or rate was changed
    overflowed: tuple[str, ...]  # parameters whose gradient was not finite


class Update:
    """The step of one engine: gradients on shards to new weights.

    scaler: multiplies the loss; a gradient is divided by the scale that its loss was multiplied by, whatever has become of the
    scale since. check: a step with a gradient that is not finite is skipped on every rank; without, it is taken. mirror: state
    and step in host memory. divide_by: sharded gradients come divided; those of parameters that every rank holds
    whole, and that no backward reduces, are summed over ranks and divided by this here.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
        schedule: Any,
        mesh: Mesh,
        *,
        max_norm: float | None,
        scaler: LossScaler | None = None,
        check: bool = True,
        mirror: HostMirror | None = None,
        divide_by: float = 1.0,
    ) -> None:
        self.parameters, self.optimizer, self.schedule, self.mesh = parameters, optimizer, schedule, mesh
        self.max_norm, self.scaler, self.check, self.mirror = max_norm, scaler, check, mirror
        self._divide_by = divide_by
        self._copies = [p for p in parameters.values() if p.requires_grad and not isinstance(p, DTensor)]
        self._scale: float | None = None  # of the losses whose gradients wait
        self._is_stepping = False

    def own_optimizer(self) -> None:
        """From here on the optimizer steps inside `step` alone, where gradients are checked, unscaled and clipped."""
        assert self.optimizer is not None

        def refuse(*_: Any) -> None:
            if not self._is_stepping:
                raise RuntimeError("optimizer.step(): use engine.step(), which checks, unscales and clips the gradients first")

        self.optimizer.register_step_pre_hook(refuse)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss (fp32 or fp64) to start a backward from. All losses of a step get the scale of the first."""
        if self._scale is None:
            self._scale = 1.0 if self.scaler is None else float(self.scaler.scale)
        return loss if self._scale == 1.0 else loss * self._scale

    def step(
        self,
        refuse: Callable[[list[str]], None] = lambda names: None,
        unused: Collection[str] = (),
        schedule_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Stepped:
        """Collective. `refuse` is called with the names of the gradients that are not finite, and may raise. unused: parameters,
        the same on every rank, that are not stepped on, whatever their gradients. schedule_kwargs: for the schedule's own step.
        Raises what the scaler raises at its floor (LossScaleError), with the gradients dropped."""
        assert self.optimizer is not None, "an engine without an optimizer takes no step"
        scale, lr = self._scale or 1.0, float(self.optimizer.param_groups[0]["lr"])
        self._reduce_copies()
        for name in unused:
            self.parameters[name].grad = None
        norms = squared_norms(self.parameters, self.mesh)
        bad = not_finite(norms) if self.check else []
        norm = math.sqrt(sum(norms.values())) / scale
        try:
            if bad:
                refuse(bad)
            else:
                self._apply(clip_factor(norm, self.max_norm) / scale)
                if self.schedule is not None:
                    self.schedule.step(**schedule_kwargs)
        finally:
            self.drop()
        if self.scaler is not None:
            self.scaler.update(bool(bad))
        return Stepped(norm, lr, bool(bad), tuple(bad))

    def _apply(self, factor: float) -> None:
        if self.mirror is not None:
            scale_(self.mirror.pull(), factor)
        else:
            scale_([p.grad for p in self.parameters.values() if p.grad is not None], factor)
        assert self.optimizer is not None
        self._is_stepping = True
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False
        if self.mirror is not None:
            self.mirror.push()

    def check_schedule(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError for what the schedule's step cannot be called with."""
        if self.schedule is None:
            return
        try:
            inspect.signature(self.schedule.step).bind(**given)
        except TypeError as error:
            raise ValueError(
                f"{type(self.schedule).__name__}.step: {error}; give what it needs: engine.step(lr_kwargs={{...}})"
            ) from None

    def _reduce_copies(self) -> None:
        for parameter in self._copies:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if self.mesh.world_size > 1 and gradient.numel():
                dist.all_reduce(gradient)
            gradient /= self._divide_by
            parameter.grad = gradient

    def take(self) -> None:
        """Let what the caller has made of the parameters be what is stored of them (a step does so itself)."""
        if self.mirror is not None:
            self.mirror.take()

    def drop(self) -> None:
        """No gradient, and no scale that one was multiplied by."""
        self._scale = None
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.mirror is not None:
            self.mirror.drop()
