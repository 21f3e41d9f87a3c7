"""Stages, off-load and accumulation of the training engine against plain SGD in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from training_cases import config, micro_batches, open_engine, plain_sgd, train, weights_of, worst

from hybrid.sharding import gathered

CPU = {"device": "cpu"}


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
    with pytest.raises(AssertionError, match=r"zero_hpz_partition_size=4; allowed: 1, or a part of the 4 ranks .*: \[2\]"):
        pool4.run(shard_sizes, config(ranks=4, zero_optimization={"stage": 3, "zero_hpz_partition_size": 4}))


def test_one_process_needs_no_launcher():
    engine = open_engine(config(ranks=1))
    train(engine, micro_batches(2, 1))
    assert worst(weights_of(engine), plain_sgd(micro_batches(2, 1))) < 1e-5
    assert torch.equal(engine(micro_batches(1, 1)[0][0][0]), engine.module(micro_batches(1, 1)[0][0][0]))
