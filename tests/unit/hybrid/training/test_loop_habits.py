"""What loops written for other trainers do by habit: it is right, or it is told."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from training_cases import (
    config,
    loss_of,
    make_net,
    micro_batches,
    open_engine,
    plain_sgd,
    share,
    train,
    weights_of,
    worst,
)

from hybrid import TrainingEngine, initialize

# -- zero_grad before each backward


def zeroing(stage: int, who: str) -> dict[str, Tensor]:
    engine = open_engine(config(stage=stage, accumulation=2))
    zero = {"engine": engine, "module": engine.module, "part": engine.module.blocks, "optimizer": engine.optimizer}[who].zero_grad
    for step in micro_batches(2, 2):
        for x, y in step:
            zero()
            engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
            engine.step()
    assert engine.global_steps == 2
    return weights_of(engine)


@pytest.mark.parametrize("who", ["engine", "module", "part", "optimizer"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_before_each_backward_loses_no_gradient(pool2, stage, who):
    for weights in pool2.run(zeroing, stage, who):
        assert worst(weights, plain_sgd(micro_batches(2, 2))) < 1e-5


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def adversaries(stage: int, zero: str) -> dict[str, Tensor]:
    """The generator's loss goes through the discriminator, whose gradients of it are not wanted."""
    g, d = open_engine(config(stage=stage)), open_engine(config(stage=stage), make_net(3, Critic))
    for ((x, y),) in micro_batches(3, 1):
        fake = g(share(g, x))
        g.backward(d(fake).square().mean())
        g.step()
        if zero == "no":
            with pytest.raises(ValueError, match=r"engine\.backward did not make"):
                d.backward(d(fake.detach()).mean())
        else:
            {"engine": d, "module": d.module, "optimizer": d.optimizer}[zero].zero_grad()
        d.backward((d(fake.detach()) - d(share(d, y))).mean())
        d.step()
    return weights_of(d) | {f"g.{name}": weight for name, weight in weights_of(g).items()}


def plain_adversaries() -> dict[str, Tensor]:
    g, d = make_net(), make_net(3, Critic)
    for ((x, y),) in micro_batches(3, 1):
        fake = g(x)
        move(g, torch.autograd.grad(d(fake).square().mean(), list(g.parameters())))
        move(d, torch.autograd.grad((d(fake.detach()) - d(y)).mean(), list(d.parameters())))
    return {n: p.detach() for n, p in d.named_parameters()} | {f"g.{n}": p.detach() for n, p in g.named_parameters()}


@torch.no_grad()
def move(net: nn.Module, gradients: tuple[Tensor, ...]) -> None:
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter -= 0.1 * gradient


