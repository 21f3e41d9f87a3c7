"""Checkpoints of the training engine: what is loaded at any rank count, stage and off-load is what was saved, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import (
    CLASSES,
    WIDTH,
    Net,
    config,
    loss_of,
    micro_batches,
    open_engine,
    train,
    weights_of,
    whole,
)

from hybrid.optim import state as optim_state
from hybrid.training import engine_state

CPU = {"device": "cpu"}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
WARMUP = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": 1e-2}}


class Odd(Net):
    """With what is not sharded: a parameter without a dimension, one without elements, a tied one; a frozen one; buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.again = nn.Linear(2 * WIDTH, CLASSES)
        self.again.weight = self.head.weight
        self.still = nn.Linear(CLASSES, CLASSES)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            self.seen += 1
            self.mean += 0.25
        return (out + self.still(out)) * self.gain + self.nothing.sum()


def odd(seed: int) -> Odd:
    torch.manual_seed(seed)
    net = Odd()
    for parameter in net.still.parameters():
        parameter.requires_grad_(False)
    return net


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """One by one: the fused kernel takes no mix of sharded and unsharded parameters."""
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def settings(zero: dict[str, Any], ranks: int = 2, accumulation: int = 1, **keys: Any) -> dict[str, Any]:
    keys = {"optimizer": ADAMW, "scheduler": WARMUP, **keys}
    return config(zero_optimization=zero, ranks=ranks, accumulation=accumulation, **keys)


def everything(engine: Any) -> dict[str, list[Any]]:
    """All tensors whole, as lists: they cross process borders."""
    tensors = engine_state.named_tensors(engine)
    state = optim_state.tensors(engine.optimizer, tensors)
    return {name: [str(t.dtype), whole(t).tolist()] for name, t in (tensors | state).items()}


@torch.no_grad()
def loss_of_all(engine: Any) -> float:
    """Of the next step's samples, all of them on every rank: no order of summing comes in."""
    ((x, y),) = micro_batches(5, 1)[3]
    engine.eval()
    loss = loss_of(engine(x), y).item()
    engine.train()
    return loss


def counters(engine: Any) -> tuple[int, ...]:
    return engine.global_steps, engine.global_samples, engine.micro_steps, engine.skipped_steps


def saved_then_trained(path: str, zero: dict[str, Any], ranks: int = 2) -> dict[str, Any]:
    engine = open_engine(settings(zero, ranks), odd(0), optimizer=adamw)
    steps = micro_batches(5, 1)
    train(engine, steps[:3])
    assert engine.save_checkpoint(path, client_state={"epoch": 2, "best": float("inf"), "seen": (1, 2)})
    held, count, lr = everything(engine), counters(engine), engine.get_lr()
    next_loss = loss_of_all(engine)
    train(engine, steps[3:])
    return {"held": held, "counters": count, "lr": lr, "next": next_loss, "after": everything(engine)}


def loaded_then_trained(path: str, zero: dict[str, Any], ranks: int = 2, accumulation: int = 1) -> dict[str, Any]:
    engine = open_engine(settings(zero, ranks, accumulation), odd(1), optimizer=adamw)
    folder, client = engine.load_checkpoint(path)
    held, count, lr = everything(engine), counters(engine), engine.get_lr()
    assert folder == str(Path(path) / "global_step3")
    weights = {n: [str(t.dtype), t.tolist()] for n, t in weights_of(engine).items()}
    assert all(held[name] == value for name, value in weights.items())  # what computes is what was loaded
    next_loss = loss_of_all(engine)
    train(engine, [step * accumulation for step in micro_batches(5, 1)[3:]])
    return {"held": held, "counters": count, "lr": lr, "next": next_loss, "after": everything(engine), "client": client}


def on(request: pytest.FixtureRequest, ranks: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if ranks == 1 else request.getfixturevalue(f"pool{ranks}").run(function, *args)


def tensors_of(held: dict[str, list[Any]]) -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, (_, value) in held.items()}


def distance(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> float:
    """Largest difference of any value."""
    one, other = tensors_of(a), tensors_of(b)
    assert one.keys() == other.keys()
    return max(float((one[n].double() - other[n].double()).abs().max()) for n in one if one[n].numel())


LAYOUTS = [
    {"stage": 1},
    {"stage": 1, "offload_optimizer": CPU},
    {"stage": 3},
    {"stage": 3, "offload_optimizer": CPU},
    {"stage": 3, "offload_param": CPU},
]


@pytest.mark.parametrize("zero", LAYOUTS, ids=str)
def test_two_ranks_save_and_one_two_and_four_load_every_bit(request, tmp_path, zero):
    first = request.getfixturevalue("pool2").run(saved_then_trained, str(tmp_path), zero)
    for ranks in (1, 2, 4):
        for result in on(request, ranks, loaded_then_trained, str(tmp_path), zero, ranks):
            assert result["held"] == first[0]["held"]
            assert (result["lr"], result["next"]) == (first[0]["lr"], first[0]["next"])
            assert result["counters"] == first[0]["counters"] == (3, 24, 3, 0)
            assert result["client"] == {"epoch": 2, "best": float("inf"), "seen": (1, 2)}
            if ranks == 2:
                assert result["after"] == first[0]["after"]
            assert distance(result["after"], first[0]["after"]) < 1e-6
    held = first[0]["held"]
    assert held["exp_avg.gain"][1] != 0
    assert held["exp_avg_sq.door.weight"][0] == "torch.float32"
    assert held["seen"] == ["torch.int64", 3]
    assert held["nothing"] == ["torch.float32", []]
    assert not {"again.weight", "scratch"} & held.keys()


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        ({"stage": 3}, {"stage": 0}),
        ({"stage": 0}, {"stage": 3, "offload_optimizer": CPU}),
        ({"stage": 3, "offload_param": CPU}, {"stage": 1}),
    ],
    ids=str,
)
def test_another_stage_or_place_loads_every_bit(pool2, tmp_path, saving, loading):
    first = pool2.run(saved_then_trained, str(tmp_path), saving)[0]
    for result in pool2.run(loaded_then_trained, str(tmp_path), loading):
        assert result["held"] == first["held"]
        assert distance(result["after"], first["after"]) < 1e-6


def test_another_accumulation_starts_a_step_where_it_loads(pool2, tmp_path):
    first = pool2.run(saved_then_trained, str(tmp_path), {"stage": 3})[0]
    for result in pool2.run(loaded_then_trained, str(tmp_path), {"stage": 3}, 2, 2):
        assert result["counters"] == (3, 24, 3, 0)
        for after in (result["after"], first["after"]):
            after.pop("seen", None), after.pop("mean", None)  # which count forwards
        assert distance(result["after"], first["after"]) < 1e-6  # twice the same micro-batch
