"""Frozen weights under activation checkpointing at stage 3: how much is gathered at any moment, and what is left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import config, loss_of, micro_batches, open_engine, plain_sgd, share, train, weights_of, worst

from hybrid import TrainingEngine
from hybrid.checkpointing import checkpoint
from hybrid.sharding import gathered, groups

WIDTH, RANK, DEPTH = 8, 2, 4


class Adapted(nn.Module):
    """W + B A, and W is frozen."""

    def __init__(self, fails: dict[str, int] | None = None) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.runs, self.fails_at, self.fails_back = 0, -1, False

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == self.fails_at:
            raise OSError("lost")
        out = torch.tanh(self.base(x)) + self.up(self.down(x))
        if self.fails_back:
            out.register_hook(self.fail_back)
        return out.square()

    def fail_back(self, gradient: Tensor) -> None:
        self.fails_back = False
        raise OSError("lost")


class Stack(nn.Module):
    """`order`: which layers run. `parts`: how many of them are one checkpointed part; 0: none is. `branches`: all over x."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3), parts: int = 1, branches: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 4)
        self.order, self.parts, self.branches = order, parts, branches

    def forward(self, x: Tensor) -> Tensor:
        layers = [self.layers[i] for i in self.order]
        if self.branches:
            return self.head(sum(checkpoint(layer, x) if self.parts else layer(x) for layer in layers))
        for start in range(0, len(layers), max(self.parts, 1)):
            part = nn.Sequential(*layers[start : start + max(self.parts, 1)])
            x = checkpoint(part, x) if self.parts else part(x)
        return self.head(x)


class Recursive(Stack):
    """A layer that runs the next one inside its own forward, and itself again."""

    def __init__(self) -> None:
        super().__init__((0,))
        self.layers[0] = Outer()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.layers[0], x, 2))


class Frozen(Stack):
    """The first layer, which no gradient reaches, and the third, which it goes through, have nothing to train."""

    def __init__(self, parts: int) -> None:
        super().__init__((0, 1, 2, 3), parts)
        for i in (0, 2):
            self.layers[i].requires_grad_(False)


class Outer(Adapted):
    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        x = super().forward(x)
        return checkpoint(self, x, depth - 1) if depth else x


def make(kind: type[nn.Module] = Stack, *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*args)


def group_bytes(group: Any) -> int:
    return sum(p._orig_size.numel() * 4 for p in group.fsdp_params)


@contextmanager
def ledger(engine: TrainingEngine) -> Iterator[list[int]]:
    """Bytes of layers that are gathered or on their way, after each gathering."""
    held = [g for m in groups(engine.module.layers) for g in m._get_fsdp_state()._fsdp_param_groups]
    seen: list[int] = []

    def noting(group: Any, name: str) -> None:
        plain = getattr(group, name)

        def noted(*args: Any) -> None:
            plain(*args)
            seen.append(sum(group_bytes(g) for g in held if g.is_unsharded or g._all_gather_result is not None))

        setattr(group, name, noted)

    for group in held:
        noting(group, "unshard")
        noting(group, "wait_for_unshard")
    try:
        yield seen
    finally:
        for group in held:
            del group.unshard, group.wait_for_unshard


def peaks(settings: dict, kind: type[nn.Module], *args: Any) -> dict[str, Any]:
    engine = open_engine(settings, make(kind, *args))
    steps, found = micro_batches(2, 2), []
    with ledger(engine) as seen:
        for step in steps:
            for x, y in step:
                loss = loss_of(engine(share(engine, x)), share(engine, y))
                found.append(max(seen))
                seen.clear()
                engine.backward(loss)
                found.append(max(seen))
                seen.clear()
                found.append(len([n for n in gathered(engine.module) if n.startswith("layers")]))
                engine.step()
    layer = (WIDTH * WIDTH + WIDTH + 2 * RANK * WIDTH) * 4
    return {"peaks": found, "layer": layer, "weights": weights_of(engine), "left": gathered(engine.module)}


CASES = {
    "a part per layer": (Stack,),
    "no parts": (Stack, (0, 1, 2, 3), 0),
    "two layers in a part": (Stack, (0, 1, 2, 3), 2),
    "four layers in a part": (Stack, (0, 1, 2, 3), 4),
    "a layer twice": (Stack, (0, 1, 2, 1, 3)),
    "a layer twice in a row, in a part": (Stack, (0, 1, 1, 3), 2),
    "branches over the data": (Stack, (0, 1, 2, 3), 1, True),
    "branches without parts": (Stack, (0, 1, 2, 3), 0, True),
    "a branch twice": (Stack, (0, 1, 0, 3), 1, True),
    "recursion": (Recursive,),
    "frozen layers, a part each": (Frozen, 1),
    "frozen layers, four in a part": (Frozen, 4),
    "frozen layers without parts": (Frozen, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_two_layers_at_most_are_gathered(pool2, case):
    expected = plain_sgd(micro_batches(2, 2), module=make(*CASES[case]))
    for result in pool2.run(peaks, config(stage=3, accumulation=2), *CASES[case]):
        assert worst(result["weights"], expected) < 1e-5
        forward, backward, after = (result["peaks"][i::3] for i in range(3))
        assert max(forward) <= 2 * result["layer"]
        assert max(backward) <= 2 * result["layer"]
        assert set(after) == {0}
        assert result["left"] == []


def test_layers_true_is_as_strict(pool2):
    expected = plain_sgd(micro_batches(2, 2), module=make())
    settings = config(stage=3, accumulation=2, activation_checkpointing={"layers": True})
    for result in pool2.run(peaks, settings, Stack, (0, 1, 2, 3), 0):
        assert worst(result["weights"], expected) < 1e-5
        assert max(result["peaks"]) <= 2 * result["layer"]
        assert result["left"] == []


def failing(stage: int, where: str, order: tuple[int, ...], parts: int) -> dict[str, Any]:
    """A step that fails in a layer, then the same step again, and another."""
    engine = open_engine(config(stage=stage), make(Stack, order, parts))
    layer = engine.module.layers[1]
    if where == "backward":
        layer.fails_back = True
    else:
        layer.fails_at = 1 if where == "forward" else 2
    steps = micro_batches(2, 1)
    try:
        train(engine, steps[:1])
    except OSError:
        left = gathered(engine.module)
        gradients = [n for n, p in engine.module.named_parameters() if p.grad is not None]
    layer.fails_at, layer.fails_back = -1, False
    train(engine, steps)
    return {"left": left, "gradients": gradients, "weights": weights_of(engine), "after": gathered(engine.module)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("parts", "where"), [(1, "forward"), (1, "recomputation"), (2, "recomputation"), (1, "backward"), (0, "backward")]
)
def test_after_an_exception_the_same_step_is_right(pool2, stage, parts, where):
    expected = plain_sgd(micro_batches(2, 1), module=make())
    for result in pool2.run(failing, stage, where, (0, 1, 2, 3), parts):
        assert result["left"] == result["gradients"] == result["after"] == []
        assert worst(result["weights"], expected) < 1e-5
