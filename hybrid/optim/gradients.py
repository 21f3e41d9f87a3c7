"""The global gradient norm over shards, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybrid.sharding import local


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
