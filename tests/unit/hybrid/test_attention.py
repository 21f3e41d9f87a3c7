"""Packed attention in training: the gradients of HF's own eager attention for every family, and who is not packed."""

from __future__ import annotations

import logging

import pytest
import torch
from hybrid_cases import cross_entropy, full_gradients, make_engine, pack, ragged_sequences, relative_error
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny
from torch import Tensor

from hybrid import attention
from hybrid.attention import PACKED
from hybrid.engine import HybridEngine
from inference_v2.kernels.cpu import BuildError

WINDOWS = {"mistral": 12, "exaone4": 8, "exaone4_5": 8}  # of the tiny configs; others get one of 6 where they may have one


def sequences_of(family: str) -> list[list[int]]:
    """Ragged, one of a single token, and lengths about each multiple of the window at which a key is lost."""
    window = WINDOWS.get(family, 6)
    lengths = [1, window - 1, window, window + 1, 2 * window, 70]  # 70: more than one tile
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 79, (n,), generator=generator).tolist() for n in lengths]


def settings_of(family: str) -> dict:
    if family in ("qwen2", "qwen3"):  # a window from the second layer on
        return {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return {}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """(folder, its sequences, eager HF's mean loss, its gradients): each sequence on its own, so nothing is padded or packed."""
    path, sequences = tmp_path_factory.mktemp(request.param), sequences_of(request.param)
    hf = save_tiny(path, request.param, **settings_of(request.param))
    hf.set_attn_implementation("eager")
    count, total = sum(len(s) - 1 for s in sequences), torch.zeros(())
    for sequence in sequences[1:]:
        ids = torch.tensor([sequence])
        total = total + torch.nn.functional.cross_entropy(hf(ids).logits[0, :-1, :79], ids[0, 1:], reduction="sum")
    (total / count).backward()
    return str(path), sequences, total.item() / count, {n: p.grad for n, p in hf.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["auto", "packed", "sdpa"])
def test_gradients_are_those_of_eager_attention(model, name):
    folder, sequences, loss, expected = model
    engine = make_engine(folder, attn_implementation=name)
    assert engine.model.packs == (name != "sdpa")
    given_loss = engine.forward_backward([pack(sequences)], cross_entropy)["loss"]
    gradients = full_gradients(engine)
    assert gradients.keys() == expected.keys()
    assert given_loss == pytest.approx(loss, rel=1e-5)
    assert max(relative_error(gradients[n], expected[n]) for n in expected) < 1e-5


def test_bf16_gradients_are_as_near_to_fp32_as_those_of_sdpa(model):
    folder, sequences, _, expected = model
    errors = {}
    for name in ("packed", "sdpa"):
        engine = make_engine(folder, attn_implementation=name, compute_dtype="bfloat16")
        engine.forward_backward([pack(sequences)], cross_entropy)
        gradients = full_gradients(engine)
        errors[name] = torch.tensor([(gradients[n] - expected[n]).norm() / expected[n].norm() for n in expected]).mean()
    assert errors["packed"] <= 1.2 * errors["sdpa"]


def split_error(folder: str, sequences: list[list[int]], stage: int, path: str) -> float:
    """One micro-batch on one rank, or several, and none at all on the last rank of two, against the first."""
    engine = make_engine(folder, zero_stage=stage, activation_checkpointing=stage % 2 == 1)
    assert engine.model.packs
    whole = engine.world_size == 1 and stage == 0
    batches = [pack(sequences)] if whole else [pack(sequences[:2]), pack(sequences[2:5]), pack(sequences[5:])]
    engine.forward_backward(batches if engine.rank == 0 else [], cross_entropy)
    gradients = full_gradients(engine)
    if whole:
        save_file(gradients, path)
    reference = load_file(path)
    return max(relative_error(gradients[n], reference[n]) for n in reference)


def test_any_split_ranks_and_stage_give_the_same_gradient(pool2, model, tmp_path):
    folder, sequences, _, _ = model
    path = str(tmp_path / "gradients.safetensors")
    assert split_error(folder, sequences, 0, path) == 0.0
    assert split_error(folder, sequences, 3, path) <= 2e-6
    for stage in range(4):
        assert max(pool2.run(split_error, folder, sequences, stage, path)) <= 2e-6


def test_a_sequences_log_probs_have_the_same_bits_in_any_company(tmp_path):
    """Its attention sees nothing of the others; linears are asked for nothing here, so their row count is kept."""
    save_tiny(tmp_path, "llama")
    engine, sequences = make_engine(str(tmp_path)), ragged_sequences(6)
    first = engine.score(pack(sequences))[: len(sequences[0]) - 1]
    others = [[(i + 1) % 70 + 3 for i in s] for s in sequences[1:]]
    assert torch.equal(engine.score(pack([sequences[0], *others]))[: len(first)], first)


def choice(caplog, folder, **config) -> tuple[HybridEngine, str]:
    """The engine, and what it said of its attention."""
    with caplog.at_level(logging.INFO, logger="hybrid.attention"):
        caplog.clear()
        engine = make_engine(str(folder), **config)
    (record,) = [r for r in caplog.records if r.name == "hybrid.attention"]
    return engine, record.getMessage()


def test_attention_dropout_is_honoured_by_sdpa(caplog, tmp_path):
    save_tiny(tmp_path, "llama", attention_dropout=0.5)
    engine, said = choice(caplog, tmp_path)
    assert engine.model.packs  # it is off
    assert said.endswith("packed attention")
    engine, said = choice(caplog, tmp_path, dropout=True)
    assert not engine.model.packs
    assert "sdpa attention, not packed: dropout is on and the model has attention_dropout=0.5" in said
    with pytest.raises(ValueError, match=r"attn_implementation=packed .*dropout is on"):
        make_engine(str(tmp_path), dropout=True, attn_implementation="packed")


@pytest.mark.parametrize("family", ["gpt2", "granite"])
def test_an_unregistered_model_is_packed_after_a_probe(caplog, tmp_path, family):
    save_tiny(tmp_path, family)
    engine, said = choice(caplog, tmp_path)
    assert engine.model.packs, said
    sequences = ragged_sequences(5)
    packed = engine.score(pack(sequences))
    torch.testing.assert_close(packed, make_engine(str(tmp_path), attn_implementation="eager").score(pack(sequences)))


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("bloom", {}, "does not call transformers' attention functions"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}, "it passes s_aux"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}, "differ by"),  # a state outside attention
    ],
)
def test_a_model_that_cannot_be_packed_says_why_and_trains_padded(caplog, tmp_path, family, settings, why):
    save_tiny(tmp_path, family, **settings)
    engine, said = choice(caplog, tmp_path)
    assert not engine.model.packs
    assert why in said
    assert engine.model.module.hf.get_decoder().config._attn_implementation in ("sdpa", "eager")
    sequences = ragged_sequences(4)
    together = engine.score(pack(sequences))
    torch.testing.assert_close(together, torch.cat([engine.score(pack([s])) for s in sequences]), rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="attn_implementation=packed"):
        make_engine(str(tmp_path), attn_implementation="packed")


