"""What tests of optimizers share: parameters on shards of any layout, their gradients, and how many bytes ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid.config import OptimizerConfig
from hybrid.optim.optimizers import make_optimizer

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (11, 6),
    "up.weight": (9, 6),
    "down.weight": (7, 10),
    "one_row.weight": (1, 5),  # empty on all ranks but one
    "experts.weight": (5, 4, 3),
    "norm.weight": (6,),
    "down.bias": (3,),  # empty on the last of 4 ranks
    "nothing.weight": (0, 4),
}
COPIES = {"shard": 1, "mixed": 2, "replicate": None}  # of the weights over all ranks, by kind of mesh; None: one per rank
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.02},
    "adam": {"lr": 0.02},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "lion": {"lr": 0.01},
    "adafactor": {"lr": 0.05},
    "muon": {"lr": 0.05, "adam_lr": 0.02},
}


def config_of(name: str, **changes: Any) -> OptimizerConfig:
    return OptimizerConfig(name=name, **{"weight_decay": 0.1, **SETTINGS[name], **changes})


def mesh_of(kind: str) -> DeviceMesh:
    ranks = dist.get_world_size()
    copies = COPIES[kind] or ranks
    return init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("replicate", "shard"))


def parameters(mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Plain, or cut along dimension 0 over the mesh's "shard"."""
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(_cut(torch.randn(shape, generator=generator).to(dtype), mesh)) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def _cut(tensor: Tensor, mesh: DeviceMesh | None) -> Tensor:
    return tensor if mesh is None else distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])


def take_steps(
    optimizer: torch.optim.Optimizer,
    held: Mapping[str, nn.Parameter],
    steps: range,
    *,
    mesh: DeviceMesh | None = None,
    scale: float = 1.0,
) -> None:
    """With gradients that were multiplied by `scale` and divided by it again."""
    for step in steps:
        for name, gradient in gradients(step, held["up.weight"].dtype).items():
            held[name].grad = _cut((gradient * scale) / scale, mesh)
        optimizer.step()


def trained(
    config: OptimizerConfig,
    mesh: DeviceMesh | None = None,
    *,
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    held = parameters(mesh, dtype)
    optimizer = make_optimizer(config, held)
    take_steps(optimizer, held, range(steps), mesh=mesh, scale=scale)
    return held, optimizer


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def largest_error(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Of all tensors with elements: the largest difference, in units of its tensor's largest expected value."""
    errors = [
        ((whole(given[name]).double() - value.detach().double()).abs().max() / value.detach().abs().max()).item()
        for name, value in expected.items()
        if value.numel()
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz in five steps, in the dtype it is given."""
    x = matrix / matrix.norm() if matrix.any() else matrix
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class MuonReference:
    """Muon on the float64 weights it is given, in place; embeddings, heads and vectors by AdamW. Vectors do not decay."""

    def __init__(self, weights: dict[str, Tensor], lr: float, adam_lr: float, eps: float, *, decay: float) -> None:
        self.weights, self.lr, self.adam_lr, self.eps, self.decay = weights, lr, adam_lr, eps, decay
        self.first = {n: torch.zeros_like(w) for n, w in weights.items()}
        self.second = {n: torch.zeros_like(w) for n, w in weights.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor]) -> None:
        self.steps += 1
        for name, w in self.weights.items():
            g, decay = gradients[name].double(), self.decay if w.ndim > 1 else 0.0
            if w.ndim > 1 and "embed" not in name and "lm_head" not in name:
                self.first[name] = 0.95 * self.first[name] + g
                update = (0.95 * self.first[name] + g).flatten(1)
                scale = max(1, update.shape[0] / update.shape[1]) ** 0.5
                w -= self.lr * (decay * w + scale * orthogonal(update).view_as(w))
            else:
                self.first[name] = 0.9 * self.first[name] + 0.1 * g
                self.second[name] = 0.999 * self.second[name] + 0.001 * g * g
                mean = self.first[name] / (1 - 0.9**self.steps)
                square = self.second[name] / (1 - 0.999**self.steps)
                w -= self.adam_lr * (mean / (square.sqrt() + self.eps) + decay * w)


class _AllToAlls(TorchDispatchMode):
    def __init__(self, calls: list[int], rank: int) -> None:
        super().__init__()
        self._calls, self._rank = calls, rank

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::alltoall_base_":
            sent, splits = args[1], args[4]
            self._calls.append((sum(splits) - splits[self._rank]) * sent.element_size())
        return func(*args, **(kwargs or {}))


@contextmanager
def all_to_alls() -> Iterator[list[int]]:
    """For each all-to-all of this rank over the default group: the bytes that it sends to others."""
    calls: list[int] = []
    with _AllToAlls(calls, dist.get_rank()):
        yield calls
