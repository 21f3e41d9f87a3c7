"""The engine's checkpoints and exports: what is written is what was trained, and training goes on from it."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import cross_entropy, full_weights, hf_module, make_engine, pack, ragged_sequences
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from transformers import AutoTokenizer

SEQUENCES = ragged_sequences(8)
SETTINGS = {"optimizer": {"name": "adamw", "lr": 1e-2, "schedule": "cosine", "total_steps": 6, "warmup_steps": 1}}


def _steps(engine, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        mine = SEQUENCES[engine.rank :: engine.world_size]
        losses.append(engine.forward_backward([pack(mine)], cross_entropy)["loss"])
        losses.append(engine.optim_step()["lr"])
    return losses


def train_and_save(path: str, checkpoint: str, stage: int) -> dict:
    engine = make_engine(path, zero_stage=stage, **SETTINGS)
    _steps(engine, 2)
    engine.save(checkpoint, {"position": [1, 2]})
    version = engine.weight_version
    losses = _steps(engine, 2)
    torch.manual_seed(0)
    weights = full_weights(engine)
    if engine.rank == 0:
        save_file(weights, f"{path}/expected.safetensors")
    return {"losses": losses, "version": version}


def resume(path: str, checkpoint: str, stage: int) -> dict:
    engine = make_engine(path, zero_stage=stage, **SETTINGS)
    engine.weight_version = 1
    extra = engine.load(checkpoint)
    version = engine.weight_version
    losses = _steps(engine, 2)
    expected = load_file(f"{path}/expected.safetensors")
    weights = full_weights(engine)
    equal = all(torch.equal(weights[n], expected[n]) for n in expected)
    error = max((weights[n] - expected[n]).abs().max().item() for n in expected)
    return {"extra": extra, "version": version, "losses": losses, "equal": equal, "error": error, "steps": engine.step_count}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_resumed_engine_is_bit_equal_at_the_same_rank_count_and_close_at_another(pool2, tmp_path, stage):
    save_tiny(tmp_path, "llama", vocab_size=97)
    checkpoint = str(tmp_path / "checkpoints" / "step_2")
    saved = pool2.run(train_and_save, str(tmp_path), checkpoint, stage)
    for before, after in zip(saved, pool2.run(resume, str(tmp_path), checkpoint, stage), strict=True):
        assert after["equal"]
        assert after["losses"] == before["losses"]
        assert after["extra"] == {"position": [1, 2]}
        assert after["version"] == before["version"] == 2
        assert after["steps"] == 4
    alone = resume(str(tmp_path), checkpoint, 3)
    assert alone["error"] < 1e-5
    assert alone["losses"] == pytest.approx(saved[0]["losses"], abs=1e-5)


def test_a_load_into_a_used_engine_raises_the_version(tmp_path):
    save_tiny(tmp_path, "llama")
    engine = make_engine(str(tmp_path), **SETTINGS)
    _steps(engine, 1)
    engine.save(tmp_path / "checkpoints" / "step_1")
    _steps(engine, 2)
    engine.load(tmp_path / "checkpoints" / "step_1")
    assert engine.weight_version == 4
    assert engine.step_count == 1


def export(path: str, out: str, dtype: str | None) -> bool:
    engine = make_engine(path, compute_dtype="bfloat16", **SETTINGS)
    _steps(engine, 1)
    engine.save_pretrained(out, dtype)
    hf = hf_module(out)
    weights = full_weights(engine)
    kept = torch.bfloat16 if dtype is None else getattr(torch, dtype)
    names = dict(hf.named_parameters())
    trained = {n: w for n, w in weights.items() if not n.startswith("model.visual.")}
    return names.keys() == weights.keys() and all(torch.equal(names[n], w.to(kept).float()) for n, w in trained.items())


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("family", ["qwen2", "exaone4_5"])
def test_an_export_is_a_hf_folder_of_the_trained_weights(pool2, tmp_path, family, dtype):
    save_tiny(tmp_path / "in", family, tie_word_embeddings=family == "qwen2")
    out = tmp_path / "out"
    assert pool2.run(export, str(tmp_path / "in"), str(out), dtype) == [True, True]
    assert AutoTokenizer.from_pretrained(out)("3+4").input_ids == AutoTokenizer.from_pretrained(tmp_path / "in")("3+4").input_ids
    before, after = load_file(tmp_path / "in" / "model.safetensors"), {}
    for file in out.glob("*.safetensors"):
        after |= load_file(file)
    visual = [n for n in before if "visual." in n]
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in visual)
    assert (family == "exaone4_5") == bool(visual)