def test_without_a_compiler_training_is_padded(caplog, tmp_path, monkeypatch):
    def failing() -> None:
        raise BuildError("no g++ was found")

    save_tiny(tmp_path, "llama")
    monkeypatch.setattr(attention, "load_kernels", failing)
    engine, said = choice(caplog, tmp_path)
    assert not engine.model.packs
    assert "sdpa attention, not packed: no g++ was found" in said


def test_a_packed_module_refuses_a_forward_without_bounds(tmp_path):
    hf = save_tiny(tmp_path, "llama")
    attention.use(hf, PACKED)
    with pytest.raises(ValueError, match="LlamaAttention cannot run packed: it hands on no packing"):
        hf(torch.ones(2, 3, dtype=torch.long))


def test_a_module_in_memory_is_packed_too(tmp_path):
    hf = save_tiny(tmp_path, "exaone4_5")
    with torch.no_grad():
        expected: Tensor = hf(torch.tensor([[5, 6, 7]])).logits[0, :-1].log_softmax(-1)
    engine = HybridEngine.from_module(hf, {})
    assert engine.model.packs
    scored = engine.score(pack([[5, 6, 7]]))
    torch.testing.assert_close(scored, expected.gather(1, torch.tensor([[6], [7]])).squeeze(1), rtol=0, atol=1e-5)
