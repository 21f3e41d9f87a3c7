"""What tests of the training engine share: a small module of several kinds of layers, its data, and plain SGD on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid import TrainingEngine, initialize

SAMPLES, WIDTH, CLASSES = 8, 8, 4
Steps = list[list[tuple[Tensor, Tensor]]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.up = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.up(self.norm(x)))


class Net(nn.Module):
    """Embedding by a linear layer, two blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.door = nn.Linear(WIDTH, 2 * WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.door(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net(seed: int = 0, kind: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def micro_batches(steps: int, accumulation: int, seed: int = 1) -> Steps:
    """Per step and backward (x [SAMPLES, WIDTH], y [SAMPLES, CLASSES]), over all ranks."""
    g = torch.Generator().manual_seed(seed)
    return [
        [(torch.randn(SAMPLES, WIDTH, generator=g), torch.randn(SAMPLES, CLASSES, generator=g)) for _ in range(accumulation)]
        for _ in range(steps)
    ]


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    return (out.float() - y).square().mean()


def config(*, stage: int = 3, accumulation: int = 1, lr: float = 0.1, ranks: int = 2, **keys: Any) -> dict[str, Any]:
    """SGD without clipping, so that weights move by exactly lr x gradient."""
    zero = {"stage": stage, **keys.pop("zero_optimization", {})}
    return {
        "train_micro_batch_size_per_gpu": SAMPLES // ranks,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": lr}},
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **keys,
    }


def open_engine(settings: dict[str, Any], module: nn.Module | None = None, **options: Any) -> TrainingEngine:
    return initialize(model=make_net() if module is None else module, config=settings, **options)[0]


def share(engine: TrainingEngine, tensor: Tensor) -> Tensor:
    """This rank's rows of a batch."""
    return tensor.chunk(engine.world_size)[engine.global_rank]


def train(engine: TrainingEngine, steps: Steps, *, loss: Callable[..., Tensor] = loss_of) -> list[float]:
    losses = []
    for step in steps:
        for x, y in step:
            value = loss(engine(share(engine, x)), share(engine, y))
            engine.backward(value)
            engine.step()
            losses.append(value.item())
    return losses


def whole(tensor: Tensor) -> Tensor:
    """Collective: a sharded tensor on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in engine.module.named_parameters()}


def plain_sgd(
    steps: Steps, *, lr: float = 0.1, max_norm: float | None = None, module: nn.Module | None = None
) -> dict[str, Tensor]:
    """The same training in one process without an engine."""
    net = make_net() if module is None else module
    trained = [p for p in net.parameters() if p.requires_grad]
    for step in steps:
        for x, y in step:
            (loss_of(net(x), y) / len(step)).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(trained, max_norm)
        with torch.no_grad():
            for p in trained:
                if p.grad is None:  # unused
                    continue
                p -= lr * p.grad
                p.grad = None
    return {name: p.detach() for name, p in net.named_parameters()}


def worst(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference, in units of each tensor's largest expected value."""
    assert given.keys() == expected.keys()
    pairs = [(given[name].float(), expected[name].float()) for name in expected if expected[name].numel()]
    return max(((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in pairs)
