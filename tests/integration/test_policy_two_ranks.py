"""A step of policy optimisation is one step, however its responses are spread over ranks and micro-batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rl_cases import assert_same_weights, models, parts, policy_settings, run_and_watch
from trainer_cases import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def make(folder, tmp_path):
    def make(recipe: str, name: str = "run", **changes):
        return policy_settings(recipe, folder, output_dir=str(tmp_path / name), **changes)

    return make


def assert_same_records(first, second) -> None:
    assert first.keys() == second.keys()
    for step in first:
        assert first[step].keys() == second[step].keys()
        for name, value in first[step].items():
            assert second[step][name] == pytest.approx(value, rel=1e-4, abs=2e-5), (step, name)


UPDATES = {"updates": {"epochs": 2, "minibatches": 2}, "max_steps": 2}
METHODS = {
    "ppo": ("ppo", UPDATES | {
        "reward_kl": {"beta": 0.1, "target": 0.05, "horizon": 20}, "shaping": {"normalise": "whiten", "mask_truncated": True},
        "loss.entropy": 0.01, "rollout.prompts_per_step": 5,
    }),
    "shared": ("ppo", UPDATES | {"critic": {"shared_weight": 0.3}, "reward_kl.beta": 0.1, "ema_decay": 0.5}),
    "grpo": ("grpo", UPDATES | {"loss.kl": 0.1, "shaping.missing_eos_penalty": 0.5, "loss.reduction": "sequence_mean"}),
    "dapo": ("grpo", UPDATES | {
        "dynamic_sampling": {"max_batches": 3}, "rewards": [{"name": "rl_cases:starts_low"}], "loss.clip_high": 0.28,
        "estimator": "reinforce_pp_baseline", "reward_kl.beta": 0.05,
    }),
    "gspo": ("grpo", UPDATES | {
        "loss": {"ratio": "sequence", "reduction": "sequence_mean", "clip_low": 0.01, "clip_high": 0.01},
        "mismatch": {"correct": "truncate", "level": "sequence"}, "rollout.prompts_per_step": 1, "rollout.samples_per_prompt": 4,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", list(METHODS))
def test_a_step_does_not_depend_on_ranks_and_micro_batches(make, pool2, folder, name):
    """(ranks, micro-batches) of (1, few), (2, few), (1, many), (2, many): weights of policy and critic, whitening and group
    statistics over all ranks, KLs and rewards; packed and padded. With one prompt a step, rank 1 has nothing to do."""
    recipe, changes = METHODS[name]
    changes = changes | {"reference.path": str(folder / "other")}
    folders = {"ppo": ["model", "critic"], "shared": ["model", "model_ema"]}.get(name, ["model"])
    whole = make(recipe, "whole", **changes, **{"train.micro_batch_tokens": 1000})
    expected = run_and_watch(whole)
    for ranks, tokens in ((2, 1000), (1, 12), (2, 12)):
        attention = "packed" if tokens == 1000 else "sdpa"
        cut = {"train.micro_batch_tokens": tokens, "engine.attn_implementation": attention}
        tree = make(recipe, f"{ranks}_{tokens}", **changes, **cut)
        if ranks == 1:
            found = [run_and_watch(tree)]
        else:
            found = pool2.run(run_and_watch, tree)
            assert found[0] == found[1]
        assert_same_records(expected, found[0])
        assert_same_weights(whole, tree, *folders)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (3, 0, 3, 1, 3, 4)])
@pytest.mark.parametrize("recipe", ["ppo", "grpo"])
def test_ends_at_once_and_empty_responses_are_steps_on_every_rank(make, pool2, folder, recipe, order):
    """Ranks have every other one, so that each prompt's samples are on both; in the second order rank 0 has nothing but empty
    responses. The step is that of one rank."""
    changes = {"reference.path": str(folder / "other"), "loss.kl": 0.1, "reward_kl.beta": 0.1, "updates.epochs": 2,
               "train.micro_batch_tokens": 12}  # fmt: skip
    one, two = make(recipe, "one", **changes), make(recipe, "two", **changes)
    script = {"script": str(folder / "student"), "order": order}
    expected = run_and_watch(one, **script)
    found = pool2.run(run_and_watch, two, **script)
    assert found[0] == found[1]
    assert all(math.isfinite(value) for value in found[0][1].values())
    assert_same_records(expected, found[0])
    assert_same_weights(one, two, *(["model", "critic"] if recipe == "ppo" else ["model"]))


def test_teacher_mixture_average_and_reward_model_are_those_of_one_rank(make, pool2, folder):
    """Four models in one process group, and three backwards in one step."""
    changes = {
        "max_steps": 2, "rewards": [{"model": str(folder / "scorer"), "weight": 0.5}, {"name": "rl_cases:score"}],
        "teacher": {"path": str(folder / "other")}, "distill_weight": 0.3, "critic.path": str(folder / "scorer"),
        "ptx": {"data": str(folder / "sums.jsonl"), "batch_size": 3}, "ema_decay": 0.5, "critic.warmup_steps": 1,
    }  # fmt: skip
    one, two = make("ppo", "one", **changes), make("ppo", "two", **changes)
    expected = run_and_watch(one)
    assert_same_records(expected, pool2.run(run_and_watch, two)[0])
    assert_same_weights(one, two, "model", "critic", "model_ema")


def test_a_run_of_two_ranks_resumes_bit_equal_and_goes_on_with_one(make, pool2, folder):
    changes = {"max_steps": 4, "updates": {"epochs": 2, "minibatches": 2}, "ema_decay": 0.5, "shaping.normalise": "scale",
               "engine.optimizer": {"lr": 1e-3}, "critic.optimizer": {"lr": 1e-3}}  # fmt: skip
    whole, cut, alone = (make("ppo", name, **changes) for name in ("whole", "cut", "alone"))
    expected = pool2.run(run_and_watch, whole)[0]
    for tree in (cut, alone):
        pool2.run(run_and_watch, tree, stop_after=2)
    rest = pool2.run(run_and_watch, cut)[0]
    assert rest == {step: expected[step] for step in (3, 4)}
    names = ("model", "critic", "model_ema")
    first, second = parts(whole, *names), parts(cut, *names)
    assert all(torch.equal(first[n][k], second[n][k]) for n in names for k in first[n])
    _, records = run(alone)
    assert records[3]["loss"] == pytest.approx(expected[3]["loss"], abs=1e-4)
    assert records[3]["critic/loss"] == pytest.approx(expected[3]["critic/loss"], rel=1e-4)
