"""Loss scales, overflows, communication, autocast and precision by module, through the whole engine."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import (
    Block,
    Net,
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

from hybrid.optim.loss_scale import DynamicLossScale, LossScaleError
from hybrid.sharding import local

OPTIMIZERS = [
    {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    {"type": "AdamW", "params": {"lr": 1e-2}},
    {"type": "Adam", "params": {"lr": 1e-2, "adam_w_mode": False}},
    {"type": "Lion", "params": {"lr": 1e-3}},
    {"type": "Adafactor", "params": {"lr": 1e-2}},
    {"type": "Muon", "params": {"lr": 1e-2}},
]
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}}
BF16, FP16 = {"enabled": True}, {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1000}


def poison_at(bad_step: int, value: float, rank: int = 1) -> Callable[..., Tensor]:
    """A loss whose gradient is `value` times too large on one rank at one step."""
    count = iter(range(10_000))

    def loss(out: Tensor, y: Tensor) -> Tensor:
        step = next(count)
        poisoned = step == bad_step and torch.distributed.get_rank() == rank
        return loss_of(out, y) * (value if poisoned else 1.0)

    return loss


def states(engine) -> dict[str, Tensor]:
    """Weights and optimizer state of this rank, bit by bit."""
    found = {f"w.{n}": local(p).detach().clone() for n, p in engine.module.named_parameters()}
    for i, values in enumerate(engine.optimizer.state.values()):
        found |= {f"{i}.{k}": local(v).clone() for k, v in values.items() if isinstance(v, Tensor)}
    return found


# -- overflow


def overflow_run(settings: dict, value: float) -> dict:
    engine = open_engine(settings)
    steps = micro_batches(4, 1)
    train(engine, steps[:2])
    before, lr, scale = states(engine), engine.get_lr(), engine.loss_scale
    train(engine, steps[2:3], loss=poison_at(0, value))
    after = states(engine)
    result = {
        "unchanged": before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before),
        "lr": engine.get_lr() == lr,
        "skipped": engine.skipped_steps,
        "applied": engine.was_step_applied(),
        "scale": (scale, engine.loss_scale),
    }
    train(engine, steps[3:])
    return result | {"end": states(engine), "global": engine.global_steps}


def clean_run(settings: dict) -> dict[str, Tensor]:
    engine = open_engine(settings)
    steps = micro_batches(4, 1)
    train(engine, [*steps[:2], steps[3]])
    return states(engine)


def check_skipped(pool, settings: dict, value: float) -> list[dict]:
    results, clean = pool.run(overflow_run, settings, value), pool.run(clean_run, settings)
    for result, expected in zip(results, clean, strict=True):
        assert result["unchanged"]
        assert result["lr"]
        assert not result["applied"]
        assert (result["skipped"], result["global"]) == (1, 4)
        assert all(torch.equal(result["end"][n], expected[n]) for n in expected)
    return results


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_rank_takes_a_step_with_one_ranks_infinite_gradient(pool2, stage, value):
    check_skipped(pool2, config(stage=stage, bf16=BF16, scheduler=WARMUP, optimizer=OPTIMIZERS[1]), value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: o["type"])
def test_no_optimizer_is_poisoned(pool2, optimizer, stage):
    check_skipped(pool2, config(stage=stage, bf16=BF16, scheduler=WARMUP, optimizer=optimizer), float("inf"))


@pytest.mark.parametrize(
    ("precision", "scale"),
    [({}, 1.0), ({"fp16": FP16}, 256.0), ({"fp16": {"enabled": True, "loss_scale": 128}}, 128.0)],
    ids=str,
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_is_skipped_in_every_precision(pool2, stage, precision, scale):
    offload = {"offload_optimizer": {"device": "cpu"}} if stage else {}
    results = check_skipped(pool2, config(stage=stage, **precision, zero_optimization=offload), float("inf"))
    assert results[0]["scale"] == (scale, scale)  # hysteresis 2: the first is forgiven; a static scale stays


def test_without_the_check_an_overflow_reaches_the_weights(pool2):
    settings = config(bf16={"enabled": True, "check_grad_overflow": False})
    result = pool2.run(overflow_run, settings, float("inf"))[0]
    assert result["skipped"] == 0
    assert not all(t.isfinite().all() for t in result["end"].values())


# -- loss scales


def scales(settings: dict, bad: list[int], steps: int) -> list[float]:
    engine = open_engine(settings)
    seen = []
    for i, step in enumerate(micro_batches(steps, 1)):
        train(engine, [step], loss=poison_at(0, float("inf")) if i in bad else loss_of)
        seen.append(engine.loss_scale)
    return seen


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("hysteresis", "bad", "expected"),
    [
        (1, [], [256, 256, 512, 512, 1024, 1024, 2048]),
        (1, [1], [256, 128, 128, 128, 256, 256, 512]),
        (2, [1, 2], [256, 256, 128, 128, 128, 256, 256]),
    ],
)
def test_the_scale_moves_as_the_state_machine_says_at_every_stage(pool2, stage, hysteresis, bad, expected):
    fp16 = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": hysteresis}
    assert pool2.run(scales, config(stage=stage, fp16=fp16), bad, 7) == [expected, expected]


def scaled_fp32(stage: int, scaled: bool) -> dict:
    scaler = DynamicLossScale(initial_scale=2.0**4, window=1, hysteresis=1) if scaled else None
    engine = open_engine(config(stage=stage, accumulation=2, gradient_clipping=0.3), loss_scaler=scaler)
    norms = []
    for step in micro_batches(6, 2):
        train(engine, [step])
        norms.append(engine.get_global_grad_norm())
    return {"weights": weights_of(engine), "norms": norms, "scale": engine.loss_scale}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_growing_scale_changes_no_bit_of_a_step(pool2, stage):
    """Gradients are divided by the scale their loss was multiplied by, not by the one after it."""
    scaled, plain = pool2.run(scaled_fp32, stage, True)[0], pool2.run(scaled_fp32, stage, False)[0]
    assert scaled["scale"] == 2.0**9  # grew five times
    assert scaled["norms"] == plain["norms"]
    assert all(torch.equal(scaled["weights"][n], plain["weights"][n]) for n in plain["weights"])


class Doubling:
    """A user's own: doubles at every clean step."""

    def __init__(self) -> None:
        self.scale, self.heard = 2.0, []

    def update(self, overflow: bool) -> None:
        self.heard.append(overflow)
        self.scale = self.scale / 4 if overflow else self.scale * 2

    def state_dict(self) -> dict:
        return {"scale": self.scale}

    def load_state_dict(self, state) -> None:
        self.scale = state["scale"]


