"""Adafactor whose statistics are those of whole tensors, wherever their rows lie.

torch.optim.Adafactor cannot do that (2.13): on sharded matrices it raises, on sharded vectors and tensors of three dimensions it
takes one shard's RMS for the whole one's and gives other weights at each number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.optim.shards import shard_group, zeros_beside
from hybrid.sharding import local

FACTORS = ("row_var", "col_var")  # state of another shape than its parameter


class Adafactor(torch.optim.Optimizer):
    """Shazeer and Stern 2018, algorithms 4 to 6, without momentum, with the step size of torch.optim.Adafactor. Per tensor W with
    gradient G, at step t:
        rate = max(eps2, RMS(W)) min(lr, t^-0.5);   keep = 1 - t^beta2_decay
        R, C <- means of G^2 over columns and over rows, averaged by keep;   V = R C / mean(R)
        U = G / sqrt(V);   W <- (1 - lr weight_decay) W - rate U / max(1, RMS(U) / clip_threshold)
    What is no matrix, or one with a single row or column, keeps V itself; of more than two dimensions, each matrix of the last
    two has its own R and C. Statistics are in fp32: R lies as W, C of a sharded matrix is whole on every rank.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: float = 1e-8,
        eps2: float = 1e-3,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        """eps: floor of sqrt(V); eps2: floor of RMS(W). Raises ValueError for a layout that is not Shard(0)."""
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "eps2": eps2,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            shard_group(p)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Collective over the shard group, two all-reduces: every rank has gradients of the same parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_ranks: dict[dist.ProcessGroup | None, list[_Update]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.numel():
                    self._begin(p)
                    by_ranks.setdefault(shard_group(p), []).append(_Update(p, self.state[p], group))
        for ranks, updates in by_ranks.items():
            sums = _sum([update.sums() for update in updates], ranks)
            for update, (squares, columns) in zip(updates, sums, strict=True):
                update.learn(squares, columns)
            squares_of = _sum([(update.direction().square().sum(),) for update in updates], ranks)
            for update, (squares,) in zip(updates, squares_of, strict=True):
                update.apply(squares)
        return loss

    def _begin(self, p: Tensor) -> None:
        state = self.state[p]
        if state:
            return
        state["step"] = torch.zeros((), dtype=torch.float32)
        if is_factored(p.shape):
            state["row_var"] = zeros_beside(p, [*p.shape[:-1], 1], torch.float32)
            state["col_var"] = zeros_beside(p, [*p.shape[:-2], 1, p.shape[-1]], torch.float32)
        else:
            state["variance"] = torch.zeros_like(p, dtype=torch.float32)


def is_factored(shape: Sequence[int]) -> bool:
    """Whether R C / mean(R) is another estimate, and a smaller one, than V."""
    return len(shape) >= 2 and min(shape[-2:]) > 1


class _Update:
    """One parameter's step, in the parts between which ranks add up."""

    def __init__(self, p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        assert p.grad is not None
        self._weight, self._grad, self._numel = local(p), local(p.grad), p.numel()
        self._shape, self._group = p.shape, group
        self._step = state["step"]
        self._row, self._column, self._variance = (
            local(state[key]) if key in state else None for key in ("row_var", "col_var", "variance")
        )
        self._rate = 0.0

    def sums(self) -> tuple[Tensor, Tensor]:
        """Of this rank's rows: the sum of W^2, and of a matrix the sum of G^2 in each column."""
        columns = self._grad.float().square().sum(0) if self._is_cut else self._grad.new_empty(0, dtype=torch.float32)
        return self._weight.float().square().sum(), columns

    @property
    def _is_cut(self) -> bool:
        """Whether columns run over all ranks: of more than two dimensions, every matrix is whole on some rank."""
        return self._column is not None and len(self._shape) == 2

    def learn(self, squares: Tensor, columns: Tensor) -> None:
        """Takes in both sums over all ranks; updates the statistics and sets the rate."""
        self._step += 1
        t = self._step.item()
        fresh = t ** self._group["beta2_decay"]
        rms = squares.div(self._numel).sqrt()
        self._rate = rms.clamp_min(self._group["eps2"]) * min(self._group["lr"], t**-0.5)
        squared = self._grad.float().square()
        if self._variance is not None:
            self._variance.lerp_(squared, fresh)
            return
        assert self._row is not None
        assert self._column is not None
        self._row.lerp_(squared.mean(-1, keepdim=True), fresh)
        mean = columns.div(self._shape[0]).unsqueeze(0) if self._is_cut else squared.mean(-2, keepdim=True)
        self._column.lerp_(mean, fresh)

    def direction(self) -> Tensor:
        """U. Made twice, so that a step holds one tensor's at a time."""
        floor = self._group["eps"] ** 2
        if self._variance is not None:
            estimate = self._variance
        else:
            assert self._row is not None
            assert self._column is not None
            mean = self._column.mean(-1, keepdim=True)  # that of R too: both are averages of the means of G^2
            estimate = self._row * (self._column / mean.clamp_min(floor))
        return self._grad.float() * estimate.clamp_min(floor).rsqrt()

    def apply(self, squares: Tensor) -> None:
        """Takes in the sum of U^2 over all ranks; moves the weight."""
        rms = squares.div(self._numel).sqrt()
        factor = self._rate / (rms / self._group["clip_threshold"]).clamp_min(1.0)
        moved = self._weight.float().mul_(1 - self._group["lr"] * self._group["weight_decay"]) - factor * self.direction()
        self._weight.copy_(moved)


def _sum(tensors: Sequence[tuple[Tensor, ...]], group: dist.ProcessGroup | None) -> list[tuple[Tensor, ...]]:
    """Each tensor summed over the ranks of `group`, all in one all-reduce."""
    if group is None:
        return list(tensors)
    flat = torch.cat([t.reshape(-1) for row in tensors for t in row])
    dist.all_reduce(flat, group=group)
    pieces = iter(flat.split([t.numel() for row in tensors for t in row]))
    return [tuple(next(pieces).view_as(t) for t in row) for row in tensors]