@pytest.mark.parametrize("zero", ["engine", "module", "optimizer", "no"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_that_another_engines_loss_has_left_are_dropped_or_refused(pool2, stage, zero):
    for weights in pool2.run(adversaries, stage, zero):
        assert worst(weights, plain_adversaries()) < 1e-5


# -- loss.backward()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_past_the_engine_is_refused_in_an_accumulation(stage):
    engine = open_engine(config(ranks=1, stage=stage, accumulation=2))
    ((x, y), _) = micro_batches(1, 2)[0]
    loss_of(engine(x), y).backward()
    with pytest.raises(ValueError, match=r"use engine\.backward\(loss\) in place of loss\.backward\(\)"):
        engine.step()
    train(engine, micro_batches(1, 2))
    assert worst(weights_of(engine), plain_sgd(micro_batches(1, 2))) < 1e-5


# -- validation in the middle


class Fussy(nn.Module):
    """Raises where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        out = self.net(x)
        if fail:
            raise RuntimeError("no such batch")
        return out


def failing_validation(stage: int) -> dict[str, Tensor]:
    engine = open_engine(config(stage=stage, accumulation=2), Fussy())
    for i, (x, y) in enumerate(micro_batches(1, 2)[0]):
        if i == 1:
            with torch.no_grad(), pytest.raises(RuntimeError, match="no such batch"):
                engine(share(engine, x), fail=True)
        engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
        engine.step()
    assert engine.global_steps == 1
    return weights_of(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_validation_that_fails_leaves_the_gradients_that_wait(pool2, stage):
    for weights in pool2.run(failing_validation, stage):
        assert worst(weights, plain_sgd(micro_batches(1, 2), module=Fussy())) < 1e-5


def trained_in_eval(stage: int) -> dict[str, Tensor]:
    engine = open_engine(config(stage=stage, accumulation=2))
    engine.eval()
    train(engine, micro_batches(2, 2))
    return weights_of(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_module_in_eval_mode_trains(pool2, stage):
    for weights in pool2.run(trained_in_eval, stage):
        assert worst(weights, plain_sgd(micro_batches(2, 2))) < 1e-5


# -- schedules that need a metric


def plateau(metrics: list[float | None], refused: int) -> TrainingEngine:
    """Steps with these metrics, of which one is refused."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    settings = {key: value for key, value in config().items() if key != "optimizer"}
    engine, *_ = initialize(model=net, optimizer=optimizer, lr_scheduler=schedule, config=settings)
    for i, (((x, y),), metric) in enumerate(zip(micro_batches(len(metrics), 1), metrics, strict=True)):
        engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
        with pytest.raises(ValueError, match="lr_kwargs") if i == refused else nullcontext():
            engine.step(None if metric is None else {"metrics": metric})
    return engine


def a_refused_step() -> dict[str, Tensor]:
    return weights_of(plateau([None, 1.0], refused=0))


def test_a_step_that_is_refused_leaves_nothing_to_the_next(pool2):
    for weights in pool2.run(a_refused_step):
        assert worst(weights, plain_sgd(micro_batches(2, 1)[1:])) < 1e-5


def own_metrics() -> tuple[list[float], int]:
    engine = plateau([1.0, 2.0 + torch.distributed.get_rank(), 3.0], refused=1)
    return engine.get_lr(), engine.global_steps


def test_a_metric_that_differs_by_rank_is_refused_on_all(pool2):
    assert pool2.run(own_metrics) == [([0.05], 2)] * 2


def epochs_of_rank_1() -> list[str]:
    """An argument that the schedule could do without, on one rank."""
    engine = open_engine(config(), lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5))
    said = []
    for mine in (None, {"epoch": 1}, {"nonsense": 1}):
        ((x, y),) = micro_batches(1, 1)[0]
        engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
        with pytest.raises(ValueError) if mine else nullcontext() as caught:
            engine.step(mine if engine.global_rank == 1 else None)
        said.append(str(caught.value) if mine else "")
    return [*said, f"{engine.get_lr()} after {engine.global_steps}"]


def test_arguments_of_a_schedule_that_only_one_rank_gives_are_refused_on_all(pool2):
    for _, of_epoch, of_nonsense, state in pool2.run(epochs_of_rank_1):
        assert of_epoch.startswith("ranks give step different lr_kwargs")
        assert of_nonsense.startswith("ranks give step different lr_kwargs")
        assert state == "[0.1] after 1"


# -- what leaves


@pytest.mark.parametrize("part", ["head", "blocks"])
def test_a_parts_state_dict_is_refused(tmp_path: Path, part):
    engine = open_engine(config(ranks=1))
    with pytest.raises(ValueError, match="module_state_dict"):
        torch.save(getattr(engine.module, part).state_dict(), tmp_path / "part.pt")
    with pytest.raises(ValueError, match="load_module_state_dict"):
        getattr(engine.module, part).load_state_dict({})


# -- weights that are changed while they are gathered


def changed_late(stage: int, when: str, who: str) -> dict[str, str]:
    """What the next step, or save, says of a change on one rank; afterwards training goes on as if nothing had been."""
    engine = open_engine(config(stage=stage, accumulation=2))
    kept = dict(engine.module.named_parameters())
    (first, second), *rest = micro_batches(2, 2)
    engine.train(when != "after a validation")  # which forgot no_grad
    out = engine(share(engine, first[0]))
    if when == "between backwards":
        engine.backward(loss_of(out, share(engine, first[1])))
        engine.step()
        engine(share(engine, second[0]))
    if engine.global_rank == 1:
        held = kept if who == "shard" else dict(engine.module.named_parameters())
        held["door.weight"].data.add_(0.25)
    said = {}
    if when == "after a validation":
        engine.train()
        with torch.no_grad():
            engine(share(engine, first[0]))
    if when == "a dropped step":
        engine.backward(loss_of(engine(share(engine, first[0])), share(engine, first[1])))
        engine.discard_gradients()
    if when == "save":
        with pytest.raises(ValueError) as caught:
            engine.module_state_dict()
    else:
        x, y = second if when == "between backwards" else first
        for _ in range(1 if when == "between backwards" else 2):
            engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
            with pytest.raises(ValueError) if engine.is_gradient_accumulation_boundary() else nullcontext() as caught:
                engine.step()
    said["error"] = str(caught.value)
    if who == "gathered":
        train(engine, rest)
        said["after"] = str(worst(weights_of(engine), plain_sgd(rest)) < 1e-5)
    return said


@pytest.mark.parametrize("who", ["gathered", "shard"])
@pytest.mark.parametrize("when", ["after a forward", "after a validation", "a dropped step", "between backwards", "save"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_change_of_what_is_gathered_is_refused_not_lost(pool2, stage, when, who):
    for said in pool2.run(changed_late, stage, when, who):
        assert said.pop("error").startswith("door.weight changed while gathered by a forward")
        assert said in ({}, {"after": "True"})


def loaded_over() -> dict[str, Tensor]:
    engine = open_engine(config(stage=1))
    engine(share(engine, micro_batches(1, 1)[0][0][0]))
    engine.module.door.weight.data.add_(0.25)
    with torch.no_grad():
        engine(share(engine, micro_batches(1, 1)[0][0][0]))
    engine.load_module_state_dict(make_net().state_dict())
    train(engine, micro_batches(1, 1))
    return weights_of(engine)


def test_a_lost_change_is_forgotten_with_the_weights_that_it_was_of(pool2):
    for weights in pool2.run(loaded_over):
        assert worst(weights, plain_sgd(micro_batches(1, 1))) < 1e-5
