"""hybrid.checkpointing: gradients, random numbers, what is kept and where, whose settings are followed."""

from __future__ import annotations

import contextvars
import gc
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_cases import bytes_of
from torch import Tensor, nn
from training_cases import (
    WIDTH,
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
    worst,
)

import hybrid
from hybrid import checkpointing
from hybrid.checkpointing import checkpoint
from hybrid.sharding import gathered
from hybrid.training.config.top import resolve_training
from hybrid.training.generation import hybrid_config


def in_own_context(function: Callable[[], None]) -> None:
    """What is configured inside is forgotten."""
    contextvars.copy_context().run(function)


def gradients(function: Callable[..., Any], call: Callable[..., Any]) -> list[Tensor]:
    """Of a part with dropout and nested arguments, by `call`."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4))
    x, y, z = (torch.randn(5, 4, requires_grad=True) for _ in range(3))
    torch.manual_seed(4)
    out, extra = call(function, net, {"pair": (x, [y, 2])}, scale=z)
    loss = (out * torch.randn(5, 4)).sum() + extra
    loss.backward()
    return [p.grad for p in (*net.parameters(), x, y, z)]


def part(net: nn.Module, given: dict, *, scale: Tensor) -> tuple[Tensor, Tensor]:
    x, (y, factor) = given["pair"]
    return net(x * scale) + factor * y.tanh(), net(y).square().mean()


CONFIGURED = [
    None,
    {"checkpoint_in_cpu": True},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 1},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 3, "checkpoint_in_cpu": True},
]


@pytest.mark.parametrize("settings", CONFIGURED, ids=str)
def test_gradients_and_dropout_are_those_of_a_plain_call(settings):
    def check() -> None:
        if settings is not None:
            hybrid.checkpointing.configure(**settings)
        given = gradients(part, hybrid.checkpointing.checkpoint)
        expected = gradients(part, lambda function, *args, **kwargs: function(*args, **kwargs))
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))

    in_own_context(check)


def test_a_part_inside_a_part_waits_with_it():
    def check() -> None:
        checkpointing.configure(deepspeed_config={"activation_checkpointing": {"boundary_dtype": "bf16"}})
        x, weight = torch.full((3,), 0.5, requires_grad=True), torch.full((3,), 1 / 3, requires_grad=True)

        def inner(h: Tensor) -> Tensor:
            return (h * h).sin()

        def outer(h: Tensor) -> Tensor:
            return checkpoint(inner, h * weight).exp()

        checkpoint(outer, x).sum().backward()
        h = 0.5 / 3
        slope = torch.tensor(h * h).sin().exp() * torch.tensor(h * h).cos() * 2 * h
        assert torch.allclose(x.grad, slope / 3)
        assert torch.allclose(weight.grad, slope * 0.5)

    in_own_context(check)


def kept_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.dtype]:
    gc.collect()
    return [x.dtype for x in gc.get_objects() if type(x) is Tensor and x.shape == shape and x.dtype == dtype]


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_inputs_wait_in_the_boundary_dtype(name, dtype):
    def check() -> None:
        seen: list[Tensor] = []
        x = torch.randn(7, 11, dtype=torch.bfloat16, requires_grad=True)
        h = x * 3  # only the part keeps it

        def double(h: Tensor) -> Tensor:
            seen.append(h.detach().clone())
            return h * h

        checkpointing.configure(deepspeed_config={"activation_checkpointing": {"boundary_dtype": name}})
        assert not kept_bytes(dtype, (7, 11))
        source = weakref.ref(h)
        out = checkpoint(double, h).sum()
        del h
        assert len(kept_bytes(dtype, (7, 11))) == 1
        assert source() is None  # the input itself is let go
        out.backward()
        del out
        assert not kept_bytes(dtype, (7, 11))
        assert [h.dtype for h in seen] == [torch.bfloat16] * 2
        assert torch.equal(*seen)
        assert torch.equal(x.grad, (2 * (x * 3) * 3).detach())

    in_own_context(check)


def test_a_narrower_boundary_rounds_what_backward_sees_and_leaves_other_dtypes():
    def check() -> None:
        seen: list[Any] = []

        def f(x: Tensor, ids: Tensor, wide: Tensor) -> Tensor:
            seen.append((x.detach().clone(), ids, wide.detach().clone()))
            return (x * wide)[ids].sin().sum()

        checkpointing.configure(deepspeed_config={"activation_checkpointing": {"boundary_dtype": "bf16"}})
        x, wide = torch.tensor([1 / 3, 1 / 7], requires_grad=True), torch.tensor([0.1, 0.7], dtype=torch.float64)
        checkpoint(f, x, torch.tensor([1, 0]), wide).backward()
        (first, ids, whole), (second, again, whole_again) = seen
        assert torch.equal(first, x)
        assert torch.equal(second, x.bfloat16().float())
        assert torch.equal(ids, again)
        assert torch.equal(whole, whole_again)

    in_own_context(check)


def test_an_input_of_several_parts_waits_once_and_is_seen_as_it_was():
    def check() -> None:
        checkpointing.configure(deepspeed_config={"activation_checkpointing": {"boundary_dtype": "fp16"}})
        mask = torch.ones(6, 13)
        x = torch.randn(6, 13, requires_grad=True)
        first = checkpoint(lambda x, mask: (x * mask).exp(), x, mask)
        second = checkpoint(lambda x, mask: (x * mask).sin(), x, mask)
        assert len(kept_bytes(torch.float16, (6, 13))) == 2  # x and the mask
        with torch.no_grad():
            mask.mul_(2)
        third = checkpoint(lambda x, mask: (x * mask).cos(), x, mask)
        assert len(kept_bytes(torch.float16, (6, 13))) == 3
        (first + second + third).sum().backward()
        rounded = x.detach().half().float()
        assert torch.allclose(x.grad, rounded.exp() + rounded.cos() - 2 * (2 * rounded).sin(), atol=1e-6)

    in_own_context(check)


def test_the_buffer_is_for_so_many_parts_at_a_time():
    def check() -> None:
        checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
        x = torch.randn(3, 5, requires_grad=True)
        for _ in range(3):  # rows are given back by each backward
            checkpoint(torch.sin, checkpoint(torch.exp, x)).sum().backward()
        expected = 3 * x.detach().exp() * x.detach().exp().cos()
        assert torch.allclose(x.grad, expected)
        h = checkpoint(torch.sin, checkpoint(torch.exp, x))
        with pytest.raises(ValueError, match="number_checkpoints=2, but a further part's inputs are to wait"):
            checkpoint(torch.sin, h)
        checkpointing.reset()
        checkpoint(torch.sin, h)
        assert checkpointing.is_configured()

    in_own_context(check)


def test_rows_of_one_buffer_are_used_again():
    def check() -> None:
        checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4)
        h = torch.randn(3, 5, requires_grad=True)
        for _ in range(3):
            h = checkpoint(torch.sin, h)
        x = torch.randn(3, 5, requires_grad=True)
        for _ in range(3):  # the fourth row, again and again
            out = checkpoint(torch.exp, x)
            waits = in_buffers()
            assert len(waits) == 4  # 3 * 5 * 4 bytes in rows of 64, all in one storage
            assert {v.untyped_storage().nbytes() for v in waits} == {4 * 64}
            assert len({v.untyped_storage().data_ptr() for v in waits}) == 1
            out.sum().backward()
            del out, waits

    def in_buffers() -> list[Tensor]:
        gc.collect()
        return [v for v in gc.get_objects() if type(v) is Tensor and v.shape == (3, 5) and v.untyped_storage().nbytes() > 60]

    in_own_context(check)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition_activations": True, "contiguous_checkpointing": True}, "contiguous_checkpointing needs num_checkpoints"),
        ({"contiguous_checkpointing": True, "num_checkpoints": 2}, "contiguous_checkpointing needs partition_activations: true"),
        ({"num_checkpoints": 0}, "num_checkpoints: .*greater than or equal to 1"),
        ({"num_checkpoints": -1}, "num_checkpoints: .*greater than or equal to 1"),
        ({"num_checkpoints": True}, "num_checkpoints: True is given"),
        ({"deepspeed_config": {"activation_checkpointing": {"number_of": 2}}}, "number_of is unknown"),
    ],
    ids=str,
)
def test_configure_refuses_and_leaves_what_was(given, message):
    def check() -> None:
        with pytest.raises(ValueError, match=message):
            checkpointing.configure(**given)
        assert not checkpointing.is_configured()
        checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
        with pytest.raises(ValueError, match=message):
            checkpointing.configure(**given)
        h = checkpoint(torch.sin, torch.ones(2, requires_grad=True))
        with pytest.raises(ValueError, match="number_checkpoints=1"):
            checkpoint(torch.sin, h)

    in_own_context(check)
    assert not checkpointing.is_configured()


@pytest.mark.parametrize("count", [True, 0, -3, 1.5, "2"])
def test_the_section_refuses_what_is_no_count(count):
    with pytest.raises(ValueError, match=r"activation_checkpointing\.number_checkpoints"):
        resolve_training({"activation_checkpointing": {"number_checkpoints": count}})


class Checkpointed(Net):
    """Its blocks are checkpointed parts, as a script of DeepSpeed's would say it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.door(x)
        for block in self.blocks:
            x = hybrid.checkpointing.checkpoint(block, x)
        return self.head(x)


