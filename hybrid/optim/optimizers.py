"""Which optimizer updates the local shards, over which groups of parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from hybrid.config import OptimizerConfig


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
