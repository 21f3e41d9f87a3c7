"""Weights and gradients that the caller changes: inside of GatheredParameters, by hand, and with state in host memory."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from tiny import tiny_model
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
    whole,
    worst,
)

import hybrid
from hybrid import TrainingEngine
from hybrid.optim.host import COPY
from hybrid.sharding import gathered, local
from hybrid.zero import GatheredParameters

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def stored(engine: TrainingEngine) -> dict[str, Tensor]:
    """What the optimizer steps on: the copies in host memory, where there are."""
    return {name: whole(p.__dict__.get(COPY, p)) for name, p in engine.module.named_parameters()}


def gathered_parameters(offload: bool) -> dict:
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = open_engine(config(zero_optimization=zero))
    weight = engine.module.blocks[0].up.weight
    before = whole(weight)
    with hybrid.zero.GatheredParameters(weight):
        inside = engine.module.blocks[0].up.weight
        seen = torch.equal(inside, before)
        inside.data.zero_()
    unchanged = torch.equal(whole(weight), before)
    with hybrid.zero.GatheredParameters([weight, engine.module.head.bias], modifier_rank=1):
        if engine.global_rank == 1:
            nn.init.ones_(engine.module.blocks[0].up.weight)
    after = whole(weight)
    train(engine, micro_batches(1, 1))
    return {"seen": seen, "unchanged": unchanged, "after": after, "step": (whole(weight) - 1).abs().max().item()}


@pytest.mark.parametrize("offload", [False, True])
def test_gathered_parameters(pool2, offload):
    for result in pool2.run(gathered_parameters, offload):
        assert result["seen"]
        assert result["unchanged"]
        assert torch.equal(result["after"], torch.ones(16, 16))
        assert 0 < result["step"] < 0.5  # the next step starts from what was put in


def test_a_parameter_of_no_engine_is_refused(pool2):
    with pytest.raises(AssertionError, match=r"was not sharded by hybrid\.initialize"):
        pool2.run(gather_a_stranger)
    with hybrid.zero.GatheredParameters(make_net().head.weight):  # a plain one is whole already
        pass


def gather_a_stranger() -> None:
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    fully_shard(net)
    with hybrid.zero.GatheredParameters(net.head.weight):
        pass


# -- parameters that every rank keeps whole


class Scaled(nn.Module):
    """A parameter without a dimension, one without elements, a frozen one, and rows that two ranks cannot share alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.shift = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.odd = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x) * self.scale + self.shift
        return out + self.odd(out).sum(-1, keepdim=True)


def scalars(zero: dict) -> dict:
    engine = open_engine(config(zero_optimization={**zero, "ignore_unused_parameters": True}), Scaled())
    module, rank = engine.module, engine.global_rank
    small = [module.scale, module.shift, module.nothing]
    with GatheredParameters(small):
        module.scale.data.fill_(7.0 + rank)
    unchanged = module.scale.item()
    with suppress(KeyError), GatheredParameters(small, modifier_rank=0):
        module.scale.data.fill_(7.0 + rank)
        raise KeyError
    unchanged = (unchanged, module.scale.item())
    with GatheredParameters(small, modifier_rank=0):
        module.scale.data.fill_(2.0 + rank)
        module.shift.data.fill_(0.25 - rank)
    values = {name: value.item() for name, value in stored(engine).items() if name in ("scale", "shift")}
    train(engine, micro_batches(2, 1))
    return {"unchanged": unchanged, "values": values, "weights": weights_of(engine)}


@pytest.mark.parametrize("zero", [{}, OFFLOAD], ids=["device", "host"])
def test_parameters_that_are_not_sharded_take_the_modifier_ranks_value(pool2, zero):
    net = Scaled()
    with torch.no_grad():
        net.scale.fill_(2.0)
        net.shift.fill_(0.25)
    expected = plain_sgd(micro_batches(2, 1), module=net)
    for result in pool2.run(scalars, zero):
        assert result["unchanged"] == (1.0, 1.0)
        assert result["values"] == {"scale": 2.0, "shift": 0.25}
        assert worst(result["weights"], expected) < 1e-5


# -- the caller holds the parameter


