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


def changed_after_validation(stage: int, offload: bool) -> float:
    """A validation that forgot no_grad, and then other weights, as a swap with an average makes."""
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = open_engine(config(stage=stage, zero_optimization=zero))
    engine.eval()
    x = share(engine, micro_batches(1, 1)[0][0][0])
    engine(x)
    for parameter in engine.module.parameters():
        parameter.data.zero_()
    with torch.no_grad():
        first, second = engine(x), engine(x)
    left = [first, second, *weights_of(engine).values(), *engine.module_state_dict().values()]
    return max(float(tensor.abs().max()) for tensor in left)


@pytest.mark.parametrize(("stage", "offload"), [(0, False), (1, False), (1, True), (2, False), (3, False), (3, True)])
def test_weights_changed_after_a_validation_that_kept_a_graph_stay_changed(pool2, stage, offload):
    assert pool2.run(changed_after_validation, stage, offload) == [0.0, 0.0]


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
    out = engine(share(engine, first[0]))
    if when == "between backwards":
        engine.backward(loss_of(out, share(engine, first[1])))
        engine.step()
        engine(share(engine, second[0]))
    if engine.global_rank == 1:
        held = kept if who == "shard" else dict(engine.module.named_parameters())
        held["door.weight"].data.add_(0.25)
    said = {}
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
@pytest.mark.parametrize("when", ["after a forward", "between backwards", "save"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_change_of_what_is_gathered_is_refused_not_lost(pool2, stage, when, who):
    for said in pool2.run(changed_late, stage, when, who):
        assert said.pop("error").startswith("door.weight changed while gathered by a forward")
        assert said in ({}, {"after": "True"})
