"""Muon on shards: momentum where the rows are, orthogonalization of each whole matrix on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from hybrid.optim.owners import ROUND_NUMEL, on_whole
from hybrid.optim.shards import shard_group
from hybrid.sharding import local

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0, singular values end within about 0.7 and 1.2


def newton_schulz(matrix: Tensor, steps: int = 5) -> Tensor:
    """U V^T of `matrix` = U S V^T, nearly: fp32 [rows, columns], by `steps` of X <- a X + (b A + c A A) X with A = X X^T
    (Jordan et al. 2024). A zero matrix stays zero."""
    a, b, c = QUINTIC
    x = matrix.float()
    norm = torch.linalg.vector_norm(x, dtype=torch.float64)  # squares of small fp32 gradients are zero in fp32
    x = (x / norm.clamp_min(torch.finfo(torch.float32).tiny)).float()
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized (Jordan et al. 2024), for the matrices; AdamW for the rest.

    Per matrix W [m, n] with gradient G (of more than two dimensions: [first, all others]):
        M <- momentum M + (1 - momentum) G;   N = momentum M + (1 - momentum) G with Nesterov, else M
        W <- (1 - lr weight_decay) W - lr max(1, m / n)^0.5 newton_schulz(N)
    Parameters are plain tensors or DTensors cut along dimension 0, also unevenly; state lies as they do. N travels in the
    parameters' dtype, once to the rank that orthogonalizes it and once back (hybrid/optim/owners.py).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        round_numel: int = ROUND_NUMEL,
    ) -> None:
        """`params`: groups with `use_muon`, and any of the other settings (momentum to ns_steps act on matrices, betas and eps on
        the rest). Raises ValueError for a group without the flag, a vector among matrices, a layout that is not Shard(0)."""
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "betas": betas,
            "eps": eps,
            "fused": False,
        }
        self._round_numel = round_numel
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "use_muon" not in param_group:
            raise ValueError("a parameter group has no use_muon; give each one true (matrices) or false (AdamW)")
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        added["fused"] = not added["use_muon"]  # for hybrid.optim.state: AdamW's step counts lie beside the parameters
        for p in added["params"]:
            shard_group(p)
            if added["use_muon"] and p.ndim < 2:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} has use_muon=true; allowed: two dimensions or more")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Collective over the shard group where matrices are sharded: every rank has gradients of the same ones."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_state()
        for group in self.param_groups:
            (self._step_matrices if group["use_muon"] else self._step_rest)(group)
        return loss

    def _require_state(self) -> None:
        """Before anything changes: state of a checkpoint that other patterns divided must not be begun anew in silence."""
        for group in self.param_groups:
            needed = {"momentum_buffer"} if group["use_muon"] else {"step", "exp_avg", "exp_avg_sq"}
            for p in group["params"]:
                if (found := self.state.get(p)) and found.keys() != needed:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} has the state {sorted(found)}; needed: {sorted(needed)}; "
                        "resume with the muon_exclude that it was saved with"
                    )

    def _step_matrices(self, group: dict[str, Any]) -> None:
        by_layout: dict[tuple[dist.ProcessGroup | None, torch.dtype], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None and p.numel():
                by_layout.setdefault((shard_group(p), p.dtype), []).append(p)
        for (ranks, _), matrices in by_layout.items():
            self._step_layout(matrices, ranks, group)

    def _step_layout(self, matrices: list[Tensor], ranks: dist.ProcessGroup | None, group: dict[str, Any]) -> None:
        shapes = [(p.shape[0], prod(p.shape[1:])) for p in matrices]

        def direction(place: int) -> Tensor:
            return self._direction(matrices[place], group).view(-1, shapes[place][1])

        def orthogonalized(whole: Tensor) -> Tensor:
            return newton_schulz(whole, group["ns_steps"])

        for place, update in on_whole(direction, shapes, orthogonalized, ranks, self._round_numel):
            rows, columns = shapes[place]
            weight = local(matrices[place])
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(update.view_as(weight), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)

    def _direction(self, p: Tensor, group: dict[str, Any]) -> Tensor:
        """What is to be orthogonalized, on this rank's rows."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        assert p.grad is not None
        grad, momentum = local(p.grad), local(state["momentum_buffer"])
        momentum.lerp_(grad, 1 - group["momentum"])
        return grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

    def _step_rest(self, group: dict[str, Any]) -> None:
        stepped = [p for p in group["params"] if p.grad is not None]
        for p in stepped:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        if not stepped:
            return
        beta1, beta2 = group["betas"]
        adamw(
            [local(p) for p in stepped],
            [local(p.grad) for p in stepped],
            [local(self.state[p]["exp_avg"]) for p in stepped],
            [local(self.state[p]["exp_avg_sq"]) for p in stepped],
            [],
            [self.state[p]["step"] for p in stepped],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
