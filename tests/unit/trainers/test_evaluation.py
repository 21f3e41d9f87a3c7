"""Evaluation means, the completions table, and the statistics of a step."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest

from inference_v2.types import Completion
from trainers.config import EvalConfig
from trainers.evaluation import Evaluation, Evaluator, table_rows
from trainers.statistics import num_sampled, rollout_statistics
from trainers.types import Prompt, Rollout, Span


class OneRank:
    """Stands for a mesh of one rank."""

    def sum(self, values):
        return [float(v) for v in values]

    max = sum


def rollout(length: int, *, source: str = "policy", finish: str = "stop", index: int = 0) -> Rollout:
    return Rollout(
        prompt=Prompt(index=index, ids=(1, 2), text="1+1=", answer="2"),
        sample_index=0,
        ids=(1, 2, *range(length)),
        spans=(Span(2, 2 + length, source),),
        logprobs=(-1.0,) * length,
        logprobs_raw=(-2.0,) * length,
        finish_reason=finish,
        weight_version=1,
        text="2",
        reward=1.0,
    )


def test_statistics_of_a_step():
    found = rollout_statistics([rollout(4), rollout(2, source="given"), rollout(6, finish="length")], OneRank())
    assert found == pytest.approx(
        {
            "response_length_min": 2, "response_length_mean": 4, "response_length_max": 6, "truncated": 1 / 3, "sampled": 10 / 12,
            "generated_tokens": 10, "repetition": 0,
            "rollout_logprob": -1.0, "rollout_logprob_raw": -2.0,
        }
    )  # fmt: skip
    assert "rollout_logprob" not in rollout_statistics([rollout(2, source="given")], OneRank())


def test_only_what_the_policy_drew_counts_as_sampled():
    """The monitor's rollout rate is made of it."""
    assert num_sampled([rollout(4), rollout(2, source="given"), rollout(6), rollout(3, source="environment")]) == 10


def test_an_evaluation_is_checked_before_the_run():
    prompts = [Prompt(0, (1,), "a", answer="1"), Prompt(5, (1,), "b")]
    with pytest.raises(ValueError, match="row 5 of the data has no answer"):
        Evaluator(EvalConfig(reward="exact_match"), prompts)
    with pytest.raises(ValueError, match="did you mean numeric_match"):
        Evaluator(EvalConfig(reward="numeric_mach"), prompts)
    Evaluator(EvalConfig(reward="regex:."), prompts)


class OneCompletion:
    """Stands for an engine of one rank that always answers "2"."""

    rank, world_size, mesh = 0, 1, OneRank()

    def generate_together(self, prompts, sampling, keys):
        assert sampling.temperature == 0
        answers = [Completion(0, 0, tuple(p), (5, 1), (0.0,) * 2, (-1.0,) * 2, "stop", 1, text="2") for p in prompts]
        return {i: [answer] for i, answer in enumerate(answers)}


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (lambda completion, prompt: None, "it gave None; allowed: a finite number"),
        (lambda completion, prompt: math.nan, "it gave nan; allowed: a finite number, up to 1e+30"),
        (lambda completion, prompt: {}[completion], "it raised KeyError: '2'"),
    ],
)
def test_a_reward_that_fails_counts_as_zero_and_is_named(monkeypatch, caplog, reward, expected):
    """At one of two rows: the evaluation goes on, and says how many failed."""
    monkeypatch.setitem(
        sys.modules, "users_rewards", SimpleNamespace(mine=lambda text, prompt: reward(text, prompt) if prompt.index == 7 else 1)
    )
    found = Evaluator(EvalConfig(reward="users_rewards:mine"), [Prompt(7, (1,), "a"), Prompt(8, (1,), "a")]).run(OneCompletion())
    assert (found.reward, found.failures) == (0.5, 1)
    assert [sample.reward for sample in found.samples] == [0.0, 1.0]
    assert found.metrics() == {"eval_reward": 0.5, "eval_length": 2.0, "eval_truncated": 0.0, "eval_reward_failures": 1.0}
    assert f"reward users_rewards:mine: row 7: {expected}; it counts as default=0" in caplog.text


def test_means_of_an_evaluation():
    found = Evaluator(EvalConfig(samples=1), [Prompt(i, (1,), "a", answer=a) for i, a in enumerate("2322")]).run(OneCompletion())
    assert (found.reward, found.length, found.truncated, len(found.samples)) == (0.75, 2.0, 0.0, 1)


def test_rows_of_the_table():
    (row,) = table_rows("eval", [rollout(3, index=4)])
    assert row == {
        "kind": "eval", "row": 4, "sample": 0, "prompt": "1+1=", "completion": "2", "answer": "2", "reward": 1.0, "length": 3,
        "finish_reason": "stop", "source": "policy",
    }  # fmt: skip
    assert Evaluation(0.5, 3.0, 0.0, 2, ()).metrics() == {"eval_reward": 0.5, "eval_length": 3.0, "eval_truncated": 0.0}
