"""Optimizers, learning-rate schedules and the global gradient norm, all on the local shards."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.config import OptimizerConfig
from hybrid.sharding import local


def make_optimizer(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable ones of `parameters`, each exactly once. Weight decay leaves out those of one dimension
    (biases, norm weights). Raises ValueError if nothing is trainable."""
    trainable = [p for p in parameters.values() if p.requires_grad]
    if not trainable:
        raise ValueError("every parameter is frozen; allowed: at least one trainable; narrow engine.freeze")
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


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
        """Set the rate of optimizer step `step` (from 0)."""
        self.step_count = step
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.lr * lr_factor(self._config, step)

    def step(self) -> None:
        self.seek(self.step_count + 1)

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"step_count": self.step_count}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.seek(state["step_count"])


def lr_factor(config: OptimizerConfig, step: int) -> float:
    """Share of config.lr that optimizer step `step` (from 0) uses: a linear rise over warmup_steps, then constant, or down to
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


def squared_norms(parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> dict[str, float]:
    """Squared norm of each gradient over all its shards, the same on every rank: one all-reduce on the group that shares one
    copy of the weights, accumulated in float64. A parameter without a gradient counts 0."""
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    sums = [_squared_norm(p) for p in trainable.values()]
    total = torch.stack(sums).cpu()
    dist.all_reduce(total, group=group)
    return dict(zip(trainable, total.tolist(), strict=True))


def _squared_norm(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    return torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64).square()


def clip(parameters: Mapping[str, nn.Parameter], norm: float, max_norm: float | None) -> None:
    """Scale all gradients so that their global norm is at most `max_norm`."""
    if max_norm is None or norm <= max_norm:
        return
    grads = [local(p.grad) for p in parameters.values() if p.grad is not None]
    torch._foreach_mul_(grads, max_norm / norm)


def require_finite(norms: Mapping[str, float], step: int) -> float:
    """The global norm. Raises FloatingPointError naming the step and the tensors whose gradient is not finite."""
    bad = [name for name, value in norms.items() if not math.isfinite(value)]
    if bad:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise FloatingPointError(
            f"step {step}: gradient of {', '.join(bad[:3])}{more} is not finite; no weight was changed; lower the learning rate "
            "or look at this step's batch"
        )
    return math.sqrt(sum(norms.values()))
