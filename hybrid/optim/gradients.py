"""The global gradient norm over shards, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid.mesh import Mesh
from hybrid.sharding import local


def squared_norms(parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> dict[str, float]:
    """Squared norm of each gradient over all its shards, the same on every rank: one all-reduce on the group that shares one
    copy of the weights, accumulated in float64. A parameter without a gradient counts 0, one that is not sharded once. What is
    not finite anywhere is infinite everywhere."""
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    sums = [_squared_norm(p, counts=isinstance(p, DTensor) or mesh.shard_rank == 0) for p in trainable.values()]
    total = torch.stack(sums).cpu()
    dist.all_reduce(total, group=mesh.shard_group)
    total.masked_fill_(~total.isfinite(), math.inf)
    if mesh.device_mesh.size(0) > 1:  # copies of the same gradient: that all agree is worth a number each
        dist.all_reduce(total, op=dist.ReduceOp.MAX, group=mesh.replicate_group)
    return dict(zip(trainable, total.tolist(), strict=True))


def _squared_norm(parameter: nn.Parameter, *, counts: bool) -> Tensor:
    if parameter.grad is None or not counts:
        return torch.zeros((), dtype=torch.float64, device=parameter.device)
    return torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64).square()


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What scales a gradient of that global norm to at most `max_norm`."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def scale_(gradients: Iterable[Tensor], factor: float) -> None:
    """In place."""
    if factor != 1.0 and (grads := [local(gradient) for gradient in gradients]):
        torch._foreach_mul_(grads, factor)


def not_finite(norms: Mapping[str, float]) -> list[str]:
    """Names of the gradients that hold an infinity or NaN."""
    return [name for name, value in norms.items() if not math.isfinite(value)]


def in_words(names: list[str]) -> str:
    """The first three."""
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
