"""Stages, off-load and accumulation of the training engine against plain SGD in one process."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import collectives
from torch.distributed.tensor import DTensor
from training_cases import (
    config,
    loss_of,
    micro_batches,
    open_engine,
    plain_sgd,
    share,
    train,
    weights_of,
    whole,
    worst,
)

from hybrid.optim import state as optim_state
from hybrid.sharding import gathered, local
from hybrid.training import engine_state

CPU = {"device": "cpu"}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-5}


def trained(settings: dict, steps: int, accumulation: int) -> dict:
    engine = open_engine(settings)
    train(engine, micro_batches(steps, accumulation))
    return {
        "weights": weights_of(engine),
        "gathered": gathered(engine.module),
        "steps": engine.global_steps,
        "micro": engine.micro_steps,
        "norm": engine.get_global_grad_norm(),
        "gradients": [n for n, p in engine.module.named_parameters() if p.grad is not None],
    }


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 1, "offload_optimizer": CPU},
        {"stage": 2},
        {"stage": 2, "offload_optimizer": CPU},
        {"stage": 3},
        {"stage": 3, "offload_optimizer": CPU},
        {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    ],
    ids=str,
)
def test_every_stage_trains_as_one_process_does(pool2, zero, accumulation):
    results = pool2.run(
        trained, config(accumulation=accumulation, zero_optimization=zero, gradient_clipping=0.5), 3, accumulation
    )
    expected = plain_sgd(micro_batches(3, accumulation), max_norm=0.5)
    for result in results:
        assert worst(result["weights"], expected) < 1e-5
        assert result["gathered"] == []
        assert result["gradients"] == []
        assert (result["steps"], result["micro"]) == (3, 3 * accumulation)
        assert result["norm"] == results[0]["norm"] > 0.5


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0},
        {"stage": 1, "mics_shard_size": 2},
        {"stage": 3},
        {"stage": 3, "mics_shard_size": 2},
        {"stage": 3, "zero_hpz_partition_size": 2},
    ],
    ids=str,
)
def test_four_ranks_in_every_layout_train_as_one_process_does(pool4, zero):
    results = pool4.run(trained, config(ranks=4, accumulation=2, zero_optimization=zero), 3, 2)
    expected = plain_sgd(micro_batches(3, 2))
    for result in results:
        assert worst(result["weights"], expected) < 1e-5


def shard_sizes(settings: dict) -> dict:
    engine = open_engine(settings)
    shards = {n: tuple(p.to_local().shape) for n, p in engine.module.named_parameters() if isinstance(p, DTensor)}
    return {"weight": shards["blocks.0.up.weight"], "bias": shards["head.bias"]}


@pytest.mark.parametrize(
    ("zero", "rows"),
    [({"stage": 0}, 16), ({"stage": 1}, 4), ({"stage": 3}, 4), ({"stage": 3, "mics_shard_size": 2}, 8)],
    ids=str,
)
def test_a_rank_holds_its_share(pool4, zero, rows):
    for sizes in pool4.run(shard_sizes, config(ranks=4, zero_optimization=zero)):
        assert sizes["weight"] == (rows, 16)


def test_shards_that_do_not_divide_the_ranks_are_refused(pool4):
    message = r"3 ranks are to hold one copy of the weights, of 4; allowed: \[1, 2, 4\]"
    with pytest.raises(AssertionError, match=message):
        pool4.run(shard_sizes, config(ranks=4, zero_optimization={"stage": 3, "mics_shard_size": 3}))


def test_a_part_of_the_ranks_that_is_none_is_refused(pool4):
    with pytest.raises(AssertionError, match=r"zero_hpz_partition_size=4; allowed: 1, 2, as 4 ranks share a weight"):
        pool4.run(shard_sizes, config(ranks=4, zero_optimization={"stage": 3, "zero_hpz_partition_size": 4}))


def test_one_process_needs_no_launcher():
    engine = open_engine(config(ranks=1))
    train(engine, micro_batches(2, 1))
    assert worst(weights_of(engine), plain_sgd(micro_batches(2, 1))) < 1e-5
    assert torch.equal(engine(micro_batches(1, 1)[0][0][0]), engine.module(micro_batches(1, 1)[0][0][0]))


# -- off-load, to the bit


def moments(groups: list) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, eps=1e-5)


def off_loaded(zero: dict, own: bool) -> dict:
    """AdamW, clipped, three micro-batches a step: weights and state, and whether the step is on tensors of its own."""
    settings = config(accumulation=3, zero_optimization=zero, gradient_clipping=0.1, optimizer={"type": "AdamW", "params": ADAMW})
    engine = open_engine(settings, **({"optimizer": moments} if own else {}))
    train(engine, micro_batches(4, 3))
    state = optim_state.tensors(engine.optimizer, engine_state.named_tensors(engine))
    stepped = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    shards = {local(p).data_ptr() for p in engine.module.parameters()}
    return {
        "weights": {name: tensor.tolist() for name, tensor in engine.module_state_dict().items()},
        "state": {name: whole(tensor).tolist() for name, tensor in state.items()},
        "apart": stepped.isdisjoint(map(id, engine.module.parameters())),
        "copied": all(local(p).data_ptr() not in shards for group in engine.optimizer.param_groups for p in group["params"]),
        "norm": engine.get_global_grad_norm(),
        "gathered": gathered(engine.module),
    }


@pytest.mark.parametrize("own", [False, True], ids=["the config's", "the caller's"])
@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "offload_optimizer": CPU},
        {"stage": 2, "offload_optimizer": CPU},
        {"stage": 3, "offload_optimizer": CPU},
        {"stage": 3, "offload_param": CPU},
        {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
    ],
    ids=str,
)
def test_off_load_changes_no_bit_of_weights_or_state(pool2, zero, own):
    plain = pool2.run(off_loaded, {"stage": zero["stage"]}, own)
    for result, expected in zip(pool2.run(off_loaded, zero, own), plain, strict=True):
        assert result["weights"] == expected["weights"]
        assert result["state"] == expected["state"]
        assert {name.split(".")[0] for name in result["state"]} >= {"exp_avg", "exp_avg_sq"}
        assert result["norm"] == expected["norm"] > 0.1  # the clipping is at work
        assert result["apart"] == result["copied"] == ("offload_param" not in zero)  # real copies, also in host memory
        assert not expected["apart"]


# -- what ranks hold and send


def held_between(zero: dict) -> dict:
    """Numbers of `blocks.0.up.weight` that this rank holds after a forward, and after its backward."""
    engine = open_engine(config(ranks=4, zero_optimization=zero))
    weight = lambda: local(engine.module.blocks[0].up.weight).numel()  # noqa: E731
    ((x, y),) = micro_batches(1, 1)[0]
    before = weight()
    loss = loss_of(engine(share(engine, x)), share(engine, y))
    between = weight()
    engine.backward(loss)
    return {"before": before, "between": between, "after": weight()}


@pytest.mark.parametrize(
    ("zero", "parts"),
    [
        ({"stage": 0}, (1, 1, 1)),
        ({"stage": 1}, (4, 1, 4)),
        ({"stage": 2}, (4, 1, 4)),
        ({"stage": 2, "mics_shard_size": 2}, (2, 1, 2)),
        ({"stage": 3}, (4, 4, 4)),
        ({"stage": 3, "mics_shard_size": 2}, (2, 2, 2)),
        ({"stage": 3, "zero_hpz_partition_size": 2}, (4, 2, 4)),
    ],
    ids=str,
)
def test_between_forward_and_backward_a_rank_holds_what_the_keys_say(pool4, zero, parts):
    """Of a layer's weight: all, a half or a quarter. hpz keeps a half for the backward, which gathers it from two ranks."""
    expected = dict(zip(("before", "between", "after"), (16 * 16 // n for n in parts), strict=True))
    assert pool4.run(held_between, zero) == [expected] * 4


def sent(zero: dict) -> list[dict]:
    """What each micro-batch of an engine's second step sends (of all-reduces only stage 0's are gradients)."""
    engine = open_engine(config(accumulation=2, zero_optimization=zero))
    first, second = micro_batches(2, 2)
    train(engine, [first])
    found = []
    for x, y in second:
        with collectives() as counts:
            engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
        engine.step()
        found.append({kind: n for kind, n in counts.items() if kind != "all_reduce" or zero["stage"] == 0})
    return found


GATHERS, SCATTERS = {"all_gather": 3}, {"reduce_scatter": 3}  # two layers, and the rest


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, [{}, {"all_reduce": 3}]),
        (1, [GATHERS, SCATTERS]),
        (2, [GATHERS | SCATTERS, SCATTERS]),
        (3, [{"all_gather": 5} | SCATTERS] * 2),
    ],
)
def test_each_stage_sends_what_it_must(pool2, stage, expected):
    """Stages 1 and 2 gather once a step, 0 and 1 add gradients over ranks once a step; 3 gathers layers for each backward too."""
    assert pool2.run(sent, {"stage": stage}) == [expected] * 2
