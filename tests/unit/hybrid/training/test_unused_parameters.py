"""Parameters that some ranks or none use, that have no element or no dimension: every stage against plain SGD."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_cases import (
    WIDTH,
    Block,
    Net,
    config,
    loss_of,
    make_net,
    micro_batches,
    open_engine,
    plain_sgd,
    share,
    weights_of,
    worst,
)

from hybrid.sharding import gathered

DECAY = 0.1  # so that a step with a zero gradient is not no step
CPU = {"device": "cpu"}


class OddBlock(Block):
    """By turns: `mine[r]` is used by rank r, `late` in the second backward of a step, `never` not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = nn.ModuleList(nn.Linear(2 * WIDTH, 2 * WIDTH) for _ in range(2))
        self.late, self.never = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.empty, self.scale = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, rank: int = 0, turn: int = 0) -> Tensor:
        x = super().forward(x) + self.scale * self.mine[rank](x) + self.empty.sum()
        return self.late(x) if turn else x


class OddNet(Net):
    """The same in what no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([OddBlock(), OddBlock()])
        self.mine_0, self.mine_1 = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.never, self.none = nn.Linear(3, 3), nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.first = nn.Parameter(torch.tensor(0.3))  # of rank 0's only

    def forward(self, x: Tensor, rank: int = 0, turn: int = 0) -> Tensor:
        x = self.scale * (self.mine_1 if rank else self.mine_0)(self.door(x)) + self.empty.sum()
        for block in self.blocks:
            x = block(x, rank, turn)
        return self.head(x) * (self.first if rank == 0 else 1.0)


def settings(stage: int, **zero: Any) -> dict[str, Any]:
    return config(
        accumulation=2,
        optimizer={"type": "SGD", "params": {"lr": 0.1, "weight_decay": DECAY}},
        zero_optimization={"stage": stage, **zero},
    )


def trained(given: dict[str, Any]) -> dict[str, Any]:
    engine = open_engine(given, make_net(kind=OddNet))
    left = []
    for step in micro_batches(2, 2):
        for turn, (x, y) in enumerate(step):
            engine.backward(loss_of(engine(share(engine, x), engine.global_rank, turn), share(engine, y)))
            engine.step()
            left += gathered(engine.module)
    return {
        "weights": weights_of(engine),
        "left": sorted(set(left) - {n for n, p in engine.module.named_parameters() if not isinstance(p, DTensor)}),
        "norm": engine.get_global_grad_norm(),
    }


def plainly() -> tuple[dict[str, Tensor], float]:
    """Both ranks' samples through one module, and the norm of the last gradient."""
    net = make_net(kind=OddNet)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=DECAY)
    for step in micro_batches(2, 2):
        for turn, (x, y) in enumerate(step):
            for rank in range(2):
                (loss_of(net(x.chunk(2)[rank], rank, turn), y.chunk(2)[rank]) / 4).backward()
        norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]).item()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters()}, norm


@pytest.mark.parametrize(
    "given",
    [
        settings(0),
        settings(1),
        settings(2),
        settings(3),
        settings(2, offload_optimizer=CPU),
        settings(3, offload_param=CPU, offload_optimizer=CPU),
        settings(3) | {"activation_checkpointing": {"layers": True}},
    ],
    ids=lambda given: str({**given["zero_optimization"], **given.get("activation_checkpointing", {})}),
)
def test_ranks_that_use_different_parameters_train_as_one_process_does(pool2, given):
    expected, norm = plainly()
    start = {name: p.detach() for name, p in make_net(kind=OddNet).named_parameters()}
    for result in pool2.run(trained, given):
        assert worst(result["weights"], expected) < 1e-5
        assert result["norm"] == pytest.approx(norm, rel=1e-5)
        never = [name for name in start if "never" in name or name == "none"]
        assert len(never) == 7
        assert all(torch.equal(result["weights"][name], start[name]) for name in never)
        if given["zero_optimization"]["stage"] in (0, 3):
            assert result["left"] == []


def refused(stage: int) -> str:
    engine = open_engine(settings(stage, ignore_unused_parameters=False), make_net(kind=OddNet))
    for turn, (x, y) in enumerate(micro_batches(1, 2)[0]):
        engine.backward(loss_of(engine(share(engine, x), engine.global_rank, turn), share(engine, y)))
        try:
            engine.step()
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_no_rank_uses_is_an_error_where_the_config_says_so(pool2, stage):
    for message in pool2.run(refused, stage):
        assert message.startswith("no gradient reached none, blocks.0.never.weight, blocks.0.never.bias and 4 more; freeze")


class Turns(Net):
    """Each rank runs a layer of its own."""

    def forward(self, x: Tensor, order: tuple[int, ...] = (0, 1)) -> Tensor:
        x = self.door(x)
        for i in order:
            x = self.blocks[i](x)
        return self.head(x)


def divergent(stage: int, orders: list[tuple[int, ...]]) -> tuple[str, bool, list[str], float]:
    """A step in which ranks run different layers, then one in which they do not."""
    engine = open_engine(config(stage=stage), make_net(kind=Turns))
    start, (x, y) = weights_of(engine), micro_batches(1, 1)[0][0]
    engine.backward(loss_of(engine(share(engine, x), orders[engine.global_rank]), share(engine, y)))
    message = ""
    try:
        engine.step()
    except ValueError as error:
        message = str(error)
    kept = all(torch.equal(a, b) for a, b in zip(start.values(), weights_of(engine).values(), strict=True))
    left = [name for name in gathered(engine.module) if stage in (0, 3)]
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    engine.step()
    return message, kept, left, worst(weights_of(engine), plain_sgd(micro_batches(1, 1)))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("orders", "message"),
    [([(0,), (1,)], r"\(blocks.0, blocks.1\)"), ([(0, 1), (1, 0)], r"\(in different orders\)")],
    ids=["one each", "order"],
)
def test_ranks_that_run_different_layers_are_told_before_a_weight_moves(pool2, stage, orders, message):
    for told, kept, left, error in pool2.run(divergent, stage, orders):
        assert re.match(f"ranks ran different layers {message}, whose gradients are mixed", told)
        assert kept
        assert left == []
        assert error < 1e-5


def uneven() -> dict[str, Tensor]:
    """Rank 0 adds one more gradient before the ranks' only reduction."""
    engine = open_engine(config(stage=1, managed_gradient_accumulation=False), make_net())
    (x, y), *more = (micro for step in micro_batches(3, 1) for micro in step)
    for a, b in more[engine.global_rank :]:
        with engine.no_sync():
            engine.backward(loss_of(engine(share(engine, a)), share(engine, b)))
            engine.step()
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    engine.step()
    return weights_of(engine)


def test_ranks_may_differ_where_they_do_not_talk(pool2):
    net = make_net()
    (x, y), *more = (micro for step in micro_batches(3, 1) for micro in step)
    for rank in range(2):
        for a, b in [(x, y), *more[rank:]]:
            (loss_of(net(a.chunk(2)[rank]), b.chunk(2)[rank]) / 2).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for weights in pool2.run(uneven):
        assert worst(weights, {name: p.detach() for name, p in net.named_parameters()}) < 1e-5


def kinds() -> dict[str, bool]:
    engine = open_engine(settings(3), make_net(kind=OddNet))
    return {name: isinstance(p, DTensor) for name, p in engine.module.named_parameters()}


def test_only_what_can_be_cut_is_sharded(pool2):
    for found in pool2.run(kinds):
        assert {name for name, cut in found.items() if not cut} == {
            name for name in found if name.rpartition(".")[2] in ("none", "scale", "first", "empty")
        }
