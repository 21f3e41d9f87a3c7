"""The memory plan beside what engines hold: shards, gradients, optimizer state, fused copy and KV pool to the byte, the rest
within a factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doctor_cases import healthy, of, rows, tree
from hybrid_cases import bytes_of, pack, ragged_sequences
from tiny import save_tiny
from trainer_cases import configure

from hybrid.config import HybridConfig
from hybrid.engine import HybridEngine
from hybrid.loss_head import cross_entropy
from hybrid.modes import copy_bytes
from inference_v2.loading import load_model
from inference_v2.types import SamplingParams
from recipes.doctor import memory
from recipes.doctor.case import Case
from recipes.doctor.plan import Plan

POOL = {"rollout": {"on_leave": "keep", "gather": "full", "engine": {"cache_bytes": 200_000, "block_size": 4}}}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"compute_dtype": "bfloat16"},
    "bf16 masters": {"compute_dtype": "bfloat16", "master_dtype": "bfloat16", "vocab_limit": 50},
    "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "lion": {"optimizer": {"name": "lion"}},
    "adafactor": {"optimizer": {"name": "adafactor"}},
    "muon": {"optimizer": {"name": "muon"}},
    "frozen": {"freeze": ["mlp", "norm"], "kernels": "reference"},
    "replicated": {"zero_stage": 0},
    "adapter": {"compute_dtype": "bfloat16", "lora": {"r": 3, "target_modules": ["q_proj", "down_proj"]}},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "untied": ("llama", {"attention_bias": True, "vocab_size": 97}),  # rows that no two ranks share evenly
    "windowed": ("exaone4", {}),
    "tower": ("exaone4_5", {}),
    "unregistered": ("olmo2", {}),
}


def config_of(name: str) -> dict[str, Any]:
    given = dict(SETTINGS[name])
    rollout = {**POOL["rollout"], "engine": {**POOL["rollout"]["engine"], "kernels": given.pop("kernels", "auto")}}
    return given | {"rollout": rollout}


def held(folder: str, config: dict[str, Any], *, scalar: bool = False) -> dict[str, int]:
    """Bytes that an engine holds on this rank after a step and a stay in generation."""
    engine = HybridEngine.from_pretrained(folder, config, scalar=scalar)
    batch = pack(ragged_sequences(4, vocab_size=49))
    loss = (lambda logits, chunk: (logits.squeeze(1), {})) if scalar else cross_entropy
    engine.forward_backward([batch], loss)
    parameters = engine.model.parameters()
    found = {
        "shards": sum(t.nbytes for t in engine.model.local_shards().values()),
        "gradients": sum(p.grad.to_local().nbytes for p in parameters.values() if p.grad is not None),
    }
    engine.optim_step()
    states = [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    found["optimizer"] = sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in states)
    if not scalar:
        engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
        assert engine.ledger is not None
        found["copy"] = engine.ledger.copy_bytes
        found["pool"] = engine._generation._engine._runner.cache_nbytes
        if engine.model.spec is not None:
            assert copy_bytes(engine.model, engine.model.spec) == found["copy"]
    engine.close()
    return found


def planned(folder: str, config: dict[str, Any], ranks: int, rank: int, *, scalar: bool = False) -> dict[str, int]:
    settings = HybridConfig.model_validate(config)
    shape = memory.read_shape(load_model(folder), settings, scalar=scalar)
    if settings.zero_stage == 0:
        ranks, rank = 1, 0
    master, compute = (getattr(torch, name) for name in (settings.master_dtype, settings.compute_dtype))
    engine = settings.rollout.engine
    optimizer = memory.optimizer_bytes(shape.trained, settings.optimizer, ranks, master.itemsize, rank=rank)
    found = {
        "shards": memory.held_bytes(shape, ranks, master.itemsize, compute.itemsize, rank=rank),
        "gradients": memory.shard_bytes(shape.trained, ranks, master.itemsize, rank=rank),
        "optimizer": optimizer,
    }
    if not scalar:
        found["copy"] = memory.fused_copy_bytes(shape, compute.itemsize, packs=engine.kernels == "auto")
        found["pool"] = memory.kv_pool_bytes(shape.spec, engine, compute, shape.spec.max_position_embeddings)
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, (family, changes) in MODELS.items():
        save_tiny(folder / name, family, **changes)
    return folder


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        *((model, "fp32") for model in MODELS),
        ("tied", "bf16"),
        ("untied", "bf16"),
        ("untied", "bf16 masters"),
        ("tied", "sgd"),
        ("untied", "lion"),
        ("untied", "adafactor"),
        ("untied", "muon"),
        ("untied", "frozen"),
        ("untied", "replicated"),
        ("tied", "adapter"),
        ("untied", "adapter"),
        ("windowed", "adapter"),
    ],
)
def test_two_ranks_hold_what_is_planned_to_the_byte(model, settings, models, pool2):
    config = config_of(settings)
    real = pool2.run(held, str(models / model), config)
    for rank in range(2):
        plan = planned(str(models / model), config, 2, rank)
        if model == "unregistered":  # a module's copy counts its rotary tables too
            assert plan["copy"] == pytest.approx(real[rank].pop("copy"), rel=1e-3)
            del plan["copy"]
        assert plan == real[rank], f"rank {rank}"


@pytest.mark.parametrize("settings", ["fp32", "adapter"])
def test_a_scalar_model_is_planned_with_its_own_head(settings, models, pool2):
    real = pool2.run(held, str(models / "untied"), config_of(settings), scalar=True)
    for rank in range(2):
        assert planned(str(models / "untied"), config_of(settings), 2, rank, scalar=True) == real[rank]


def saved_for_backward(folder: str, config: dict[str, Any], tokens: int) -> int:
    """Bytes that the forward of a batch keeps, the weights and what is constant left out."""
    engine = HybridEngine.from_pretrained(folder, config)
    batch = pack([[5 + i % 40 for i in range(tokens // 10)] for _ in range(10)])
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tokens in tensor.shape:
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.enable_grad():
        engine.model.module(batch)
    engine.close()
    return bytes_of(kept)


@pytest.mark.parametrize("family", ["llama", "qwen3", "exaone4"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_planned_within_a_fifth(family, fused, dtype, tmp_path, pool2):
    save_tiny(tmp_path / "model", family, hidden_size=128, intermediate_size=320, num_attention_heads=8)
    config = {"compute_dtype": dtype, "fused_layers": fused}
    tokens = 1000
    real, _ = pool2.run(saved_for_backward, str(tmp_path / "model"), config, tokens)
    spec = load_model(tmp_path / "model").spec
    itemsize = getattr(torch, dtype).itemsize
    plan = memory.activation_bytes(spec, tokens, itemsize, fused=fused, checkpointing=False)
    assert real / 1.2 < plan < real * 1.2
    less = memory.activation_bytes(spec, tokens, itemsize, fused=fused, checkpointing=True)
    layer = tokens * memory.layer_activations(spec, itemsize, fused=fused)
    kept, _ = pool2.run(saved_for_backward, str(tmp_path / "model"), config | {"activation_checkpointing": True}, tokens)
    assert kept / 1.5 < less - layer < kept * 1.5


# -- a recipe's plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return healthy(tmp_path_factory.mktemp("healthy"))


def plan_of(recipe, folder, *, nproc=1, **changes):
    with Case.opened(configure(tree(recipe, folder, **changes)), nproc=nproc) as case:
        return {phase.name: phase.parts for phase in Plan(case).phases()}


def test_phases_and_their_models(folder):
    assert list(plan_of("reward", folder)) == ["train", "checkpoint"]
    assert list(plan_of("sft", folder)) == ["rollout", "train", "checkpoint"]  # it evaluates
    phases = plan_of("ppo", folder)
    assert list(phases) == ["rollout", "score", "train", "checkpoint"]
    for parts in phases.values():
        assert {"policy shards", "policy optimizer", "critic shards", "critic optimizer", "reference copy", "reward shards"} <= {
            *parts
        }
    assert "policy KV pool" in phases["rollout"]
    assert "policy gradients" in phases["train"]
    assert "policy gradients" not in phases["rollout"]


def test_what_stays_is_in_every_phase(folder):
    kept = plan_of("opsd", folder, **{"engine.rollout": {"on_leave": "keep"}})
    assert all({"policy copy", "policy KV pool", "teacher copy"} <= {*parts} for parts in kept.values())
    freed = plan_of("opsd", folder)
    assert [name for name, parts in freed.items() if "policy copy" in parts] == ["rollout"]
    live = plan_of("opsd", folder, teacher={"kind": "self", "weights": "live"})
    assert "teacher copy" not in live["score"]
    assert "policy copy" in live["score"]
    averaged = plan_of("opsd", folder, teacher={"kind": "self", "weights": "ema"})
    assert averaged["train"]["teacher shards"] == averaged["train"]["policy shards"]


def test_more_ranks_hold_less_each_and_streamed_layers_no_copy(folder):
    one, two = (plan_of("sft", folder, nproc=n)["train"] for n in (1, 2))
    assert one["policy shards"] == 2 * two["policy shards"]
    assert one["policy optimizer"] > 1.9 * two["policy optimizer"]
    streamed = plan_of("opsd", folder, **{"engine.rollout": {"gather": "stream"}})
    assert "policy copy" not in streamed["rollout"]
    assert "teacher shards" in streamed["train"]


def test_a_plan_that_does_not_fit_says_what_to_do(folder):
    (found, *_) = of(rows("opsd", folder, **{"engine.rollout": {"engine": {"cache_bytes": 10**15}}}), "memory")
    assert found.level == "FAIL"
    assert found.found.startswith("rollout: 1000000.")
    assert "policy KV pool 1000000.00 GB" in found.found
    assert "engine.rollout.engine.cache_bytes" in found.remedy


def test_a_gpu_that_is_not_here_is_compared_with_nothing(folder):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    found = of(rows("opsd", folder, **{"engine.device": "cuda"}), "memory")
    assert all(f.level == "ok" and "no GPU is here to compare with" in f.found for f in found)
