"""A moving average of the policy's weights, exported beside the policy."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from hybrid.engine import HybridEngine
from hybrid.sharding import local

PREFIX = "policy."  # in checkpoints, beside a teacher's average


class PolicyAverage:
    """Shards in fp32, moved by 1 - decay towards the policy's after each step."""

    def __init__(self, engine: HybridEngine, decay: float) -> None:
        self.engine, self.decay = engine, decay
        self._tensors = {name: t.to(torch.float32, copy=True) for name, t in engine.model.effective_shards()}

    @torch.no_grad()
    def after_step(self) -> None:
        for name, tensor in self.engine.model.effective_shards():
            mean = local(self._tensors[name])
            mean.lerp_(local(tensor).to(mean.dtype), 1.0 - self.decay)

    def averages(self) -> dict[str, Tensor]:
        return {PREFIX + name: tensor for name, tensor in self._tensors.items()}

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """A HF folder. Collective."""
        self.engine.save_pretrained(path, weights=self._tensors)
