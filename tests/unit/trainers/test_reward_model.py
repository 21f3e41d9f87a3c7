"""Reward models: their training on pairs, the folder that is left, and what a folder is worth as a reward."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rl_cases import SGD, assert_same_weights, models, parts, policy_settings, recording, run_and_watch, scorer_folder
from tiny import save_tiny
from trainer_cases import CHARACTERS, lines, run, settings, tiny_folder
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trainers.new_model import character_tokenizer
from trainers.sampler import Sampler

PAD, EOS = 0, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(folder, tmp_path):
    def make(name: str = "run", **changes):
        defaults = {"data.train": str(folder / "pairs.jsonl"), "data.shuffle": False, "model.path": str(folder / "scorer"),
                    "engine.optimizer": dict(SGD), "max_steps": 1, "output_dir": str(tmp_path / name)}  # fmt: skip
        return settings("reward", folder, **defaults | changes)

    return make


def rows(folder: Path, count: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "pairs.jsonl").read_text().splitlines()][:count]


def ids_of(prompt: str, response: str) -> list[int]:
    return [CHARACTERS.index(c) + 2 for c in prompt + response] + [EOS]


def hf_score(model, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0, 0]


# -- training


@pytest.mark.parametrize("attention", ["packed", "sdpa"])
@pytest.mark.parametrize("loss", [{}, {"margin": True}, {"centring": 0.05}, {"margin": True, "centring": 0.1}])
def test_a_step_is_that_of_the_loop(make, folder, loss, attention):
    """The mean over pairs of -log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2, and its gradient, with
    transformers' scores; in micro-batches of a pair each."""
    tree = make(loss=loss, **{"train.micro_batch_tokens": 16, "engine.attn_implementation": attention})
    _, records = run(tree)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "scorer", dtype=torch.float64).eval()
    losses, scores = [], []
    for row in rows(folder, 3):
        chosen, rejected = (hf_score(model, ids_of(row["prompt"], row[name])) for name in ("chosen", "rejected"))
        margin = row["margin"] if loss.get("margin") else 0.0
        losses.append(
            torch.log1p(torch.exp(-(chosen - rejected - margin))) + loss.get("centring", 0.0) * (chosen + rejected) ** 2
        )
        scores.append((chosen.item(), rejected.item()))
    mean = sum(losses) / 3
    mean.backward()
    record = records[1]
    assert record["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert record["accuracy"] == pytest.approx(sum(c > r for c, r in scores) / 3)
    assert record["margin"] == pytest.approx(sum(c - r for c, r in scores) / 3, abs=1e-5)
    assert record["chosen_score"] == pytest.approx(sum(c for c, _ in scores) / 3, abs=1e-5)
    assert record["rejected_score"] == pytest.approx(sum(r for _, r in scores) / 3, abs=1e-5)
    left = parts(tree)["model"]
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - SGD["lr"] * parameter.grad
        torch.testing.assert_close(left[name].double(), expected, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_it_learns_and_its_folder_scores_the_same_in_transformers(make, folder):
    """From a causal LM, whose head starts at 0; held-out accuracy before and after; single rows, and right-padded batches."""
    changes = {"max_steps": 40, "engine.optimizer": {"lr": 5e-3}, "train.batch_size": 5, "checkpoint.every": None,
               "train.micro_batch_tokens": 400}  # fmt: skip
    tree = make(**{"model.path": str(folder / "student"), "data.eval": str(folder / "pairs.jsonl")}, **changes)
    result, records = run(tree)
    assert records[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)  # all scores are 0
    assert result.before == {"step": 0, "eval_accuracy": 0.5, "eval_margin": 0.0}
    assert result.after["eval_accuracy"] == 1.0
    out = Path(tree["output_dir"]) / "model"
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (model.config.num_labels, model.config.pad_token_id) == (1, 0)
    texts = [row["prompt"] + row[name] + "<eos>" for row in rows(folder, 10) for name in ("chosen", "rejected")]
    with torch.no_grad():
        single = torch.stack([hf_score(model, tokenizer(text)["input_ids"]) for text in texts])
        batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        together = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0]
    torch.testing.assert_close(together, single, rtol=0, atol=1e-5)
    differences = single[0::2] - single[1::2]
    assert result.after["eval_margin"] == pytest.approx(differences.mean().item(), abs=1e-5)
    assert bool((differences > 0).all())


def test_two_ranks_train_and_judge_as_one(make, pool2, folder):
    """Pairs stay together; with 3 in a step one rank has more; the evaluation is over all of them."""
    changes = {"max_steps": 3, "loss": {"margin": True, "centring": 0.01}, "data.eval": str(folder / "pairs.jsonl"),
               "data.max_eval": 7, "train.micro_batch_tokens": 20}  # fmt: skip
    one, two = make("one", **changes), make("two", **changes)
    run(one)
    found = pool2.run(run_and_watch, two)
    assert found[0] == found[1]
    names = ("loss", "accuracy", "margin", "chosen_score", "tokens", "eval_accuracy", "eval_margin")
    for first, second in zip(lines(one, "metrics.jsonl"), lines(two, "metrics.jsonl"), strict=True):
        assert {n: second[n] for n in names if n in second} == pytest.approx({n: first[n] for n in names if n in first}, abs=1e-5)
    assert_same_weights(one, two)


def test_a_stopped_run_ends_bit_equal(make):
    changes = {"max_steps": 4, "engine.optimizer": {"lr": 1e-3}, "data.shuffle": True}
    whole, cut = make("whole", **changes), make("cut", **changes)
    run(whole)
    run(cut, stop_after=2)
    run(cut)
    first, second = parts(whole)["model"], parts(cut)["model"]
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("row", "changes", "expected"),
    [
        ({"prompt": "1=", "chosen": "1", "rejected": "1"}, {}, "row 0 has one response twice"),
        ({"prompt": "1=", "chosen": "1"}, {}, "row 0 is no pair"),
        ({"prompt": "1=", "chosen": "1", "rejected": "2"}, {"loss.margin": True}, "row 0 has no margin"),
        ({"prompt": "1=", "chosen": "1", "rejected": "2", "margin": "much"}, {"loss.margin": True}, "column margin holds 'much'"),
        ({"prompt": "1=", "chosen": "1", "rejected": "2" * 70}, {}, "its response up to 71; allowed: 64 in all"),
        ({"prompt": "1=", "chosen": "1", "rejected": 2}, {}, "column rejected holds int; allowed: text"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(make, tmp_path, row, changes, expected):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(ValueError, match=expected):
        run(make(**{"data.train": str(tmp_path / "rows.jsonl")}, **changes))


# -- as a reward


def test_as_a_reward_a_response_is_worth_what_transformers_says(make, folder, tmp_path):
    """Weighted, beside a function; also where the model is of another family and width."""
    other = tmp_path / "llama"
    save_tiny(tmp_path / "lm", "llama", tokenizer=character_tokenizer(CHARACTERS), vocab_size=20)
    scorer_folder(other, tmp_path / "lm")
    components = [{"model": str(folder / "scorer"), "weight": 2.0}, {"name": "rl_cases:score", "weight": 0.5},
                  {"model": str(other), "weight": -1.0, "offload": True}]  # fmt: skip
    tree = policy_settings("ppo", folder, output_dir=str(tmp_path / "run"), rewards=components)
    with recording() as found:
        _, records = run(tree)
    judges = [AutoModelForSequenceClassification.from_pretrained(path).eval() for path in (folder / "scorer", other)]
    (rollouts,) = found.rollouts
    assert 0 < sum(r.ids[-1] == PAD for r in rollouts) < 3
    for rollout in rollouts:
        if rollout.ids[-1] == PAD:  # which a random policy draws: transformers takes it for padding and reads before it
            continue
        with torch.no_grad():
            first, second = (hf_score(judge, list(rollout.ids)).item() for judge in judges)
        assert rollout.reward_parts["model_1"] == pytest.approx(first, abs=1e-4)
        assert rollout.reward_parts["model_2"] == pytest.approx(second, abs=1e-4)
        assert rollout.reward == pytest.approx(2 * first + 0.5 * rollout.reward_parts["rl_cases:score"] - second, abs=1e-4)
    totals = [r.reward for r in rollouts]
    assert records[1]["reward_mean"] == pytest.approx(sum(totals) / len(totals), abs=1e-6)
    assert records[1]["reward/model_1"] == pytest.approx(
        sum(r.reward_parts["model_1"] for r in rollouts) / len(rollouts), abs=1e-6
    )


def test_an_environment_s_reward_is_in_what_is_reported(folder, tmp_path, monkeypatch):
    real = Sampler.draw

    def draw(self, prompts):
        rollouts, metrics = real(self, prompts)
        return [replace(r, reward=10.0) for r in rollouts], metrics

    monkeypatch.setattr(Sampler, "draw", draw)
    tree = policy_settings("grpo", folder, output_dir=str(tmp_path / "run"))
    with recording() as found:
        _, records = run(tree)
    rewards = [r.reward for r in found.rollouts[0]]
    assert min(rewards) >= 7.0
    assert records[1]["reward_mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_what_is_no_reward_model_for_this_policy_is_refused(folder, tmp_path):
    tiny_folder(tmp_path / "lm", characters="9876543210+=?\n")
    scorer_folder(tmp_path / "foreign", tmp_path / "lm")
    scorer_folder(tmp_path / "bare", folder / "other")
    for file in (tmp_path / "bare").glob("*token*"):
        file.unlink()
    cases = {
        str(folder / "other"): "has no score.weight; allowed: a reward model",
        str(tmp_path / "foreign"): "policy and reward model .* differ in 10 ids .2: policy '0', reward model '9'",
        str(tmp_path / "bare"): "reward model .* has no tokenizer to compare with the policy's",
    }
    for path, expected in cases.items():
        tree = policy_settings("grpo", folder, output_dir=str(tmp_path / "run"), rewards=[{"model": path}])
        with pytest.raises(ValueError, match=expected):
            run(tree)
