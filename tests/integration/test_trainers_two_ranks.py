"""Whole runs on two gloo ranks: the same as on one, with unequal and empty shares, and one agreed end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from trainer_cases import lines, run, run_and_report, settings, tiny_folder, weights, write_sums

SGD = {"name": "sgd", "lr": 0.05, "max_grad_norm": None}
TEACHERS = {
    "frozen": {},
    "live": {"teacher": {"kind": "self", "weights": "live"}},
    "ema": {"teacher": {"kind": "self", "weights": "ema", "ema_decay": 0.5}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_folder(folder / "student", seed=0)
    tiny_folder(folder / "teacher", seed=1)
    write_sums(folder / "sums.jsonl")
    return folder


@pytest.fixture
def make(models, tmp_path):
    def make(recipe: str, name: str = "run", **changes):
        return settings(recipe, models, output_dir=str(tmp_path / name), **changes)

    return make


@pytest.mark.parametrize("prompts", [1, 3])  # with 1, rank 1 has nothing to do in any step; with 3, less than rank 0
@pytest.mark.parametrize("teacher", list(TEACHERS))
def test_two_ranks_train_what_one_does(make, pool2, teacher, prompts):
    """The same tokens are drawn and the same steps taken: tokens depend on the prompt's key, not on its rank."""
    changes = {"max_steps": 3, "engine.optimizer": SGD, "rollout.prompts_per_step": prompts, **TEACHERS[teacher]}
    one, two = make("opsd", "one", **changes), make("opsd", "two", **changes)
    _, expected = run(one)
    reports = pool2.run(run_and_report, two)
    assert reports[0] == reports[1]
    for step in (1, 2, 3):
        assert reports[0]["losses"][step] == pytest.approx(expected[step]["loss"], abs=1e-5)
    for key in ("tokens", "response_length_min", "response_length_max", "truncated"):
        assert [r[key] for r in lines(two, "metrics.jsonl")] == [r[key] for r in lines(one, "metrics.jsonl")]
    first, second = weights(one), weights(two)
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("reduction", ["sequence_mean", "sum_per_constant"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_every_reduction_is_one_global_mean(make, pool2, reduction, prompts):
    changes = {"max_steps": 1, "engine.optimizer": SGD, "rollout.prompts_per_step": prompts, "loss.reduction": reduction,
               "loss.constant_length": 5, "rollout.samples_per_prompt": 3}  # fmt: skip
    one, two = make("opsd", "one", **changes), make("opsd", "two", **changes)
    _, expected = run(one)
    assert pool2.run(run_and_report, two)[0]["losses"][1] == pytest.approx(expected[1]["loss"], rel=1e-5)
    first, second = weights(one), weights(two)
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-5)


def test_layers_may_be_streamed_to_the_rollouts(make, pool2):
    full, stream = (make("opsd", g, **{"engine.rollout.gather": g, "rollout.prompts_per_step": 1}) for g in ("full", "stream"))
    losses = [pool2.run(run_and_report, tree)[0]["losses"] for tree in (full, stream)]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)


STEAL = {"engine.rollout": {"gather": "full", "steal": "on", "engine": {"max_running": 2}}, "rollout.prompts_per_step": 5}


