"""Which optimizer updates the local shards, over which groups of parameters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hybrid.config import OptimizerConfig
from hybrid.optim.adafactor import Adafactor
from hybrid.optim.muon import Muon


def make_optimizer(config: OptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of `config` over the trainable ones of `parameters`, each exactly once. Weight decay leaves out those of one
    dimension (biases, norm weights). Raises ValueError if nothing is trainable, and as `optimizer_over` does."""
    trainable = [p for p in parameters.values() if p.requires_grad and p.numel()]
    if not trainable:
        raise ValueError("every parameter is frozen; allowed: at least one trainable; narrow engine.freeze")
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return optimizer_over(config, groups, parameters)


def optimizer_over(
    config: OptimizerConfig, groups: Iterable[Mapping[str, Any]], parameters: Mapping[str, nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of `config` over `groups`, whose own settings win, of `parameters` (plain, or sharded along dimension 0).

    One without elements is left out, since there is nothing to update. muon makes two groups of one that has both matrices and
    others. Raises ValueError where nothing is left, for muon without a matrix, and for lion without its package.
    """
    made = [{"weight_decay": config.weight_decay, **g, "params": [p for p in g["params"] if p.numel()]} for g in groups]
    made = [group for group in made if group["params"]]
    if not made:
        raise ValueError("no parameter with elements is trained; allowed: at least one")
    if config.name == "muon":
        return _make_muon(config, made, parameters)
    made = [_with_rate(group, config.lr) for group in made]
    if config.name == "adafactor":
        return Adafactor(made, beta2_decay=config.beta2_decay, eps=config.eps, clip_threshold=config.clip_threshold)
    if config.name == "lion":
        return _make_lion(config, made)
    if config.name == "sgd":
        return torch.optim.SGD(made, momentum=config.momentum, nesterov=config.nesterov)
    kind = torch.optim.Adam if config.name == "adam" else torch.optim.AdamW
    return kind(made, betas=config.betas, eps=config.eps, fused=True)


def is_orthogonalized(config: OptimizerConfig, name: str, shape: Sequence[int]) -> bool:
    """Whether muon takes the parameter as a matrix (else AdamW has it)."""
    return len(shape) >= 2 and not any(re.search(pattern, name) for pattern in config.muon_exclude)


def _with_rate(group: Mapping[str, Any], lr: float) -> dict[str, Any]:
    """`initial_lr` is what the schedule scales."""
    rate = group.get("lr", lr)
    return {"initial_lr": rate, **group, "lr": rate}


def _make_muon(config: OptimizerConfig, groups: Sequence[dict[str, Any]], parameters: Mapping[str, nn.Parameter]) -> Muon:
    chosen = {id(p) for name, p in parameters.items() if is_orthogonalized(config, name, p.shape)}
    muon_lr = config.lr if config.muon_lr is None else config.muon_lr
    adam_lr = config.lr if config.adam_lr is None else config.adam_lr
    split = []
    for group in groups:
        for is_matrix, rate in ((True, muon_lr), (False, adam_lr)):
            if params := [p for p in group["params"] if (id(p) in chosen) == is_matrix]:
                split.append(_with_rate({**group, "params": params, "use_muon": is_matrix}, rate))
    if not any(group["use_muon"] for group in split):
        raise ValueError(
            f"name=muon finds no matrix to train beside muon_exclude={config.muon_exclude}; allowed: at least one; narrow "
            "muon_exclude, or take name=adamw"
        )
    return Muon(
        split,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.ns_steps,
        betas=config.betas,
        eps=config.eps,
    )


def _make_lion(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Chen et al. 2023, algorithm 2: elementwise, so that shards need nothing else."""
    try:
        from lion_pytorch import Lion
    except ImportError as error:
        raise ValueError(
            "optimizer.name=lion needs the package lion-pytorch, which is not installed: pip install lion-pytorch"
        ) from error
    return Lion(groups, lr=1.0, betas=config.betas)  # each group has its own lr; the package wants a default above 0
