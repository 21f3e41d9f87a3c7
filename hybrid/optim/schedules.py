"""Learning rates as functions of the step's number alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hybrid.config import OptimizerConfig


class Schedule:
    """The learning rate of each step, a function of the step's number alone. Has the verbs of torch's schedulers."""

    def __init__(self, config: OptimizerConfig, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError for a decay without an end."""
        if config.schedule != "constant" and config.total_steps is None:
            raise ValueError(f"optimizer.schedule={config.schedule} needs optimizer.total_steps; give it, or schedule=constant")
        self._config = config
        self._optimizer = optimizer
        self.seek(0)

    def seek(self, step: int) -> None:
        """Set the rate of optimizer step `step` (from 0): a share of each group's `initial_lr`, else of config.lr."""
        self.step_count = step
        for group in self._optimizer.param_groups:
            group["lr"] = group.get("initial_lr", self._config.lr) * lr_factor(self._config, step)

    def step(self) -> None:
        self.seek(self.step_count + 1)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"step_count": self.step_count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seek(state["step_count"])


def lr_factor(config: OptimizerConfig, step: int) -> float:
    """Share of its full rate that optimizer step `step` (from 0) uses: a linear rise over warmup_steps, then constant, or down to
    min_lr_ratio at total_steps, linearly or along half a cosine."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    assert config.total_steps is not None, "refused by Schedule"
    span = max(1, config.total_steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left
