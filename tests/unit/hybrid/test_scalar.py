"""Scalar models: a backbone with a head of one row, against transformers' sequence classification."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hybrid_cases import cross_entropy, full_gradients, full_weights, make_engine, pack, ragged_sequences, relative_error
from tiny import EOS, FAMILIES, PAD, character_tokenizer, save_tiny, tiny_config
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybrid.batch import Batch
from hybrid.engine import HybridEngine
from inference_v2.types import SamplingParams
from trainers.data.batching import read_at
from trainers.losses.policy import value_token_loss

TEXT_FAMILIES = tuple(family for family in FAMILIES if family != "exaone4_5")  # which has no sequence classifier
SEQUENCES = ragged_sequences(6)


def save_classifier(path: Path, family: str, *, seed: int = 0, **overrides: object) -> str:
    """A sequence classifier with one label, everything random, norm weights and biases too."""
    config = tiny_config(family, num_labels=1, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, mean=0.0 if name.endswith("bias") else 1.0, std=0.2)
        torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(path)
    character_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("classifiers")
    return {family: save_classifier(root / family, family) for family in TEXT_FAMILIES}


def scalar_engine(folder: str, **config: object) -> HybridEngine:
    """SGD without clipping."""
    optimizer = {"name": "sgd", "lr": 0.1, "max_grad_norm": None}
    return HybridEngine.from_pretrained(folder, {"optimizer": optimizer} | config, scalar=True)


def at_every_token() -> Batch:
    batch = pack(SEQUENCES)
    return read_at(batch, [range(len(s)) for s in SEQUENCES])


def scores_and_gradients(folder: str, attention: str = "auto") -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
    """Of every token; then the gradients of half the mean square distance from 1."""
    engine = scalar_engine(folder, attn_implementation=attention)
    batch = at_every_token()
    scores = engine.model.scores(batch)
    ones = replace(batch, returns=torch.ones(batch.num_targets))
    means = engine.forward_backward([ones] if engine.rank == 0 else [], value_token_loss(None))
    gradients = full_gradients(engine)
    engine.close()
    return scores, gradients, means


def expected_of(folder: str) -> tuple[list[Tensor], dict[str, Tensor], float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [model.score(model.model(torch.tensor([s])).last_hidden_state[0])[:, 0] for s in SEQUENCES]
    loss = (torch.cat(rows) - 1).square().mean() / 2
    loss.backward()
    with torch.no_grad():  # the head is read where transformers reads it
        logits = [model(torch.tensor([s])).logits for s in SEQUENCES]
    for row, logit in zip(rows, logits, strict=True):
        assert logit.shape == (1, 1)
        torch.testing.assert_close(logit[0, 0], row[-1], rtol=0, atol=1e-5)
    return [r.detach() for r in rows], {n: p.grad for n, p in model.named_parameters()}, loss.item()


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_scores_and_gradients_are_transformers(folders, pool2, family):
    """Packed and padded on one rank, and on two, where one holds no row of the head."""
    rows, gradients, loss = expected_of(folders[family])
    found = [scores_and_gradients(folders[family], name) for name in ("packed", "sdpa")]
    found += pool2.run(scores_and_gradients, folders[family])
    for scores, grads, means in found:
        torch.testing.assert_close(scores, torch.cat(rows), rtol=0, atol=1e-4)
        assert means["loss"] == pytest.approx(loss, rel=1e-5)
        assert grads.keys() == gradients.keys()
        for name, gradient in grads.items():
            assert relative_error(gradient, gradients[name]) <= 1e-4, name


@pytest.mark.parametrize("tied", [False, True])
def test_a_causal_lm_gets_a_head_of_zeros_in_place_of_its_vocabulary(tmp_path, tied):
    """Scores are 0 and the head's gradient is not: the first step moves them. The backbone is the folder's."""
    save_tiny(tmp_path / "lm", "qwen3", tie_word_embeddings=tied)
    engine = make_engine(str(tmp_path / "lm"))
    scalar = HybridEngine.from_pretrained(str(tmp_path / "lm"), engine.config, scalar=True)
    weights, own = full_weights(scalar), full_weights(engine)
    assert torch.equal(weights.pop("score.weight"), torch.zeros(1, 64))
    own.pop("lm_head.weight", None)
    assert weights.keys() == own.keys()
    assert all(torch.equal(weights[name], own[name]) for name in weights)
    batch = at_every_token()
    assert torch.equal(scalar.model.scores(batch), torch.zeros(batch.num_targets))
    target = replace(batch, returns=torch.ones(batch.num_targets))
    losses = []
    for _ in range(3):
        losses.append(scalar.forward_backward([target], value_token_loss(None))["loss"])
        scalar.optim_step()
    assert losses[0] == 0.5
    assert losses[2] < losses[0]
    scalar.close()
    engine.close()


def test_every_parameter_is_trained_once_the_head_too(folders):
    """In groups that leave norms without weight decay."""
    engine = HybridEngine.from_pretrained(folders["llama"], {"optimizer": {"weight_decay": 0.1}}, scalar=True)
    parameters = engine.model.parameters()
    grouped = [id(p) for group in engine.optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(map(id, parameters.values()))
    decayed = {id(p) for p in engine.optimizer.param_groups[0]["params"]}
    assert {name for name, p in parameters.items() if id(p) in decayed} == {n for n, p in parameters.items() if p.ndim > 1}
    assert id(parameters["score.weight"]) in decayed
    engine.close()


def test_generating_from_one_is_refused(folders):
    engine = scalar_engine(folders["qwen2"])
    for verb in (engine.generate, engine.generate_together):
        with pytest.raises(ValueError, match="no vocabulary to generate from"):
            verb([[3, 4]], SamplingParams(max_new_tokens=2))
    with pytest.raises(ValueError, match="no vocabulary to generate from"):
        engine.score_sequences([[3, 4]])
    engine.close()


@pytest.mark.parametrize("pad", [PAD, EOS])
def test_the_saved_folder_scores_alike_in_transformers(folders, tmp_path, pad):
    """One row at a time, and as right-padded batches where padding is not also the end; where it is, transformers says it cannot,
    which is better than a score read at the wrong token."""
    tokenizer = character_tokenizer()
    if pad == EOS:
        tokenizer.pad_token = tokenizer.eos_token
    source = tmp_path / "source"
    shutil.copytree(folders["qwen3"], source)
    tokenizer.save_pretrained(source)
    engine = scalar_engine(str(source))
    responses = [[*s, EOS] for s in SEQUENCES]
    batch = pack(responses)
    scores = engine.model.scores(read_at(batch, [[len(s) - 1] for s in responses]))
    engine.save_pretrained(tmp_path / "out")
    engine.close()
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert (type(model).__name__, model.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()
    longest = max(map(len, responses))
    padded = torch.tensor([[*r, *[pad] * (longest - len(r))] for r in responses])
    with torch.no_grad():
        rows = torch.cat([model(torch.tensor([r])).logits[:, 0] for r in responses])
        torch.testing.assert_close(scores, rows, rtol=0, atol=1e-5)
        if pad == PAD:
            mask = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in responses])
            torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 0], rows, rtol=0, atol=1e-5)
        else:
            assert model.config.pad_token_id is None
            with pytest.raises(ValueError, match="Cannot handle batch sizes > 1"):
                model(padded)


def test_what_is_no_scalar_model_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match=r"score.weight"):
        make_engine(folders["llama"])  # as a causal LM
    save_tiny(tmp_path / "vision", "exaone4_5")
    with pytest.raises(ValueError, match="model_type='exaone4_5' has no sequence classifier"):
        scalar_engine(str(tmp_path / "vision"))
    two = AutoModelForSequenceClassification.from_config(tiny_config("llama", num_labels=2))
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(ValueError, match="has 2 labels; allowed: 1"):
        scalar_engine(str(tmp_path / "two"))


def test_a_checkpoint_holds_another_trained_model_beside_the_policy(folders, tmp_path):
    """Weights, optimizer state and schedule of both; one without the other does not pass for it."""
    save_tiny(tmp_path / "lm", "qwen3")

    def engines():
        adamw = {"optimizer": {"name": "adamw", "lr": 1e-2, "schedule": "linear", "total_steps": 9}}
        return make_engine(str(tmp_path / "lm"), **adamw), scalar_engine(folders["qwen3"], **adamw)

    def step(policy, critic):
        batch = pack(SEQUENCES)
        policy.forward_backward([batch], cross_entropy)
        policy.optim_step()
        for _ in range(2):  # the critic is a step ahead
            values = replace(at_every_token(), returns=torch.ones(sum(map(len, SEQUENCES))))
            critic.forward_backward([values], value_token_loss(None))
            critic.optim_step()

    policy, critic = engines()
    step(policy, critic)
    policy.save(tmp_path / "step_1", {"x": 1}, others={"critic": critic})
    step(policy, critic)
    resumed, other = engines()
    assert resumed.load(tmp_path / "step_1", others={"critic": other}) == {"x": 1}
    assert (resumed.step_count, other.step_count) == (1, 2)
    step(resumed, other)
    for first, second in ((policy, resumed), (critic, other)):
        mine, theirs = full_weights(first), full_weights(second)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert first.lr_scheduler.get_last_lr() == second.lr_scheduler.get_last_lr()
    policy.save(tmp_path / "step_2")
    before = full_weights(resumed)
    with pytest.raises(ValueError, match="step_2 holds no critic beside the policy"):
        resumed.load(tmp_path / "step_2", others={"critic": other})
    assert all(torch.equal(before[name], tensor) for name, tensor in full_weights(resumed).items())
    resumed.load(tmp_path / "step_1")  # the policy alone may be read, for an export
    for engine in (policy, critic, resumed, other):
        engine.close()
