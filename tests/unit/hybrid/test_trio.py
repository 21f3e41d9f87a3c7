"""`initialize` and the trio engine(batch) / backward / step, for those who come from DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import full_weights, hf_module, make_engine, relative_error
from tiny import save_tiny, tiny_model

from hybrid import initialize
from hybrid.batch import packed_batch
from hybrid.sharding import gathered

IDS = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 10, 11, 12, 13, 14]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
LABELS = torch.tensor([[5, 6, -100, 8, -100, -100], [-100, -100, 11, 12, 13, 14]])
CONFIG = {"optimizer": {"name": "sgd", "lr": 0.1, "max_grad_norm": None}}


def _batch(rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS[rows], "attention_mask": MASK[rows], "labels": LABELS[rows]}


def trio(path: str) -> dict:
    engine, optimizer, dataloader, scheduler = initialize(path, {**CONFIG, "vocab_limit": 96})
    assert optimizer is engine.optimizer
    assert scheduler is engine.lr_scheduler
    assert dataloader is None
    hf = hf_module(path)
    expected = hf(**_batch()).loss
    (expected * 2).backward()  # the engine runs the batch twice
    rows = slice(None) if engine.world_size == 1 else slice(engine.rank, engine.rank + 1)
    losses = []
    for _ in range(2):
        loss = engine(_batch(rows))
        engine.backward(loss)
        losses.append(loss.item())
    engine.step()
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter -= 0.1 * parameter.grad
        after = engine(_batch(rows)).item()
        expected_after = hf(**_batch()).loss.item()
    weights = dict(hf.named_parameters())
    return {
        "loss": max(abs(loss - expected.item()) for loss in losses),
        "after": abs(after - expected_after),
        "weights": max(relative_error(w, weights[n]) for n, w in full_weights(engine).items()),
        "left": gathered(engine.model.module),
        "version": engine.weight_version,
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_trio_trains_as_hf_does_on_the_whole_batch(request, tmp_path, ranks):
    save_tiny(tmp_path, "llama")
    results = [trio(str(tmp_path))] if ranks == 1 else request.getfixturevalue("pool2").run(trio, str(tmp_path))
    for result in results:
        assert result["loss"] < 1e-5
        assert result["after"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["left"] == []
        assert result["version"] == 1


def test_padding_on_the_left_or_right_is_the_same():
    left = {
        name: torch.stack([row.roll(2) if i == 0 else row for i, row in enumerate(value)]) for name, value in _batch().items()
    }
    right, left = packed_batch(_batch()), packed_batch(left)
    for name in ("token_ids", "positions", "cu_seqlens", "loss_index", "targets", "sequence_index"):
        assert torch.equal(getattr(right, name), getattr(left, name)), name
    assert right.targets.tolist() == [6, 8, 11, 12, 13, 14]  # the first token of a row is predicted by none


def test_shapes_that_differ_are_refused():
    with pytest.raises(ValueError, match="one shape"):
        packed_batch({"input_ids": IDS, "labels": LABELS[:, :3]})


def test_a_module_in_memory_is_taken_as_it_is():
    engine, *_ = initialize(tiny_model("llama"), CONFIG)
    assert engine.model.path is None
    engine.backward(engine(_batch()))
    assert engine.step()["grad_norm"] > 0


def test_an_unknown_setting_is_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    with pytest.raises(ValueError, match="zero_stages"):
        make_engine(str(tmp_path), zero_stages=3)
