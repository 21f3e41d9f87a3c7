"""Weights and gradients that the caller changes: inside of GatheredParameters, by hand, and with state in host memory."""

from __future__ import annotations

from collections.abc import Callable
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
from hybrid.optim.host import digest, same_bits
from hybrid.sharding import gathered, local
from hybrid.zero import GatheredParameters

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def stored(engine: TrainingEngine) -> dict[str, Tensor]:
    """What the optimizer steps on: the copies in host memory, where there are."""
    update = engine._update
    update.take()
    held = update.parameters if update.mirror is None else update.mirror.named(update.parameters)
    return {name: whole(p) for name, p in held.items()}


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
    engine.train()
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


# -- weights and gradients in host memory


def by_hand(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def through_data(p: nn.Parameter) -> None:
    p.data.copy_(p.data * 0.5)


def through_the_shard(p: nn.Parameter) -> None:
    local(p.data).mul_(0.5)


def changed_weights(change: Callable[[nn.Parameter], None], folder: str) -> dict:
    engine, other, third = (open_engine(config(zero_optimization=OFFLOAD)) for _ in range(3))
    for one in (engine, other, third):
        train(one, micro_batches(2, 1)[:1])
        for p in one.module.parameters():
            change(p)
    train(engine, micro_batches(2, 1)[1:])
    saved = other.module_state_dict()
    third.save_checkpoint(folder)
    again = open_engine(config(zero_optimization=OFFLOAD), make_net(seed=5))
    again.load_checkpoint(folder)
    return {"saved": saved, "loaded": weights_of(again), "stored": stored(again), "trained": weights_of(engine)}


@pytest.mark.parametrize("change", [by_hand, through_data, through_the_shard])
def test_weights_that_the_caller_changes_are_the_ones_that_are_saved_and_step(pool2, tmp_path, change):
    net = make_net()
    plain_sgd(micro_batches(2, 1)[:1], module=net)
    for p in net.parameters():
        by_hand(p)
    changed = {name: p.detach().clone() for name, p in net.named_parameters()}
    trained = plain_sgd(micro_batches(2, 1)[1:], module=net)
    for result in pool2.run(changed_weights, change, str(tmp_path)):
        for key in ("saved", "loaded", "stored"):
            assert worst(result[key], changed) < 1e-5
        assert worst(result["trained"], trained) < 1e-5


def changed_gradients() -> dict:
    engine = open_engine(config(zero_optimization=OFFLOAD))
    ((x, y),) = micro_batches(1, 1)[0]
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    sent = len(engine._update.mirror._copies)
    for p in engine.module.parameters():
        p.grad.data.mul_(0.5)
    engine.step()
    return {"sent": sent, "weights": weights_of(engine)}


def test_gradients_that_are_changed_through_data_are_the_ones_that_step(pool2):
    expected = plain_sgd(micro_batches(1, 1), lr=0.05)
    for result in pool2.run(changed_gradients):
        assert result["sent"] == len(expected)  # already copied when they were changed
        assert worst(result["weights"], expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_tells_what_was_changed(dtype):
    values = torch.randn(64, 32).to(dtype)
    changes = {
        "same": values.clone(),
        "halved": values * 0.5,
        "negated": -values,
        "rows": values.flip(0),
        "one": values.index_put((torch.tensor(3), torch.tensor(5)), values[3, 5] * 1.01),
        "zeros": torch.zeros_like(values),
        "-0": -torch.zeros_like(values),
        "NaN": values * torch.nan,
        "shape": values[:-1],
    }
    assert {name for name, other in changes.items() if same_bits(values, other)} == {"same"}
    assert {name for name, other in changes.items() if torch.equal(digest(values), digest(other))} == {"same"}
    assert len({digest(other).item() for other in changes.values()}) == len(changes)
    assert same_bits(changes["NaN"], changes["NaN"].clone())
    assert same_bits(values[:0], values[:0].clone())
    assert not same_bits(values, values.to(torch.float16))


def test_a_digest_of_many_numbers_reaches_the_last():
    values = torch.zeros(2**22 + 3)
    other = values.index_fill(0, torch.tensor([2**22 + 2]), 1.0)
    first = values.index_fill(0, torch.tensor([2]), 1.0)  # the same place, of the chunk before
    assert len({digest(v).item() for v in (values, other, first)}) == 3
    assert not same_bits(values, other)


# -- forwards inside


def scale_all(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(1.5)


def forward_inside(stage: int, modifier: int | None, warm: bool, keys: dict) -> dict:
    engine = open_engine(config(stage=stage, **keys))
    ((x, _),), later = micro_batches(2, 1)
    with torch.no_grad():
        if warm:
            engine(x)
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=modifier):
            plain = engine.module(x)
            if modifier is None or engine.global_rank == modifier:
                scale_all(engine.module)
            inside = engine.module(x), engine.module.blocks[0](engine.module.door(x).float()), engine(x)
            if modifier is None or engine.global_rank == modifier:
                scale_all(engine.module)  # what a forward has used may change again
        after = engine.module(x)
    train(engine, [later])
    return {"plain": plain, "inside": inside, "after": after, "weights": weights_of(engine), "left": gathered(engine.module)}


def scaled_net(by: float) -> nn.Module:
    net = make_net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter *= by
    return net


@pytest.mark.parametrize("modifier", [None, 1])
@pytest.mark.parametrize(
    ("stage", "warm", "keys"),
    [
        (0, True, {}),
        (1, False, {}),
        (2, True, {"zero_optimization": OFFLOAD}),
        (3, False, {}),
        (3, True, {"zero_optimization": {"offload_param": {"device": "cpu"}}}),
    ],
    ids=str,
)
def test_a_forward_inside_runs_with_what_is_whole(pool2, stage, modifier, warm, keys):
    ((x, _),), later = micro_batches(2, 1)
    scaled, after = scaled_net(1.5), scaled_net(1.0 if modifier is None else 2.25)
    with torch.no_grad():
        expected = make_net()(x), scaled(x), scaled.blocks[0](scaled.door(x)), after(x)
    trained = plain_sgd([later], module=after)
    for result in pool2.run(forward_inside, stage, modifier, warm, keys):
        of_all, of_block, of_engine = result["inside"]
        given = result["plain"], of_all, of_block, result["after"]
        assert max(float((a - b).abs().max()) for a, b in zip(given, expected, strict=True)) < 1e-5
        assert torch.equal(of_engine, of_all)
        assert worst(result["weights"], trained) < 1e-5
        assert result["left"] == []


def half_precision_inside() -> bool:
    engine = open_engine(config(bf16={"enabled": True}))
    x = micro_batches(1, 1)[0][0][0]
    with torch.no_grad():
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            scale_all(engine.module)
            inside = engine(x)
        return torch.equal(inside, engine(x)) and inside.dtype == torch.bfloat16


def test_a_forward_inside_computes_in_its_dtype(pool2):
    assert pool2.run(half_precision_inside) == [True, True]


def failing_inside(stage: int) -> dict:
    engine = open_engine(config(stage=stage))
    (x, _), *_ = micro_batches(1, 1)[0]
    with torch.no_grad(), GatheredParameters(list(engine.module.parameters())):
        scale_all(engine.module)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine.module(x[:, 1:])
        scaled = engine.module.head.weight.clone()
    with GatheredParameters(list(engine.module.parameters())), pytest.raises(RuntimeError, match=r"use torch\.no_grad\(\)"):
        engine.module(x)
    train(engine, micro_batches(1, 1))
    return {"scaled": scaled, "weights": weights_of(engine)}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_forward_inside_that_fails_leaves_what_was(pool2, stage):
    for result in pool2.run(failing_inside, stage):
        assert torch.equal(result["scaled"], scaled_net(1.5).head.weight)
        assert worst(result["weights"], plain_sgd(micro_batches(1, 1))) < 1e-5


# -- parts that are called on their own


def a_part_inside(stage: int) -> list[float]:
    """A part that is not listed is called beside one that is."""
    engine = open_engine(config(stage=stage))
    (x, _), *_ = micro_batches(1, 1)[0]
    door, head = engine.module.door, engine.module.head
    with torch.no_grad():
        with GatheredParameters([door.weight, door.bias]):
            door.weight.data.zero_()
            door.bias.data.zero_()
            before = door(x)
            head(torch.zeros(1, 16))
            seen = [before, door.weight, door(x)]
        return [float(whole(tensor).abs().max()) for tensor in [*seen, door(x) - make_net().door(x)]]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_part_that_is_called_inside_undoes_nothing(pool2, stage):
    for before, weight, after, outside in pool2.run(a_part_inside, stage):
        assert (before, weight, after) == (0.0, 0.0, 0.0)
        assert outside < 1e-6


def frozen_part(stage: int) -> Tensor:
    net = make_net()
    net.head.requires_grad_(False)
    engine = open_engine(config(stage=stage), net)
    hidden = torch.ones(2, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match="head was called outside of the module's own forward"):
        engine.module.head(hidden)
    return engine.module.head(hidden.detach())  # nothing to differentiate


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_part_is_called_without_gradients_too(pool2, stage):
    for out in pool2.run(frozen_part, stage):
        assert torch.allclose(out, make_net().head(torch.ones(2, 16)), atol=1e-5)


def parts(stage: int) -> dict:
    engine = open_engine(config(stage=stage))
    (x, _), *_ = micro_batches(1, 1)[0]
    with torch.no_grad():  # before the module has run
        hidden = engine.module.blocks[1](engine.module.door(x))
        out = engine.module.head(hidden)
    with pytest.raises(RuntimeError, match="door was called outside of the module's own forward"):
        engine.module.door(x)
    left = gathered(engine.module.head) + gathered(engine.module.door)
    train(engine, micro_batches(1, 1))
    return {"hidden": hidden, "out": out, "left": left, "weights": weights_of(engine)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parts_may_be_called_without_gradients(pool2, stage):
    (x, _), *_ = micro_batches(1, 1)[0]
    net = make_net()
    with torch.no_grad():
        hidden = net.blocks[1](net.door(x))
        out = net.head(hidden)
    for result in pool2.run(parts, stage):
        assert torch.allclose(result["hidden"], hidden, atol=1e-5)
        assert torch.allclose(result["out"], out, atol=1e-5)
        assert result["left"] == []
        assert worst(result["weights"], plain_sgd(micro_batches(1, 1))) < 1e-5
