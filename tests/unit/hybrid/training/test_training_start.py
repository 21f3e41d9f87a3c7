"""What initialize takes: optimizers, schedulers, parameters, data; and what the loop's verbs do with unusual calls."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
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

import hybrid
from hybrid import initialize
from hybrid.sharding import gathered


def without_optimizer(**keys: Any) -> dict[str, Any]:
    settings = config(**keys)
    del settings["optimizer"]
    return settings


# -- optimizers, schedulers and parameters of the caller's


def own_optimizer(kind: str, offload: bool) -> dict:
    net = make_net()
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.01},
    ]
    settings = without_optimizer(zero_optimization=zero)
    if kind == "optimizer":
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        engine, given, _, given_scheduler = initialize(model=net, optimizer=optimizer, lr_scheduler=scheduler, config=settings)
        assert given is optimizer
        assert given_scheduler is scheduler
    else:
        engine, *_ = initialize(
            model=net,
            model_parameters=groups,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            config=settings,
        )
    train(engine, micro_batches(3, 1))
    return {"weights": weights_of(engine), "lr": engine.get_lr()}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", ["optimizer", "function"])
def test_an_optimizer_and_a_scheduler_of_the_callers(pool2, kind, offload):
    net = make_net()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.01},
    ]
    plain = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = LambdaLR(plain, lambda step: 1 / (1 + step))
    for ((x, y),) in micro_batches(3, 1):
        loss_of(net(x), y).backward()
        plain.step()
        scheduler.step()
        plain.zero_grad()
    for result in pool2.run(own_optimizer, kind, offload):
        assert worst(result["weights"], {n: p.detach() for n, p in net.named_parameters()}) < 1e-5
        assert result["lr"] == pytest.approx([0.1 / 4, 0.01 / 4])


def test_only_the_given_parameters_are_trained():
    net = make_net()
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    engine, *_ = initialize(model=net, model_parameters=(p for p in net.head.parameters()), config=config(ranks=1))
    train(engine, micro_batches(2, 1))
    changed = {n for n, w in weights_of(engine).items() if not torch.equal(w, before[n])}
    assert changed == {"head.weight", "head.bias"}


def stepped_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda net: {"model_parameters": make_net(1).parameters()}, r"shape \[16, 8\] is not the model's"),
        (lambda net: {"model_parameters": [{"params": list(net.parameters())}, {"params": [net.head.bias]}]}, "bias stands in"),
        (lambda net: {"model_parameters": net.named_parameters()}, r"holds a tuple; give parameters: model\.parameters\(\)"),
        (lambda net: {"optimizer": stepped_optimizer(net)}, "has stepped before initialize"),
        (lambda net: {"model": net.requires_grad_(False)}, "no parameter is trained"),
        (lambda net: {"model": net.to("meta")}, "door.weight is on the meta device"),
        (lambda net: {"model": nn.Sequential(nn.Embedding(4, 4, max_norm=1.0))}, "0 has max_norm"),
        (lambda net: {"model": nn.ReLU()}, "ReLU has no parameters"),
        (lambda net: {"model": "gpt2"}, "model is a str; allowed: a torch.nn.Module"),
        (lambda net: {"model": None}, "model is a NoneType"),
        (lambda net: {"mpu": object()}, "no model parallelism"),
        (lambda net: {"config": None}, "no config"),
        (lambda net: {"loss_scaler": object()}, "loss scaler object lacks scale"),
        (lambda net: {"training_data": iter([1])}, "allowed: a data set with __len__"),
        (lambda net: {"training_data": TensorDataset(torch.zeros(0, 1))}, "has 0 samples for 1 ranks"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_refused(arguments, message):
    net = make_net()
    with pytest.raises(ValueError, match=message):
        initialize(**({"model": net, "config": config(ranks=1)} | arguments(net)))


def test_a_refused_module_is_left_as_it_was():
    net = make_net()
    with pytest.raises(ValueError, match="matches no module"):
        initialize(model=net, config=config(ranks=1, module_precision=[{"match": "name:nothing"}]))
    assert all(type(p) is nn.Parameter for p in net.parameters())
    assert all(p.requires_grad for p in net.parameters())
    train(initialize(model=net, config=config(ranks=1))[0], micro_batches(1, 1))


def one_bad_rank(what: str) -> str:
    bad = torch.distributed.get_rank() == 1
    settings = config(**({"log_level": "loud"} if bad and what == "config" else {}))
    net = make_net()
    parameters = make_net().parameters() if bad and what == "parameters" else net.parameters()
    with pytest.raises(ValueError) as caught:
        initialize(model=net, model_parameters=parameters, config=settings)
    return str(caught.value)


@pytest.mark.parametrize("what", ["config", "parameters"])
def test_what_is_wrong_on_one_rank_is_said_on_all(pool2, what):
    first, second = pool2.run(one_bad_rank, what, timeout_s=30)
    assert first == second
    assert first.startswith("rank 1: ")


def clipped_by_hand() -> dict:
    """The caller changes gradients between backward and step, with and without a copy of them on its way to the host."""
    found = []
    for zero in ({}, {"offload_optimizer": {"device": "cpu"}}):
        engine = open_engine(config(zero_optimization=zero))
        ((x, y),) = micro_batches(1, 1)[0]
        engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
        for p in engine.module.parameters():
            p.grad.mul_(0.5)
        engine.step()
        found.append(weights_of(engine))
    return found


def test_gradients_that_the_caller_changes_are_the_ones_that_step(pool2):
    expected = plain_sgd(micro_batches(1, 1), lr=0.05)
    for on_device, off_loaded in pool2.run(clipped_by_hand):
        assert worst(on_device, expected) < 1e-5
        assert worst(off_loaded, expected) < 1e-5


def other_seeds() -> dict:
    net = make_net(seed=torch.distributed.get_rank())
    net.register_buffer("table", torch.full((2,), float(torch.distributed.get_rank())))
    engine = open_engine(config(), net)
    return {"weights": weights_of(engine), "table": engine.module.table.tolist()}


def test_all_ranks_train_rank_0s_weights(pool2):
    expected = {n: p.detach() for n, p in make_net(seed=0).named_parameters()}
    for result in pool2.run(other_seeds):
        assert all(torch.equal(result["weights"][n], w) for n, w in expected.items())
        assert result["table"] == [0.0, 0.0]


# -- engines without an optimizer, and two at once


def evaluating() -> dict:
    engine, optimizer, loader, scheduler = initialize(model=make_net(), config=without_optimizer(bf16={"enabled": True}))
    x = micro_batches(1, 1)[0][0][0]
    with pytest.raises(RuntimeError, match="step without an optimizer"):
        engine.step()
    return {
        "none": optimizer is loader is scheduler is None,
        "dtypes": {str(p.dtype) for p in engine.module.parameters()},
        "out": engine(x).float(),
        "left": gathered(engine.module),
        "lr": engine.get_lr(),
    }


def test_an_engine_without_an_optimizer_evaluates(pool2):
    expected = make_net()(micro_batches(1, 1)[0][0][0])
    for result in pool2.run(evaluating):
        assert result["none"]
        assert result["dtypes"] == {"torch.bfloat16"}  # nothing is trained, so there are no masters
        assert (result["out"] - expected).abs().max() < 3e-2
        assert result["left"] == []
        assert result["lr"] == []


def two_engines() -> dict:
    first, second = open_engine(config(accumulation=2)), open_engine(config(stage=1, bf16={"enabled": True}), make_net(seed=3))
    steps = micro_batches(3, 2)
    for step in steps:
        for x, y in step:
            one, two = first(share(first, x)), second(share(second, x))
            second.backward(loss_of(two, share(second, y)))
            first.backward(loss_of(one, share(first, y)))
            first.step()
            second.step()
    return {"first": weights_of(first), "dtype": str(two.dtype), "steps": (first.global_steps, second.global_steps)}


def test_two_engines_in_one_process_do_not_touch_each_other(pool2):
    for result in pool2.run(two_engines):
        assert worst(result["first"], plain_sgd(micro_batches(3, 2))) < 1e-5
        assert result["dtype"] == "torch.bfloat16"
        assert result["steps"] == (3, 6)


# -- whose boundary it is


def boundaries(how: str, zero: dict, counts: tuple[int, ...]) -> dict:
    """A step of as many micro-batches as each count says."""
    engine = open_engine(
        config(
            zero_optimization=zero,
            accumulation=1 if how == "set" else 3,
            managed_gradient_accumulation=how != "unmanaged",
        )
    )
    for count, step in zip(counts, micro_batches(len(counts), 3), strict=True):
        for i, (x, y) in enumerate(step[:count]):
            last = i == count - 1
            if how == "set":
                engine.set_gradient_accumulation_boundary(last)
            if how == "no_sync" and not last:
                with engine.no_sync():
                    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
                    engine.step()
                continue
            loss = loss_of(engine(share(engine, x)), share(engine, y))
            engine.backward(loss / count if how in ("set", "unmanaged") else loss)
            if how != "unmanaged" or last:
                engine.step()
    return {"weights": weights_of(engine), "steps": engine.global_steps}


OWNED = [
    {"stage": 0},
    *({"stage": stage, **offload} for stage in (1, 2, 3) for offload in ({}, {"offload_optimizer": {"device": "cpu"}})),
    {"stage": 3, "offload_param": {"device": "cpu"}},
]


@pytest.mark.parametrize(
    ("how", "zero"),
    [(how, zero) for how in ("set", "unmanaged") for zero in OWNED] + [("no_sync", zero) for zero in OWNED if zero["stage"] < 2],
    ids=str,
)
def test_the_caller_may_own_the_boundary(pool2, how, zero):
    counts = (3, 3) if how == "no_sync" else (3, 1, 2)
    steps = [step[:count] for count, step in zip(counts, micro_batches(len(counts), 3), strict=True)]
    for result in pool2.run(boundaries, how, zero, counts):
        assert result["steps"] == len(counts)
        assert worst(result["weights"], plain_sgd(steps)) < 1e-5


def late_boundary(stage: int) -> str:
    engine = open_engine(config(stage=stage))
    ((x, y),) = micro_batches(1, 1)[0]
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    engine.set_gradient_accumulation_boundary(True)
    with pytest.raises(ValueError) as caught:
        engine.step()
    engine.set_gradient_accumulation_boundary(None)
    train(engine, micro_batches(2, 1))
    assert worst(weights_of(engine), plain_sgd(micro_batches(2, 1))) < 1e-5  # nothing of it was left
    return str(caught.value)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_boundary_that_is_said_too_late_is_refused(pool2, stage):
    for message in pool2.run(late_boundary, stage):
        assert "say True before that backward" in message


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_backward_past_the_engine_is_refused(stage):
    engine = open_engine(config(ranks=1, stage=stage))
    ((x, y),) = micro_batches(1, 1)[0]
    loss_of(engine(x), y).backward()
    with pytest.raises(ValueError, match=r"use engine\.backward\(loss\) in place of loss\.backward\(\)"):
        engine.step()
    train(engine, micro_batches(1, 1))
    assert worst(weights_of(engine), plain_sgd(micro_batches(1, 1))) < 1e-5


def test_the_boundary_is_told_until_step_is_called():
    engine = open_engine(config(ranks=1, accumulation=2))
    seen = []
    for x, y in micro_batches(1, 2)[0]:
        before = engine.is_gradient_accumulation_boundary()
        engine.backward(loss_of(engine(x), y))
        seen.append((before, engine.is_gradient_accumulation_boundary()))
        engine.step()
    assert seen == [(False, False), (True, True)]


def test_two_backwards_before_a_step_are_one_micro_batch():
    engine = open_engine(config(ranks=1, accumulation=2))
    for x, y in micro_batches(1, 2)[0]:
        out = engine(x)
        engine.backward(0.25 * loss_of(out, y), retain_graph=True)
        engine.backward(0.75 * loss_of(out, y))
        engine.step()
    assert engine.global_steps == 1
    assert worst(weights_of(engine), plain_sgd(micro_batches(1, 2))) < 1e-5


def test_a_schedule_that_needs_a_metric_gets_it_or_nothing_moves():
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    engine, *_ = initialize(model=net, optimizer=optimizer, lr_scheduler=plateau, config=without_optimizer(ranks=1))
    before = weights_of(engine)
    ((x, y),) = micro_batches(1, 1)[0]
    engine.backward(loss_of(engine(x), y))
    with pytest.raises(ValueError, match=r"engine\.step\(lr_kwargs="):
        engine.step()
    assert worst(weights_of(engine), before) == 0
    for metric in (1.0, 2.0, 3.0):
        engine.backward(loss_of(engine(x), y))
        engine.step(lr_kwargs={"metrics": metric})
    assert engine.get_lr() == [0.025]


def evaluate_first(stage: int) -> float:
    engine = open_engine(config(stage=stage))
    with torch.inference_mode():
        engine(micro_batches(1, 1)[0][0][0])
    train(engine, micro_batches(1, 1))
    return worst(weights_of(engine), plain_sgd(micro_batches(1, 1)))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_inference_mode_before_training(pool2, stage):
    assert max(pool2.run(evaluate_first, stage)) < 1e-5


def odd_layouts() -> dict:
    net = make_net(seed=torch.distributed.get_rank())
    rank = float(torch.distributed.get_rank())
    net.door.weight = nn.Parameter(net.door.weight.detach().t().contiguous().t())
    net.register_buffer("sliced", (torch.arange(8.0) + rank).view(2, 4)[:, ::2])
    net.register_buffer("expanded", (torch.arange(4.0)[:, None] + rank).expand(4, 3))
    net.register_buffer("short", torch.tensor([1, 2], dtype=torch.int16) + int(rank))
    engine = open_engine(config(), net)
    module = engine.module
    return {
        "buffers": [module.sliced.tolist(), module.expanded.tolist(), module.short.tolist()],
        "weights": weights_of(engine),
    }


def test_parameters_and_buffers_of_any_layout_are_rank_0s(pool2):
    for result in pool2.run(odd_layouts):
        assert result["buffers"] == [[[0, 2], [4, 6]], [[i] * 3 for i in range(4)], [1, 2]]
        assert all(torch.equal(result["weights"][n], p) for n, p in make_net(seed=0).named_parameters())


def test_the_optimizer_steps_inside_the_engine_alone():
    engine = open_engine(config(ranks=1, accumulation=2))
    steps = micro_batches(1, 2)
    for x, y in steps[0]:
        engine.optimizer.zero_grad()  # as loops do, also in mid-accumulation
        engine.backward(loss_of(engine(x), y))
        with pytest.raises(RuntimeError, match=r"use engine\.step\(\)"):
            engine.optimizer.step()
        engine.step()
    assert worst(weights_of(engine), plain_sgd(steps)) < 1e-5


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop])
def test_an_optimizer_of_whole_tensors_is_refused(kind):
    net = make_net()
    with pytest.raises(ValueError, match="its step does not work on shards"):
        initialize(model=net, optimizer=kind(net.parameters()), config=without_optimizer(ranks=1))


def test_what_was_given_overrules_the_config_and_says_so():
    net = make_net()
    engine, *_ = initialize(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), config=config(ranks=1))
    said = {effect.key: effect.text for effect in engine.effects}
    assert said["optimizer.type"] == "no effect: initialize was given an optimizer"


def test_names_that_are_elsewhere_are_told():
    with pytest.raises(AttributeError, match="'ops': optimizers are named in the config"):
        hybrid.ops  # noqa: B018
    code = "import hybrid; hybrid.init_distributed('nccl')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if not torch.cuda.is_available():
        assert "dist_backend=nccl, but torch finds no CUDA device" in done.stderr


def test_a_module_is_given_once():
    net = make_net()
    open_engine(config(ranks=1), net)
    with pytest.raises(ValueError, match="is sharded already"):
        open_engine(config(ranks=1), net)


def test_no_sync_is_refused_where_every_gradient_is_reduced_at_once():
    with pytest.raises(RuntimeError, match="stage 2 or 3"), open_engine(config(ranks=1)).no_sync():
        pass


def test_a_loss_without_the_division():
    engine = open_engine(config(ranks=1, accumulation=2))
    ((first, second),) = micro_batches(1, 2)
    for x, y in (first, second):
        engine.backward(loss_of(engine(x), y) / 2, scale_wrt_gas=False)
        engine.step()
    assert worst(weights_of(engine), plain_sgd(micro_batches(1, 2))) < 1e-5


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda out: out, r"shape \[8, 4\]; reduce it"),
        (lambda out: out.sum().item(), "a float"),
        (lambda out: {"loss": out.sum()}, r"a dict \(its loss\?\)"),
        (lambda out: out.sum().detach(), "without a graph"),
        (lambda out: None, "a NoneType"),
    ],
)
def test_backward_takes_one_number_with_a_graph(loss, message):
    engine = open_engine(config(ranks=1))
    out = engine(micro_batches(1, 1)[0][0][0])
    with pytest.raises(ValueError, match=message):
        engine.backward(loss(out))
    assert engine.micro_steps == 0


# -- after an exception


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.fails = make_net(), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        if self.fails:
            raise ArithmeticError("no")
        return x


def recovers(stage: int) -> dict:
    engine = open_engine(config(stage=stage, accumulation=2), Fragile())
    (first, second), *rest = micro_batches(3, 2)
    engine.backward(loss_of(engine(share(engine, first[0])), share(engine, first[1])))
    engine.module.fails = True
    with pytest.raises(ArithmeticError):
        engine(share(engine, second[0]))
    engine.module.fails = False
    left = (gathered(engine.module), [n for n, p in engine.module.named_parameters() if p.grad is not None])
    train(engine, rest)
    return {"left": left, "weights": {n.removeprefix("net."): w for n, w in weights_of(engine).items()}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_after_an_exception_training_goes_on(pool2, stage):
    for result in pool2.run(recovers, stage):
        assert result["left"] == ([], [])
        assert worst(result["weights"], plain_sgd(micro_batches(3, 2)[1:])) < 1e-5


def forgotten(stage: int) -> dict:
    """A step's first half is dropped."""
    engine = open_engine(config(stage=stage, accumulation=2))
    (first, _), *rest = micro_batches(3, 2)
    engine.backward(loss_of(engine(share(engine, first[0])), share(engine, first[1])))
    engine.discard_gradients()
    train(engine, rest)
    return weights_of(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_discarding_forgets_gradients_that_wait_for_their_reduction(pool2, stage):
    for weights in pool2.run(forgotten, stage):
        assert worst(weights, plain_sgd(micro_batches(3, 2)[1:])) < 1e-5


# -- the loader


def epochs(drop_last: bool) -> dict:
    data = TensorDataset(torch.arange(21))
    _, _, loader, _ = initialize(
        model=make_net(), training_data=data, config=config(dataloader_drop_last=drop_last, train_micro_batch_size_per_gpu=4)
    )
    return {"epochs": [[batch[0].tolist() for batch in loader] for _ in range(2)], "length": len(loader)}


def test_each_rank_gets_its_share_in_a_new_order_each_epoch(pool2):
    one, two = pool2.run(epochs, False)
    for epoch in range(2):
        seen = [i for batch in one["epochs"][epoch] + two["epochs"][epoch] for i in batch]
        assert len(seen) == 22  # one is filled up, so that ranks have as many
        assert set(seen) == set(range(21))
    assert one["epochs"][0] != one["epochs"][1]
    assert one["length"] == len(one["epochs"][0]) == 3
    dropped = pool2.run(epochs, True)[0]
    assert [len(batch) for batch in dropped["epochs"][0]] == [4, 4]


def test_the_callers_collate_function_is_used():
    data = TensorDataset(torch.arange(8))
    _, _, loader, _ = initialize(model=make_net(), training_data=data, collate_fn=len, config=config(ranks=1))
    assert next(iter(loader)) == 8


# -- names that scripts use


def communicate() -> dict[str, Any]:
    """Every public function of hybrid.comm, on numbers that tell the ranks apart; what is left out of the result was asserted."""
    hybrid.init_distributed("gloo")  # there is a group already, which stays
    dist, found = hybrid.comm, {}
    rank = dist.get_rank()
    own, both = dist.new_group([rank]), dist.new_group([0, 1])  # every rank makes all groups
    called = Counter({"init_distributed": 1, "new_group": 2, "get_rank": 1})

    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        called[name] += 1
        return getattr(dist, name)(*args, **kwargs)

    def of(*values: float) -> Tensor:
        return torch.tensor(values)

    for how, options in {"": {}, "group ": {"group": both}, "async ": {"async_op": True}}.items():

        def run(name: str, out: Any, *args: Any, how: str = how, options: dict = options, **kwargs: Any) -> None:
            work = call(name, out, *args, **kwargs, **options)
            assert isinstance(work, torch.distributed.Work) if how == "async " else work is None
            if work is not None:
                work.wait()
            found[f"{how}{name}"] = [t.tolist() for t in out] if isinstance(out, list) else out.tolist()

        run("all_reduce", of(rank + 1.0, 5.0))
        run("broadcast", of(7.0 + rank), 1)
        run("all_gather", [torch.zeros(2), torch.zeros(2)], of(rank, 10.0 + rank))
        run("all_gather_into_tensor", torch.zeros(4), of(rank, 10.0 + rank))
        run("reduce_scatter_tensor", torch.zeros(2), of(1.0, 2.0, 3.0, 4.0) * (rank + 1))
    for name, op in {"MAX": dist.ReduceOp.MAX, "MIN": dist.ReduceOp.MIN, "PRODUCT": dist.ReduceOp.PRODUCT}.items():
        call("all_reduce", value := of(rank + 2.0), op)
        call("reduce_scatter_tensor", part := torch.zeros(1), of(rank + 2.0, rank + 4.0), op=op)
        found[name] = [value.item(), part.item()]
    call("all_reduce", alone := of(rank + 1.0), group=own)  # a group of one adds nothing
    call("barrier")
    call("barrier", own)
    found |= {
        "alone": alone.item(),
        "ranks": [call("get_rank"), call("get_rank", own), call("get_local_rank"), call("get_global_rank", own, 0)],
        "sizes": [call("get_world_size"), call("get_world_size", own)],
        "before": call("is_initialized"),
    }
    call("destroy_process_group", own)
    found |= {"after": call("is_initialized"), "missing": sorted({*dist.__all__} - {*called} - {"ProcessGroup", "ReduceOp"})}
    return found


COLLECTIVES = {  # by rank
    "all_reduce": [[3.0, 10.0]] * 2,
    "broadcast": [[8.0]] * 2,
    "all_gather": [[[0.0, 10.0], [1.0, 11.0]]] * 2,
    "all_gather_into_tensor": [[0.0, 10.0, 1.0, 11.0]] * 2,
    "reduce_scatter_tensor": [[3.0, 6.0], [9.0, 12.0]],
}


def test_collectives_under_deepspeeds_names(pool2):
    for rank, found in enumerate(pool2.run(communicate)):
        expected = {f"{how}{name}": by_rank[rank] for how in ("", "group ", "async ") for name, by_rank in COLLECTIVES.items()}
        assert found == expected | {
            "MAX": [3.0, [3.0, 5.0][rank]],
            "MIN": [2.0, [2.0, 4.0][rank]],
            "PRODUCT": [6.0, [6.0, 20.0][rank]],
            "alone": rank + 1.0,
            "ranks": [rank, 0, rank, rank],
            "sizes": [2, 1],
            "before": True,
            "after": True,  # one group less, not none
            "missing": [],
        }


def test_what_torch_distributed_has_beside_is_passed_on():
    assert hybrid.comm.all_to_all_single is torch.distributed.all_to_all_single
    assert hybrid.comm.group.WORLD is torch.distributed.group.WORLD
    for name, remedy in (("log_summary", r"use engine\.comms_logger"), ("nonsense", "'nonsense'$")):
        with pytest.raises(AttributeError, match=remedy):
            getattr(hybrid.comm, name)


@pytest.mark.parametrize("before", [True, False])
def test_a_scripts_own_local_rank_stands_beside_the_engines_arguments(before):
    parser = argparse.ArgumentParser()
    if before:
        parser.add_argument("--local_rank", type=int, default=-1)
    hybrid.add_config_arguments(parser)
    if not before:
        parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--local_rank", "1", "--deepspeed", "--deepspeed_config", "c.json"])
    assert (args.local_rank, args.deepspeed, args.deepspeed_config) == (1, True, "c.json")