def users_scaler() -> dict:
    scaler = Doubling()
    engine = open_engine(config(), loss_scaler=scaler)
    steps = micro_batches(3, 1)
    train(engine, steps[:2])
    train(engine, steps[2:], loss=poison_at(0, float("inf")))
    return {"heard": scaler.heard, "scale": engine.loss_scale, "weights": weights_of(engine)}


def test_a_users_scaler_drives_the_engine(pool2):
    result = pool2.run(users_scaler)[0]
    assert result["heard"] == [False, False, True]
    assert result["scale"] == 2.0
    assert worst(result["weights"], plain_sgd(micro_batches(2, 1))) < 1e-5


def at_the_floor(stage: int) -> dict:
    engine = open_engine(config(stage=stage, fp16={"enabled": True, "initial_scale_power": 0, "hysteresis": 1}))
    before = states(engine)
    with pytest.raises(LossScaleError) as caught:
        train(engine, micro_batches(1, 1), loss=poison_at(0, float("inf")))
    after = states(engine)
    return {"error": str(caught.value), "same": all(torch.equal(before[n], after[n]) for n in before)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_overflow_at_the_floor_is_a_typed_error_on_every_rank(pool2, stage):
    first, second = pool2.run(at_the_floor, stage)
    assert first == second
    assert first["same"]


# -- fp16 and bf16 train


def precise(settings: dict) -> dict:
    engine = open_engine(settings)
    train(engine, micro_batches(5, 2))
    return {"weights": weights_of(engine), "dtypes": {str(p.dtype) for p in engine.module.parameters()}}


def rounded_sgd(dtype: torch.dtype, scale: float) -> dict[str, Tensor]:
    """fp32 masters, of which a copy in `dtype` makes each rank's gradient of each micro-batch; these are added in fp32."""
    net = make_net()
    for step in micro_batches(5, 2):
        sums = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        for x, y in step:
            for rank in range(2):
                copy = deepcopy(net).to(dtype)
                out = copy(x.chunk(2)[rank].to(dtype))
                (loss_of(out, y.chunk(2)[rank]) * scale / 4).backward()
                for name, p in copy.named_parameters():
                    sums[name] += p.grad.float()
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.sub_(sums[name] / scale, alpha=0.1)
    return {name: p.detach() for name, p in net.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [{"bf16": BF16}, {"fp16": FP16}], ids=str)
def test_half_precision_follows_fp32(pool2, precision, stage):
    """Within rounding of half precision of fp32; of what rounds in the same places, within rounding of fp32."""
    result = pool2.run(precise, config(stage=stage, accumulation=2, **precision))[0]
    alike = rounded_sgd(*((torch.bfloat16, 1.0) if "bf16" in precision else (torch.float16, 2.0**8)))
    assert worst(result["weights"], alike) < 1e-5
    expected = plain_sgd(micro_batches(5, 2))
    largest = max(w.abs().max().item() for w in expected.values())
    assert max((result["weights"][n] - w).abs().max().item() for n, w in expected.items()) < 1e-2 * largest
    assert worst(alike, expected) > 1e-4  # half precision is at work
    assert result["dtypes"] == {"torch.float32"}


# -- clipping


@pytest.mark.parametrize(("keys", "norm"), [({}, 1.0), ({"gradient_clipping": 0.0}, None), ({"gradient_clipping": 0.25}, 0.25)])
def test_clipping_is_on_unless_it_is_turned_off(pool2, keys, norm):
    settings = config(**keys)
    if not keys:
        del settings["gradient_clipping"]
    result = pool2.run(big_gradients, settings)[0]
    assert result["norm"] > 10
    expected = make_net()
    (100 * loss_of(expected(micro_batches(1, 1)[0][0][0]), micro_batches(1, 1)[0][0][1])).backward()
    if norm is not None:
        nn.utils.clip_grad_norm_(expected.parameters(), norm)
    moved = {n: p.detach() - 0.1 * p.grad for n, p in expected.named_parameters()}
    assert worst(result["weights"], moved) < 1e-6


def big_gradients(settings: dict) -> dict:
    engine = open_engine(settings)
    train(engine, micro_batches(1, 1), loss=lambda out, y: 100 * loss_of(out, y))
    return {"norm": engine.get_global_grad_norm(), "weights": weights_of(engine)}


# -- communication


class Sums(nn.Module):
    """One weight of four ones, whose gradient is what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.float() * x).sum()


def summed(settings: dict, values: tuple[float, float]) -> dict:
    engine = open_engine(settings, Sums())
    engine.backward(engine(torch.full((4,), values[engine.global_rank])))
    engine.step()
    return {"gradient": ((1 - whole(engine.module.weight)) / 1.0)[0].item(), "skipped": engine.skipped_steps}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 128.5),  # (256 + 1) / 2, exact in fp32
        ({"bf16": BF16}, 128.5),  # also of bf16 gradients
        ({"communication_data_type": "bf16"}, 128.0),  # 257 needs nine bits
        ({"gradient_allreduce_op": "sum"}, 257.0),
        ({"prescale_gradients": True}, 128.5),
        ({"gradient_predivide_factor": 8.0}, 128.5),
        ({"gradient_predivide_factor": 8.0, "gradient_allreduce_op": "sum"}, 257.0),
    ],
    ids=str,
)
def test_gradients_are_reduced_as_the_config_says(pool2, stage, keys, expected):
    for result in pool2.run(summed, config(stage=stage, lr=1.0, **keys), (256.0, 1.0)):
        assert result["gradient"] == expected


class Kinds(nn.Module):
    """Weights whose gradients travel in different ways: fp32, fp64, and one without a dimension, which no backward reduces."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = Sums(), Sums().double()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(x) + self.wide(x) + self.scale * x.sum() / 4


UNCUT = [{"stage": 0}, {"stage": 3}, *({"stage": stage, "mics_shard_size": 1} for stage in (1, 2, 3))]
DIVISIONS: list[dict[str, Any]] = [
    {},
    {"communication_data_type": "fp16"},
    {"gradient_predivide_factor": 4.0},
    {"gradient_predivide_factor": 4.0, "communication_data_type": "fp16"},
    {"prescale_gradients": True},
    {"gradient_allreduce_op": "sum"},
]


def of_all_kinds() -> list[list[float]]:
    """Each weight's move, for gradients 8 and 2 of the ranks."""
    moved = []
    for zero in UNCUT:
        for keys in DIVISIONS:
            engine = open_engine(config(lr=1.0, zero_optimization=zero, accumulation=2, **keys), Kinds())
            for _ in range(2):
                engine.backward(engine(torch.full((4,), 8.0 - 6.0 * engine.global_rank)))
                engine.step()
            moved.append([(1 - whole(p)).mean().item() for p in engine.module.parameters()])
    return moved


def test_gradients_of_every_dtype_are_divided_once_whether_weights_are_cut_or_not(pool2):
    expected = [[10.0 if keys == DIVISIONS[-1] else 5.0] * 3 for _ in UNCUT for keys in DIVISIONS]
    assert pool2.run(of_all_kinds) == [expected] * 2
    assert of_all_kinds() == [[8.0] * 3] * len(expected)  # one rank


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_a_gradient_is_divided_before_it_is_sent_where_the_config_says(pool2, stage, dtype):
    """The smallest number but for one bit, of which a thousandth is none."""
    small = {"fp16": 2.0**-23, "bf16": 2.0**-132, "fp32": 2.0**-148}[dtype]
    keys = {"communication_data_type": dtype, "gradient_allreduce_op": "sum"}
    assert pool2.run(tiny_sum, config(stage=stage, lr=1.0, **keys), small) == [2 * small] * 2
    assert pool2.run(tiny_sum, config(stage=stage, lr=1.0, gradient_predivide_factor=1024.0, **keys), small) == [0, 0]


def tiny_sum(settings: dict, small: float) -> float:
    engine = open_engine(settings, Sums())
    with torch.no_grad():
        engine.module.weight.zero_()
    engine.backward(engine(torch.full((4,), small)))
    engine.step()
    return -whole(engine.module.weight)[0].item()


def gradients_of(settings: dict) -> dict[str, Tensor]:
    engine = open_engine(settings)
    ((x, y),) = micro_batches(1, 1)[0]
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    return {n: whole(p.grad) for n, p in engine.module.named_parameters()}


@pytest.mark.parametrize(("stage", "scale"), [(0, 1), (1, 1), (3, 1), (3, 64)])
def test_between_backward_and_step_a_gradient_is_the_mean_times_the_loss_scale(pool2, stage, scale):
    net = make_net()
    loss_of(net(micro_batches(1, 1)[0][0][0]), micro_batches(1, 1)[0][0][1]).backward()
    expected = {n: p.grad * scale for n, p in net.named_parameters()}
    fp16 = {} if scale == 1 else {"fp16": {"enabled": True, "loss_scale": scale}}
    for result in pool2.run(gradients_of, config(stage=stage, **fp16)):
        assert worst(result, expected) < (1e-5 if scale == 1 else 1e-2)


# -- autocast


class Adapted(nn.Module):
    """A frozen bf16 base with fp32 adapters, as peft makes them; its own subclass of Linear among them."""

    class Own(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(2)])
        self.base.requires_grad_(False)
        self.down = nn.ModuleList([self.Own(8, 2, bias=False) for _ in range(2)])
        self.up = nn.ModuleList([self.Own(2, 8, bias=False) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = self.norm(base(x) + up(down(x)))
        return x[:, :4]


def autocast_run(settings: dict) -> dict:
    torch.manual_seed(0)
    engine = open_engine(settings, Adapted())
    inside: dict[str, str] = {}
    for name, child in engine.module.named_modules():
        if isinstance(child, nn.Linear | nn.LayerNorm):
            child.register_forward_pre_hook(lambda m, a, name=name: inside.update({name: str(m.weight.dtype)}))
    ((x, y),) = micro_batches(1, 1)[0]
    before = {n: whole(p) for n, p in engine.module.named_parameters()}
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    gradients = {n: whole(p.grad) for n, p in engine.module.named_parameters() if p.requires_grad}
    engine.step()
    after = {n: whole(p) for n, p in engine.module.named_parameters()}
    other = open_engine(config())  # a second engine, without autocast
    return {
        "inside": inside,
        "gradients": gradients,
        "changed": {n for n in before if not torch.equal(before[n], after[n])},
        "dtypes": {n: str(w.dtype) for n, w in after.items()},
        "left on": torch.is_autocast_enabled("cpu"),
        "other": str(other(share(other, x)).dtype),
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_autocast_gathers_safe_modules_in_its_dtype(pool2, stage):
    torch.manual_seed(0)
    plain = Adapted()
    ((x, y),) = micro_batches(1, 1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = plain(x)
    loss_of(out, y).backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.requires_grad}
    for result in pool2.run(autocast_run, config(stage=stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})):
        assert result["inside"].pop("norm") == "torch.float32"
        assert set(result["inside"].values()) == {"torch.bfloat16"}  # base and adapters, subclasses too
        assert worst(result["gradients"], expected) < 1e-2
        assert result["changed"] == set(expected)
        assert {n for n, dtype in result["dtypes"].items() if dtype == "torch.bfloat16"} == {
            f"base.{i}.{w}" for i in range(2) for w in ("weight", "bias")
        }
        assert not result["left on"]
        assert result["other"] == "torch.float32"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mid(self.embed(ids)))


def tied_autocast(stage: int) -> dict:
    torch.manual_seed(0)
    engine = open_engine(config(stage=stage, torch_autocast={"enabled": True}), Tied())
    out = engine(torch.arange(16))
    engine.backward(out.float().square().mean())
    engine.step()
    return {"tied": engine.module.head.weight is engine.module.embed.weight, "weights": weights_of(engine)}


@pytest.mark.parametrize("stage", [0, 3])
def test_a_tied_weight_under_autocast_is_gathered_as_it_is(pool2, stage):
    torch.manual_seed(0)
    plain = Tied()
    with torch.autocast("cpu", torch.bfloat16):
        out = plain(torch.arange(16))
    out.float().square().mean().backward()
    expected = {n: p.detach() - 0.1 * p.grad for n, p in plain.named_parameters()}
    for result in pool2.run(tied_autocast, stage):
        assert result["tied"]
        assert worst(result["weights"], expected) < 1e-2


def test_a_tied_weight_with_two_dtypes_is_refused_and_left():
    module = Tied()
    rule = [{"match": "name:head", "dtype": "fp32"}]
    with pytest.raises(ValueError, match=r"embed\.weight in torch.bfloat16, head\.weight in torch.float32"):
        open_engine(config(ranks=1, bf16=BF16, module_precision=rule), module)
    assert module.head.weight is module.embed.weight


def autocast_fp16() -> dict:
    engine = open_engine(config(torch_autocast={"enabled": True, "dtype": "float16"}))
    scale = engine.loss_scale
    train(engine, micro_batches(2, 1))
    return {"scale": scale, "weights": weights_of(engine)}


def test_autocast_in_fp16_has_a_loss_scale(pool2):
    result = pool2.run(autocast_fp16)[0]
    assert result["scale"] == 2.0**16
    expected = plain_sgd(micro_batches(2, 1))
    assert max((result["weights"][n] - w).abs().max().item() for n, w in expected.items()) < 1e-3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = make_net(), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.net(x))


