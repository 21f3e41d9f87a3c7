"""Schedules, parameter groups, and the global norm over shards."""

from __future__ import annotations

import math

import pytest
import torch
from hybrid_cases import cross_entropy, full_gradients, full_weights, hf_module, make_engine, pack, ragged_sequences
from tiny import save_tiny
from torch import nn

from hybrid.config import OptimizerConfig
from hybrid.optim.optimizers import make_optimizer
from hybrid.optim.schedules import Schedule, lr_factor

SEQUENCES = ragged_sequences(6)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1]),
        ({"schedule": "linear", "warmup_steps": 2, "total_steps": 6}, [0.5, 1, 1, 0.75, 0.5, 0.25, 0]),
        ({"schedule": "cosine", "total_steps": 4, "min_lr_ratio": 0.2}, [1, 0.8828427, 0.6, 0.3171573, 0.2, 0.2, 0.2]),
        ({"schedule": "linear", "warmup_steps": 3, "total_steps": 3}, [1 / 3, 2 / 3, 1, 1, 0, 0, 0]),
    ],
)
def test_the_learning_rate_of_each_step(settings, expected):
    config = OptimizerConfig(lr=1.0, **settings)
    assert [lr_factor(config, step) for step in range(7)] == pytest.approx(expected)


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_decay_without_an_end_is_refused_at_the_start(warmup_steps):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="total_steps"):
        Schedule(OptimizerConfig(schedule="cosine", warmup_steps=warmup_steps), optimizer)


def test_a_schedule_resumes_where_it_stood():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    config = OptimizerConfig(lr=2.0, schedule="cosine", total_steps=10)
    schedule = Schedule(config, optimizer)
    for _ in range(3):
        schedule.step()
    rate = schedule.get_last_lr()
    other = Schedule(config, optimizer)
    assert other.get_last_lr() == [2.0]
    other.load_state_dict(schedule.state_dict())
    assert other.get_last_lr() == rate


def test_every_trainable_parameter_is_optimised_once_and_vectors_do_not_decay():
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    module[2].weight.requires_grad_(False)
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.1), dict(module.named_parameters()))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(decay) == 5
    assert decay[id(module[0].weight)] == 0.1
    assert {decay[id(p)] for p in (module[0].bias, module[1].weight, module[1].bias, module[2].bias)} == {0.0}


def clipped(path: str, stage: int, max_norm: float) -> dict:
    engine = make_engine(path, zero_stage=stage, optimizer={"lr": 1.0, "max_grad_norm": max_norm})
    before = full_weights(engine)
    mine = SEQUENCES[:4] if engine.rank == 0 else SEQUENCES[4:]
    engine.forward_backward([pack(mine)], cross_entropy)
    norm = math.sqrt(sum(g.double().square().sum().item() for g in full_gradients(engine).values()))
    reported = engine.optim_step()["grad_norm"]
    after = full_weights(engine)
    moved = math.sqrt(sum((after[n] - before[n]).double().square().sum().item() for n in before))
    return {"norm": norm, "reported": reported, "moved": moved}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_norm_is_that_of_the_whole_gradient_and_clips_it(pool2, tmp_path, stage):
    save_tiny(tmp_path, "llama", vocab_size=97)
    for max_norm in (0.5, 1e6):
        first, second = pool2.run(clipped, str(tmp_path), stage, max_norm)
        assert first == second
        assert first["reported"] == pytest.approx(first["norm"], rel=1e-6)
        assert first["norm"] > 1.0
        assert first["moved"] == pytest.approx(min(max_norm, first["norm"]), rel=1e-4)


def adamw_error(path: str, stage: int) -> float:
    """Three AdamW steps with decay, warm-up and clipping, against torch on the plain module."""
    # The module's own attention, and an eps above the rounding of gradients: AdamW makes steps of equal size from those that
    # another order of sums changes
    settings = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5, "eps": 1e-5}
    engine = make_engine(path, zero_stage=stage, optimizer=settings, attn_implementation="sdpa")
    hf = hf_module(path)
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in hf.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in hf.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        eps=1e-5,
    )
    for step in range(3):
        mine = SEQUENCES[:1] if engine.rank == 0 else SEQUENCES[1:]
        engine.forward_backward([pack(mine)], cross_entropy)
        engine.optim_step()
        loss = torch.zeros(())
        for sequence in SEQUENCES:
            ids = torch.tensor([sequence])
            logits = hf(ids).logits[0, :-1, :79]
            loss = loss + nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        (loss / sum(len(s) - 1 for s in SEQUENCES)).backward()
        nn.utils.clip_grad_norm_(hf.parameters(), 0.5)
        for group in plain.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 2)
        plain.step()
        plain.zero_grad()
    expected = dict(hf.named_parameters())
    return max((w - expected[n]).abs().max().item() for n, w in full_weights(engine).items())


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_adamw_on_shards_is_adamw(pool2, tmp_path, stage):
    save_tiny(tmp_path, "llama", vocab_size=97)
    assert max(pool2.run(adamw_error, str(tmp_path), stage)) < 1e-5
