"""Optimizer state and the step in host memory: the same numbers, in the same checkpoints; shards held by some of the ranks."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import cross_entropy, full_weights, make_engine, pack, ragged_sequences
from tiny import save_tiny

from hybrid import HybridEngine
from hybrid.sharding import local

SEQUENCES = ragged_sequences(8)
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}


def steps(engine: HybridEngine, count: int) -> None:
    for _ in range(count):
        engine.forward_backward([pack(SEQUENCES[engine.rank :: engine.world_size])], cross_entropy)
        engine.optim_step()


def run(path: str, count: int, save: str | None, load: str | None, config: dict) -> dict:
    engine = make_engine(path, optimizer=ADAMW, **config)
    if load is not None:
        engine.load(load)
    steps(engine, count)
    if save is not None:
        engine.save(save)
    copies = [] if engine._mirror is None else list(engine._mirror.named(engine.model.parameters()).values())
    originals = [p.data_ptr() for p in map(local, engine.model.parameters().values())]
    return {
        "weights": full_weights(engine),
        "apart": all(local(c).data_ptr() not in originals for c in copies),
        "copies": len(copies),
        "equal": all(torch.equal(local(c), local(p)) for c, p in zip(copies, engine.model.parameters().values(), strict=False)),
        "stepped": {type(p).__name__ for p in engine.optimizer.state},
        "left": [n for n, p in engine.model.parameters().items() if p.grad is not None],
    }


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_in_host_memory_is_the_same_step(pool2, tmp_path, stage):
    save_tiny(tmp_path, "llama")
    plain = pool2.run(run, str(tmp_path), 3, None, None, {"zero_stage": stage})
    for result, expected in zip(
        pool2.run(run, str(tmp_path), 3, None, None, {"zero_stage": stage, "offload_optimizer": True}), plain, strict=True
    ):
        assert all(torch.equal(result["weights"][n], w) for n, w in expected["weights"].items())
        assert result["apart"]  # real copies, also where host memory is all there is
        assert result["equal"]
        assert result["copies"] == len(expected["weights"])
        assert result["left"] == []
        assert expected["copies"] == 0


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_a_checkpoint_is_the_same_with_and_without(pool2, tmp_path, first, second):
    save_tiny(tmp_path / "model", "llama")
    path, saved = str(tmp_path / "model"), str(tmp_path / "saved")
    whole = pool2.run(run, path, 4, None, None, {})[0]["weights"]
    pool2.run(run, path, 2, saved, None, {"offload_optimizer": first})
    resumed = pool2.run(run, path, 2, None, saved, {"offload_optimizer": second})[0]["weights"]
    assert all(torch.equal(resumed[n], w) for n, w in whole.items())


@pytest.mark.parametrize("stage", [1, 3])
def test_two_of_four_ranks_hold_a_copy_together(pool4, tmp_path, stage):
    save_tiny(tmp_path, "llama")
    whole = run(str(tmp_path), 3, None, None, {})["weights"]
    for result in pool4.run(run, str(tmp_path), 3, None, None, {"zero_stage": stage, "shard_ranks": 2}):
        assert max((result["weights"][n] - w).abs().max().item() for n, w in whole.items()) < 1e-4


def test_shards_and_stage_0_are_refused_together(tmp_path):
    save_tiny(tmp_path, "llama", num_hidden_layers=1)
    with pytest.raises(ValueError, match="shard_ranks=2 with zero_stage=0"):
        make_engine(str(tmp_path), zero_stage=0, shard_ranks=2)


def changed_before_a_save(path: str, saved: str) -> dict:
    engine = make_engine(path, optimizer=ADAMW, offload_optimizer=True)
    for parameter in engine.model.parameters().values():
        parameter.data.mul_(0.5)
    expected = full_weights(engine)
    engine.save(saved)
    again = make_engine(path, optimizer=ADAMW, offload_optimizer=True)
    again.load(saved)
    loaded = full_weights(again)
    return {name: torch.equal(loaded[name], weight) for name, weight in expected.items()}


def test_weights_that_the_caller_changed_are_saved(pool2, tmp_path):
    save_tiny(tmp_path / "model", "llama")
    for result in pool2.run(changed_before_a_save, str(tmp_path / "model"), str(tmp_path / "saved")):
        assert all(result.values())