@pytest.mark.parametrize("precision", [{"bf16": BF16}, {"fp16": FP16}], ids=str)
def test_running_statistics_stay_in_fp32(precision):
    engine = open_engine(config(ranks=1, **precision), Normed())
    ((x, y),) = micro_batches(1, 1)[0]
    out = engine(x)
    engine.backward(loss_of(out, y))
    engine.step()
    assert engine.module.norm.running_mean.dtype == torch.float32
    assert out.dtype == (torch.bfloat16 if "bf16" in precision else torch.float16)  # what came in
    assert engine.module.norm.num_batches_tracked == 1


def test_a_module_in_fp64_is_trained_in_it():
    engine = open_engine(config(ranks=1), make_net().double())
    ((x, y),) = micro_batches(1, 1)[0]
    plain = make_net().double()
    ((plain(x.double()) - y) ** 2).mean().backward()
    engine.backward(((engine(x.double()) - y) ** 2).mean())
    engine.step()
    for (name, p), q in zip(engine.module.named_parameters(), plain.parameters(), strict=True):
        assert whole(p).dtype == torch.float64
        assert torch.allclose(whole(p), q - 0.1 * q.grad, rtol=0, atol=1e-14), name


# -- precision by module


class Traced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.MSELoss()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(super().forward(x), y)