def by_the_parameter(stage: int, zero: dict) -> dict:
    engine = open_engine(config(stage=stage, zero_optimization={**zero, "ignore_unused_parameters": True}), Scaled())
    before = weights_of(engine)
    inside = {}
    for name, p in engine.module.named_parameters():
        with GatheredParameters(p):
            p.data.zero_()
        with GatheredParameters(p, modifier_rank=1):
            inside[name] = whole(p), local(p.data).shape == before[name].shape
            if engine.global_rank == 1:
                p.data.mul_(0.5)
                with torch.no_grad():
                    p += 0.25
    after, kept = weights_of(engine), stored(engine)
    train(engine, micro_batches(2, 1))
    return {"before": before, "inside": inside, "after": after, "stored": kept, "trained": weights_of(engine)}


@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (1, {}), (3, {}), (3, OFFLOAD)], ids=["0", "1", "3", "host"])
def test_a_parameter_that_the_caller_holds_is_whole_inside(pool2, stage, zero):
    net = Scaled()
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    changed = {name: value * 0.5 + 0.25 for name, value in before.items()}
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(changed[name])
    trained = plain_sgd(micro_batches(2, 1), module=net)
    for result in pool2.run(by_the_parameter, stage, zero):
        for name, value in before.items():
            assert torch.equal(result["inside"][name][0], value)
            assert result["inside"][name][1]
            assert torch.equal(result["after"][name], changed[name])
            assert torch.equal(result["stored"][name], changed[name])
        assert worst(result["trained"], trained) < 1e-5


# -- what is gathered already


REFUSED = r"a parameter of shape \[.*\] is gathered already, by a forward or another GatheredParameters"


def refused(params: list[nn.Parameter]) -> None:
    with pytest.raises(ValueError, match=REFUSED), GatheredParameters(params, modifier_rank=0):
        pass


def while_gathered(stage: int) -> dict:
    engine = open_engine(config(stage=stage))
    shards = list(engine.module.parameters())
    steps = micro_batches(2, 1)
    for ((x, y),) in steps:
        loss = loss_of(engine(share(engine, x)), share(engine, y))
        there = gathered(engine.module)
        refused(list(engine.module.parameters()))
        refused(shards)
        with GatheredParameters(engine.module.parameters()):  # to look is allowed
            seen = {name: whole(p) for name, p in engine.module.named_parameters()}
        engine.backward(loss)
        engine.step()
    trained = weights_of(engine)
    with torch.no_grad():
        engine.module(x)
    refused(list(engine.module.parameters()))
    refused(shards)
    with torch.no_grad():
        engine(x)
    listed = list(engine.module.parameters())
    with GatheredParameters(listed, modifier_rank=0):
        refused(listed)  # one inside another
        refused([engine.module.head.weight])
        with GatheredParameters(listed):
            pass
        engine.module.head.weight.data.fill_(0.25)
    return {"there": there, "seen": seen, "trained": trained, "left": gathered(engine.module), "weights": weights_of(engine)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_forward_has_gathered_is_not_changed(pool2, stage):
    one = plain_sgd(micro_batches(2, 1)[:1])
    expected = plain_sgd(micro_batches(2, 1))
    for result in pool2.run(while_gathered, stage):
        assert {"door.weight", "head.bias"} <= {*result["there"]}  # the root's stay at every stage
        assert (len(result["there"]) == len(expected)) == (stage in (1, 2))
        assert worst({n: result["seen"][n] for n in result["there"]}, {n: one[n] for n in result["there"]}) < 1e-5
        assert worst(result["trained"], expected) < 1e-5
        assert result["left"] == []
        assert torch.equal(result["weights"].pop("head.weight"), torch.full((4, 16), 0.25))
        assert worst(result["weights"], {n: w for n, w in expected.items() if n != "head.weight"}) < 1e-5


def of_a_wrapped_model() -> bool:
    """The embedding is gathered with the root, which is no part of the module itself."""
    engine = open_engine(config(hybrid_engine={"enabled": True}), tiny_model("llama"))
    ids = torch.arange(10)[None]
    out = engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    refused([engine.module.get_input_embeddings().weight])
    engine.backward(out.loss)
    weight = engine.module.get_input_embeddings().weight
    with GatheredParameters(weight, modifier_rank=0):
        weight.data.fill_(0.25)
    return bool((whole(weight) == 0.25).all())


def test_what_the_generating_engine_has_gathered_is_not_changed(pool2):
    assert pool2.run(of_a_wrapped_model) == [True, True]
