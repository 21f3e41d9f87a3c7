"""The optimizers of a config's `optimizer` section, through the whole engine: loss scales, accumulation, clipping, overflow."""

from __future__ import annotations

import pytest
import torch
from optim_cases import MuonReference
from torch import Tensor, nn
from training_cases import WIDTH, Net, config, loss_of, make_net, micro_batches, open_engine, train, weights_of, whole, worst

from hybrid.optim import state as optim_state
from hybrid.optim.loss_scale import DynamicLossScale, StaticLossScale
from hybrid.training.engine import TrainingEngine

MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "eps": 1e-5}}
TYPES = {
    "AdamW": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1},
    "Adam": {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.1, "adam_w_mode": False},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 0.001},
    "Adafactor": {"lr": 0.01},
    "Muon": MUON["params"],
}


def muon_reference(accumulation: int, max_norm: float) -> dict[str, Tensor]:
    """Five steps of the plain module in float64."""
    net = make_net().double()
    reference = MuonReference(dict(net.named_parameters()), 0.02, 1e-3, 1e-5, decay=0.0)
    for step in micro_batches(5, accumulation):
        net.zero_grad()
        for x, y in step:
            ((net(x.double()) - y).square().mean() / len(step)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm or float("inf"))
        reference.step({name: p.grad for name, p in net.named_parameters()})
    return {name: p.detach() for name, p in net.named_parameters()}


def muon_error(stage: int, accumulation: int, scale: float, max_norm: float, ranks: int) -> float:
    settings = config(stage=stage, accumulation=accumulation, ranks=ranks, optimizer=MUON, gradient_clipping=max_norm)
    engine = open_engine(settings, loss_scaler=StaticLossScale(scale))
    train(engine, micro_batches(5, accumulation))
    return worst(weights_of(engine), muon_reference(accumulation, max_norm))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("ranks", "accumulation", "scale", "max_norm"),
    [(1, 4, 2.0**16, 0.0), (2, 1, 1.0, 0.1), (2, 4, 2.0**16, 0.1), (4, 1, 2.0**16, 0.0), (4, 4, 2.0**16, 0.1)],
)
def test_muon_orthogonalizes_unscaled_clipped_gradients_once_per_step(request, ranks, stage, accumulation, scale, max_norm):
    """A step before unscaling moves weights by 2^-16 of this; one on each micro-batch adds four."""
    run = request.getfixturevalue(f"pool{ranks}").run if ranks > 1 else lambda function, *args: [function(*args)]
    assert max(run(muon_error, stage, accumulation, scale, max_norm, ranks)) <= 1e-5


def everything(engine: TrainingEngine) -> dict[str, Tensor]:
    model = dict(engine.module.named_parameters())
    return {name: whole(tensor) for name, tensor in (optim_state.tensors(engine.optimizer, model) | model).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def around_an_overflow(kind: str, stage: int) -> dict[str, bool]:
    """A clean step, one with an infinity from the last rank's loss, a clean one; beside a run without the second."""
    settings = config(stage=stage, optimizer={"type": kind, "params": TYPES[kind]})
    engine, other = (open_engine(settings, loss_scaler=DynamicLossScale(2.0**16, hysteresis=1)) for _ in range(2))
    first, bad, last = micro_batches(3, 1)
    for one in (engine, other):
        train(one, [first])
    before = everything(engine)
    infinity = float("inf") if engine.global_rank == engine.world_size - 1 else 1.0
    train(engine, [bad], loss=lambda out, y: loss_of(out, y) * infinity)
    found = {"unchanged": same(before, everything(engine))}
    for one in (engine, other):
        train(one, [last])
    assert (engine.loss_scale, other.loss_scale) == (2.0**15, 2.0**16)
    return {**found, "equal": same(everything(engine), everything(other)), "moved": not same(before, everything(engine))}


@pytest.mark.parametrize(
    ("kind", "stage"), [*(("Muon", stage) for stage in range(4)), ("Adafactor", 3), ("Lion", 1), ("Adam", 3)]
)
def test_an_overflow_leaves_no_trace_in_weights_or_state(pool2, kind, stage):
    assert pool2.run(around_an_overflow, kind, stage) == [{"unchanged": True, "equal": True, "moved": True}] * 2


class Odd(Net):
    """With parameters that no rank holds a part of: of no dimension, and of no elements; and one that only rank 0 holds."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.one_row = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.one_row) * self.factor + self.nothing.sum()


def after_three_steps(kind: str, ranks: int, offload: bool = False) -> tuple[str, dict[str, list]]:
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    settings = config(ranks=ranks, optimizer={"type": kind, "params": TYPES[kind]}, zero_optimization=zero)
    engine = open_engine(settings, make_net(kind=Odd))
    train(engine, micro_batches(3, 1))
    return type(engine.optimizer).__name__, {name: weight.tolist() for name, weight in weights_of(engine).items()}


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", list(TYPES))
def test_every_type_is_itself_at_any_number_of_ranks(pool2, kind, offload):
    name, expected = after_three_steps(kind, 1)
    assert name == kind
    for given_name, given in pool2.run(after_three_steps, kind, 2, offload):
        assert given_name == kind
        assert worst({n: torch.tensor(v) for n, v in given.items()}, {n: torch.tensor(v) for n, v in expected.items()}) <= 1e-5