def dtypes_by_module(settings: dict) -> dict:
    engine = open_engine(settings, make_net(kind=Traced))
    seen: dict[str, tuple[str, ...]] = {}

    def note(name: str):
        def hook(module: nn.Module, args, out: Tensor) -> None:
            seen[name] = (str(args[0].dtype).removeprefix("torch."), str(out.dtype).removeprefix("torch."))

        return hook

    for name, child in engine.module.named_modules():
        if isinstance(child, nn.Linear | nn.LayerNorm | nn.MSELoss):
            child.register_forward_hook(note(name))
    ((x, y),) = micro_batches(1, 1)[0]
    loss = engine(share(engine, x), share(engine, y))
    engine.backward(loss)
    finite = all(p.grad is not None and p.grad.dtype == torch.float32 for p in engine.module.parameters())
    engine.step()
    return {"seen": seen, "loss": str(loss.dtype), "gradients": finite}


def test_precision_is_chosen_by_class_name_and_pattern(pool2):
    rules = [
        {"match": "norms", "dtype": "fp32"},
        {"match": "losses", "dtype": "fp32", "output": "keep"},
        {"match": "name:head", "dtype": "fp32", "output": "bf16"},
        {"match": r"re:blocks\.1\.up", "dtype": "fp16"},
    ]
    for result in pool2.run(dtypes_by_module, config(bf16=BF16, module_precision=rules)):
        assert result["seen"] == {
            "door": ("bfloat16", "bfloat16"),
            "blocks.0.norm": ("float32", "bfloat16"),  # computes in fp32, returns what came in
            "blocks.0.up": ("bfloat16", "bfloat16"),
            "blocks.1.norm": ("float32", "bfloat16"),
            "blocks.1.up": ("float16", "bfloat16"),
            "head": ("float32", "bfloat16"),
            "loss": ("float32", "float32"),
        }
        assert result["loss"] == "torch.float32"
        assert result["gradients"]


def test_a_class_rule_holds_for_subclasses():
    class Own(nn.LayerNorm):
        pass

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.block = Own(8), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.own(x)

    for match, expected in (("class:LayerNorm", torch.float32), ("class:torch.nn.Linear", torch.bfloat16)):
        engine = open_engine(config(ranks=1, bf16=BF16, module_precision=[{"match": match, "output": "keep"}]), Small())
        assert engine(torch.randn(2, 8)).dtype == expected


def test_a_rule_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="'name:haed' matches no module of Net"):
        open_engine(config(ranks=1, module_precision=[{"match": "name:haed"}]))