SECTIONS = [
    {},
    {"cpu_checkpointing": True},
    {"boundary_dtype": "fp32"},
    {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 2},
]


def trained(settings: dict, kind: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], list[str]]:
    engine = open_engine(settings, make_net(kind=kind))
    train(engine, micro_batches(2, 2))
    return weights_of(engine), gathered(engine.module)


@pytest.mark.parametrize("section", SECTIONS, ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_train_as_one_process_does(pool2, stage, section):
    expected = plain_sgd(micro_batches(2, 2))
    settings = config(stage=stage, accumulation=2, activation_checkpointing=section)
    for weights, left in pool2.run(trained, settings, Checkpointed):
        assert worst(weights, expected) < 1e-5
        assert left == []
    settings = config(stage=stage, accumulation=2, activation_checkpointing={**section, "layers": True})
    for weights, left in pool2.run(trained, settings, Net):
        assert worst(weights, expected) < 1e-5
        assert left == []


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32 * WIDTH), nn.Tanh(), nn.Linear(32 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def bytes_for_backward(section: dict) -> int:
    """Of all that the graph of a forward keeps, but weights."""
    engine = open_engine(config(stage=0, activation_checkpointing=section), make_net(kind=Deep))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = engine(share(engine, micro_batches(1, 1)[0][0][0]).clone())
    assert out.requires_grad
    weights = {tuple(p.shape) for p in engine.module.parameters()}
    return bytes_of([x for x in kept if tuple(x.shape) not in weights and tuple(x.T.shape) not in weights])


def test_layers_true_keeps_the_inputs_of_layers_and_no_more(pool2):
    plain, less = pool2.run(bytes_for_backward, {}), pool2.run(bytes_for_backward, {"layers": True})
    boundary = 4 * WIDTH * 4  # [4 samples, WIDTH] of fp32
    for many, few in zip(plain, less, strict=True):
        assert few == 5 * boundary  # what comes into four layers and the head
        assert many == 5 * boundary + 4 * 32 * boundary  # and in each layer what tanh made


def test_layers_true_needs_layers():
    with pytest.raises(ValueError, match=r"activation_checkpointing.layers: Linear has no list of layers"):
        open_engine(config(ranks=1, activation_checkpointing={"layers": True}), nn.Linear(2, 2))


def test_layers_true_is_the_hybrid_engines_too():
    given = {"hybrid_engine": {"enabled": True}, "activation_checkpointing": {"layers": True}}
    assert hybrid_config(resolve_training(given)[0]).activation_checkpointing
    assert not hybrid_config(resolve_training({"hybrid_engine": {"enabled": True}})[0]).activation_checkpointing


def interleaved(stage: int) -> list[tuple[dict[str, Tensor], list[torch.dtype]]]:
    """Two engines, forward and backward in turns; what dtype the inputs of their blocks wait in."""
    sections = [{"boundary_dtype": "fp16"}, {"boundary_dtype": "bf16"}]
    engines = [
        open_engine(config(stage=stage, activation_checkpointing=s), make_net(seed, Checkpointed))
        for seed, s in enumerate(sections)
    ]
    data = micro_batches(2, 1)
    found: list[list[torch.dtype]] = []
    for ((x, y),) in data:
        losses = []
        for engine in engines:
            before = waiting()
            losses.append(loss_of(engine(share(engine, x)), share(engine, y)))
            found.append(sorted(waiting() - before, key=str))  # more of that dtype than before
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
            engine.step()
        del losses, loss
    return [(weights_of(engine), found[i]) for i, engine in enumerate(engines)]


def waiting() -> Counter[torch.dtype]:
    gc.collect()  # what earlier tests of this process have left
    narrow = (torch.float16, torch.bfloat16)
    held = [x for x in gc.get_objects() if type(x) is Tensor and x.dtype in narrow and x.shape[-1:] == (2 * WIDTH,)]
    return Counter(x.dtype for x in held)


class Rounded(Net):
    """In one process: a block's value at its input, and its gradients at the rounded input."""

    dtype = torch.float16

    def forward(self, x: Tensor) -> Tensor:
        x = self.door(x)
        for block in self.blocks:
            again = block(x + (x.to(self.dtype).float() - x).detach())
            x = block(x).detach() + again - again.detach()
        return self.head(x)


class RoundedMore(Rounded):
    dtype = torch.bfloat16


def test_two_engines_each_follow_their_own_section(pool2):
    for results in pool2.run(interleaved, 3):
        assert [dtypes for _, dtypes in results] == [[torch.float16], [torch.bfloat16]]
        for seed, (weights, _) in enumerate(results):
            kind = (Rounded, RoundedMore)[seed]
            assert worst(weights, plain_sgd(micro_batches(2, 1), module=make_net(seed, kind))) < 1e-5
            assert worst(weights, plain_sgd(micro_batches(2, 1), module=make_net(seed))) > 1e-5  # the rounding is seen


def test_a_callers_own_configuration_holds_where_the_config_says_nothing():
    def check() -> None:
        checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
        x = micro_batches(1, 1)[0][0][0]
        with pytest.raises(ValueError, match="number_checkpoints=1"):
            open_engine(config(ranks=1), make_net(kind=Checkpointed))(x)
        open_engine(config(ranks=1, activation_checkpointing={"cpu_checkpointing": True}), make_net(kind=Checkpointed))(x)

    in_own_context(check)