@pytest.mark.parametrize("teacher", ["frozen", "live"])
def test_requests_that_change_their_rank_train_the_same(make, pool2, teacher):
    """Also with answers of very different lengths: stop strings end some at once."""
    changes = {"max_steps": 3, "engine.optimizer": SGD, "rollout.sampling": {"max_new_tokens": 20, "stop": ["1", "7"]}}
    changes |= TEACHERS[teacher]
    one, two = make("opsd", "one", **changes, **STEAL), make("opsd", "two", **changes, **STEAL)
    _, expected = run(one)
    reports = pool2.run(run_and_report, two)
    assert reports[0]["losses"] == pytest.approx({step: r["loss"] for step, r in expected.items()}, abs=1e-5)
    records = lines(two, "metrics.jsonl")
    assert [r["tokens"] for r in records] == [r["tokens"] for r in lines(one, "metrics.jsonl")]
    assert all(0 <= r["rollout_idle_s_min"] <= r["rollout_idle_s_mean"] <= r["rollout_idle_s_max"] for r in records)
    first, second = weights(one), weights(two)
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("teacher", ["frozen", "live"])
def test_a_run_whose_requests_change_their_rank_resumes_bit_equal(make, pool2, teacher):
    """Under batch invariance, where they do by default: no bit of a token depends on when it was taken over."""
    changes = {**STEAL, **TEACHERS[teacher]}
    changes["engine.rollout"] = {"gather": "full", "engine": {"max_running": 2, "batch_invariant": True}}
    whole, cut = make("opsd", "whole", **changes), make("opsd", "cut", **changes)
    expected = pool2.run(run_and_report, whole)[0]["losses"]
    before = pool2.run(run_and_report, cut, stop_after=3)[0]["losses"]
    assert before | pool2.run(run_and_report, cut)[0]["losses"] == expected
    first, second = weights(whole), weights(cut)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_sft_on_two_ranks_is_sft_on_one(make, pool2):
    one, two = (make("sft", name, **{"engine.optimizer": SGD, "max_steps": 3}) for name in ("one", "two"))
    run(one)
    pool2.run(run_and_report, two)
    first, second = weights(one), weights(two)
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("teacher", ["frozen", "ema"])
def test_a_stop_on_one_rank_ends_all_after_the_same_step_and_resumes_bit_equal(make, pool2, models, teacher):
    changes = {"max_steps": 4, "data.eval": str(models / "sums.jsonl"), "eval.max_new_tokens": 3, **TEACHERS[teacher]}
    whole, cut = make("opsd", "whole", **changes), make("opsd", "cut", **changes)
    expected = pool2.run(run_and_report, whole)[0]["losses"]
    stopped = pool2.run(run_and_report, cut, stop_after=3, stop_rank=1)
    assert [(r["steps"], r["stopped"]) for r in stopped] == [(3, True), (3, True)]
    rest = pool2.run(run_and_report, cut)
    assert stopped[0]["losses"] | rest[0]["losses"] == expected
    first, second = weights(whole), weights(cut)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert [r["step"] for r in lines(cut, "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert lines(cut, "completions.jsonl") == lines(whole, "completions.jsonl")


def test_a_run_of_two_ranks_goes_on_with_one(make, pool2):
    changes = {"engine.optimizer": SGD}
    whole, cut = make("opsd", "whole", **changes), make("opsd", "cut", **changes)
    _, expected = run(whole)
    pool2.run(run_and_report, cut, stop_after=2)
    _, rest = run(cut)
    assert {s: rest[s]["loss"] for s in (3, 4)} == pytest.approx({s: expected[s]["loss"] for s in (3, 4)}, abs=1e-5)


@pytest.mark.parametrize("prompts", [1, 5])  # with 1, rank 1 has none
def test_evaluation_is_the_same_on_two_ranks(make, pool2, models, prompts):
    changes = {"max_steps": 1, "data.eval": str(models / "sums.jsonl"), "data.max_eval": prompts, "eval.max_new_tokens": 3}
    one, two = make("sft", "one", **changes), make("sft", "two", **changes)
    run(one)
    pool2.run(run_and_report, two)
    keys = ("eval_reward", "eval_length", "eval_truncated")
    first, second = lines(one, "metrics.jsonl")[0], lines(two, "metrics.jsonl")[0]
    assert [first[k] for k in keys] == pytest.approx([second[k] for k in keys])


def test_a_reward_that_fails_on_one_rank_is_counted_on_all(make, pool2, models):
    """At one of ten rows; it is worth 0.5 at the others."""
    changes = {
        "max_steps": 1,
        "data.eval": str(models / "sums.jsonl"),
        "eval.max_new_tokens": 3,
        "eval.reward": "trainer_cases:reward_that_fails",
    }
    tree = make("sft", **changes)
    pool2.run(run_and_report, tree)
    for record in lines(tree, "metrics.jsonl"):
        assert record["eval_reward"] == pytest.approx(0.45)
        assert record["eval_reward_failures"] == 1


def test_bad_input_is_refused_on_every_rank(make, pool2):
    tree = make("sft")
    pool2.run(run_and_report, tree, stop_after=2)
    with pytest.raises(AssertionError, match=r"seed \(was 0, now 5\)") as error:
        pool2.run(run_and_report, tree | {"seed": 5})
    assert str(error.value).count("was trained with another config") >= 2
    shutil.rmtree(tree["output_dir"])
