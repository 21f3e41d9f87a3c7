"""Top-k gradients with error feedback: what is sent, what is kept back, and where training ends up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training_cases import config, loss_of, micro_batches, open_engine, plain_sgd, share, train, weights_of, whole, worst

from hybrid.training.compression import TopK


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def invariant(ratio: float) -> dict:
    """Two backwards with known gradients: what each rank sent, by what it kept."""
    settings = config(lr=1.0, gradient_allreduce_op="sum", gradient_compression={"ratio": ratio})
    engine = open_engine(settings, Weight())
    (compressed,) = engine._compressed
    g = torch.Generator().manual_seed(engine.global_rank)
    total, residuals = torch.zeros(12), []
    for _ in range(3):
        gradient = torch.randn(12, generator=g)
        total += gradient
        engine.backward(engine(gradient))
        engine.step()
        residuals.append(compressed.residual.clone())
    sent = total - residuals[-1]
    torch.distributed.all_reduce(sent)
    return {
        "moved": whole(engine.module.weight),
        "sent": sent,
        "zeros": int((residuals[-1] == 0).sum()),
        "bytes": (compressed.sent_bytes, compressed.dense_bytes),
    }


@pytest.mark.parametrize("ratio", [0.2, 0.34, 0.5])
def test_what_was_sent_and_what_is_kept_are_the_gradient(pool2, ratio):
    for result in pool2.run(invariant, ratio):
        torch.testing.assert_close(-result["moved"], result["sent"], rtol=1e-6, atol=1e-6)
        assert result["zeros"] >= 2 * int(ratio * 6)
        sent, dense = result["bytes"]
        assert dense == 3 * 24  # half of twelve fp32 values, three times
        assert sent <= ratio * (4 + 4) / 4 * dense


def run(settings: dict, steps: int = 3) -> dict:
    engine = open_engine(settings)
    train(engine, micro_batches(steps, 2))
    return weights_of(engine)


def test_a_ratio_of_1_is_the_uncompressed_sum(pool2):
    full = config(accumulation=2)
    almost = {**full, "gradient_compression": {"ratio": 0.9999999}}  # all but none of a small group
    exact, plain = pool2.run(run, {**full, "gradient_compression": {"ratio": 1.0}})[0], pool2.run(run, full)[0]
    assert all(torch.equal(exact[n], plain[n]) for n in plain)
    assert worst(exact, plain_sgd(micro_batches(3, 2))) < 1e-5
    assert worst(pool2.run(run, almost)[0], plain) > 0


class Quadratic(nn.Module):
    """Convex: the mean over ranks of |w - target of the rank|^2, each entry of another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, target: Tensor) -> Tensor:
        return ((self.weight - target).square() * torch.linspace(0.05, 1.0, 16)).sum()


def minimise(error_feedback: bool) -> float:
    section = {"ratio": 0.125, "error_feedback": error_feedback}
    engine = open_engine(config(lr=0.03, gradient_compression=section), Quadratic())
    targets = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)) * 4
    for _ in range(800):
        engine.backward(engine(targets[engine.global_rank]))
        engine.step()
    w, scale = whole(engine.module.weight), torch.linspace(0.05, 1.0, 16)
    value = lambda w: ((w - targets).square() * scale).sum(1).mean().item()  # noqa: E731
    best = value(targets.mean(0))
    return (value(w) - best) / best


def test_feedback_reaches_the_dense_optimum_and_its_absence_does_not(pool2):
    assert abs(pool2.run(minimise, True)[0]) < 0.01
    assert pool2.run(minimise, False)[0] > 0.01


def skipped() -> dict:
    engine = open_engine(config(bf16={"enabled": True}, gradient_compression={"ratio": 0.3}))
    ((x, y),), ((x2, y2),) = micro_batches(2, 1)
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    engine.step()
    before = [c.residual.clone() for c in engine._compressed]
    factor = float("inf") if engine.global_rank == 1 else 1.0
    engine.backward(factor * loss_of(engine(share(engine, x2)), share(engine, y2)))
    engine.step()
    after = [c.residual for c in engine._compressed]
    return {
        "skipped": engine.skipped_steps,
        "same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "finite": all(a.isfinite().all() for a in after),
    }


def test_a_skipped_step_leaves_what_was_kept_back(pool2):
    for result in pool2.run(skipped):
        assert result == {"skipped": 1, "same": True, "finite": True}


def test_what_cannot_be_compressed_is_refused():
    for keys in ({"stage": 0}, {"fp16": {"enabled": True}}):
        with pytest.raises(ValueError, match="gradient_compression"):
            open_engine(config(ranks=1, gradient_compression={"ratio": 0.1}, **keys))
    with pytest.raises(ValueError, match="ratio"):
        open_engine(config(ranks=1, gradient_compression={"ratio": 0.0}))
    assert TopK(0.5).residual is None
