"""What one may ask of a training engine, under DeepSpeed's names. Nothing here changes anything but the learning rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hybrid.mesh import Mesh
from hybrid.optim.update import Stepped, Update
from hybrid.profiling.comms import CommsLogger
from hybrid.profiling.flops import FlopsProfiler
from hybrid.training.config.top import Effect, TrainingConfig
from hybrid.training.eigenvalue import EigenvalueMonitor, values_of
from hybrid.training.meters import Meters


class EngineFacts(nn.Module):
    """Module, config and counters of an engine. What it does not know is looked up in `module`."""

    _eigenvalues: EigenvalueMonitor | None = None

    def __init__(
        self,
        module: nn.Module,
        config: TrainingConfig,
        mesh: Mesh,
        update: Update,
        meters: Meters,
        *,
        root: nn.Module | None,
        effects: Sequence[Effect],
    ) -> None:
        super().__init__()
        self.module = module
        self._roots = (module if root is None else root,)  # in a tuple: no second child with the same parameters
        self.config, self.mesh, self.effects = config, mesh, tuple(effects)
        self.global_steps = 0  # boundaries passed, skipped ones too
        self.global_samples = 0
        self.micro_steps = 0  # backwards
        self.skipped_steps = 0
        self.last: Stepped | None = None  # what the last boundary did
        self._update, self._meters = update, meters

    @property
    def root(self) -> nn.Module:
        """The sharded module that is called, of which `module` is a part or the whole."""
        return self._roots[0]

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """None: the engine only evaluates."""
        return self._update.optimizer

    @property
    def lr_scheduler(self) -> Any:
        return self._update.schedule

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def local_rank(self) -> int:
        return self.mesh.rank % self.mesh.local_world_size

    @property
    def global_rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    dp_world_size = world_size

    @property
    def throughput(self) -> Mapping[str, float | None]:
        """The last report, of the interval that steps_per_print is: tokens, samples and operations a second of this rank, by
        phase (hybrid/profiling/throughput.py)."""
        return self._meters.last

    @property
    def comms_logger(self) -> CommsLogger:
        return self._meters.comms

    @property
    def flops_profiler(self) -> FlopsProfiler | None:
        """None where the config does not enable it."""
        return self._meters.flops

    @property
    def eigenvalues(self) -> Mapping[str, float]:
        """Of the last step at which they were due: the largest of each block's Hessian, by the block's name
        (hybrid/training/eigenvalue.py). Empty before, and where the config does not enable it."""
        return values_of(self._eigenvalues)

    @property
    def loss_scale(self) -> float:
        """By which the next loss is multiplied; 1.0 without a scaler."""
        return 1.0 if self._update.scaler is None else float(self._update.scaler.scale)

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last boundary was skipped."""
        return self.last is not None and self.last.skipped

    def was_step_applied(self) -> bool:
        return self.last is not None and not self.last.skipped

    def get_global_grad_norm(self) -> float | None:
        """Of the last boundary: the whole gradient, unscaled, before clipping."""
        return None if self.last is None else self.last.grad_norm

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups()]

    def set_lr(self, lr: float) -> None:
        for group in self._groups():
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        return [group.get("betas", group.get("momentum")) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def train_batch_size(self) -> int:
        assert self.config.train_batch_size is not None
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        assert self.config.train_micro_batch_size_per_gpu is not None
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        assert self.config.gradient_accumulation_steps is not None
        return self.config.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def describe(self) -> str:
        """What each key of the config does here, a line each."""
        width = max((len(effect.key) for effect in self.effects), default=0)
        return "\n".join(f"{effect.key:<{width}}  {effect.value!r}: {effect.text}" for effect in self.effects)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or not hasattr(module, name):
                raise
            return getattr(module, name)
