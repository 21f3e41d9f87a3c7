"""Components together: weights, defaults, names, metrics."""

from __future__ import annotations

import logging
import math
import sys
from types import SimpleNamespace

import pytest
from reward_cases import rollout

from hybrid.config import HybridConfig
from hybrid.mesh import open_mesh
from trainers.rewards import RewardConfig, Rewards, reward_metrics


@pytest.fixture
def users(monkeypatch):
    """A module `users` of reward functions."""

    def fails_at_row_1(completion, prompt):
        return {0: 2.0, 2: 4.0}[prompt.index]

    module = SimpleNamespace(fails_at_row_1=fails_at_row_1, one=lambda completion, prompt: True)
    monkeypatch.setitem(sys.modules, "users", module)
    return module


def test_the_total_is_the_weighted_sum_and_parts_are_not_weighted():
    scored = Rewards(
        [
            RewardConfig(name="numeric_match", weight=2.0),
            RewardConfig(name="length", max_tokens=4, buffer=2, weight=0.5),
            RewardConfig(name="regex:is", weight=0.0),
            RewardConfig(name="format:.{5}", weight=-1.0),
        ]
    ).score([rollout("is 42", tokens=3), rollout("43", tokens=9)])
    assert [s.total for s in scored] == [2.0 * 1 + 0.5 * -0.5 + 0 - 1, 2.0 * 0 + 0.5 * -1 + 0 - 0]
    assert scored[0].parts == {"numeric_match": 1.0, "length": -0.5, "regex:is": 1.0, "format:.{5}": 1.0}
    assert scored[1].parts == {"numeric_match": 0.0, "length": -1.0, "regex:is": 0.0, "format:.{5}": 0.0}
    assert [s.failed for s in scored] == [(), ()]


def test_the_length_is_in_tokens_of_the_response():
    (scored,) = Rewards([RewardConfig(name="length", max_tokens=4, buffer=4)]).score([rollout("a long text", tokens=2)])
    assert scored.total == -0.5


def test_a_reward_used_twice_has_two_names():
    rewards = Rewards(
        [RewardConfig(name="exact_match"), RewardConfig(name="exact_match", weight=2.0), RewardConfig(name="regex:4")]
    )
    assert rewards.names == ("exact_match", "exact_match_2", "regex:4")
    (scored,) = rewards.score([rollout("42")])
    assert (scored.total, scored.parts) == (4.0, {"exact_match": 1.0, "exact_match_2": 1.0, "regex:4": 1.0})


def test_a_component_that_fails_counts_as_its_default_for_that_response_only(users, caplog):
    rewards = Rewards([RewardConfig(name="users:fails_at_row_1", default=-1.0, weight=3.0), RewardConfig(name="users:one")])
    for _ in range(2):
        scored = rewards.score([rollout("", row=row) for row in (0, 1, 2)])
        assert [s.total for s in scored] == [7.0, -2.0, 13.0]
        assert [s.failed for s in scored] == [(), ("users:fails_at_row_1",), ()]
        assert scored[1].parts == {"users:fails_at_row_1": -1.0, "users:one": 1.0}
    (record,) = caplog.records
    assert record.levelno == logging.ERROR, "rank 1 shows errors only"
    assert "reward users:fails_at_row_1: row 1: it raised KeyError: 1; it counts as default=-1" in record.getMessage()


def test_no_rollouts_and_no_components():
    assert Rewards([RewardConfig(name="exact_match")]).score([]) == []
    (scored,) = Rewards([]).score([rollout("42")])
    assert (scored.total, scored.parts, scored.failed) == (0.0, {}, ())


def test_rows_are_checked_before_the_run(users):
    good, none, words = rollout("", "1", row=1), rollout("", None, row=2), rollout("", "two", row=3)
    for name in ("exact_match", "numeric_match"):
        rewards = Rewards([RewardConfig(name="users:one"), RewardConfig(name=name)])
        rewards.check([good.prompt])
        with pytest.raises(ValueError, match=f"reward {name}: row 2 of the data has no answer"):
            rewards.check([good.prompt, none.prompt])
    with pytest.raises(ValueError, match="row 3 has the answer 'two', which holds no number"):
        Rewards([RewardConfig(name="numeric_match")]).check([good.prompt, words.prompt])
    anything = [RewardConfig(name="regex:a"), RewardConfig(name="format:a"), RewardConfig(name="length", max_tokens=1, buffer=1)]
    Rewards([*anything, RewardConfig(name="users:one"), RewardConfig(name="http://127.0.0.1:9/")]).check([none.prompt])


def test_a_row_that_was_not_checked_fails_like_any_other():
    (scored,) = Rewards([RewardConfig(name="exact_match", default=-2.0)]).score([rollout("", None)])
    assert (scored.total, scored.failed) == (-2.0, ("exact_match",))


def test_an_error_of_ours_is_given_to_who_agrees_on_it():
    told = []
    rewards = Rewards([RewardConfig(name="exact_match"), RewardConfig(name="regex:4")], told.append)
    rewards.score([rollout("42")])
    rewards.check([rollout("").prompt])
    assert told == [None] * 4
    rewards._components[0] = SimpleNamespace(values=lambda rollouts: 1 / 0)
    with pytest.raises(IndexError):  # this one goes on
        rewards.score([rollout("42")])
    assert str(told[-1]) == "reward exact_match: ZeroDivisionError: division by zero"


def test_metrics_by_hand(users):
    rewards = Rewards([RewardConfig(name="users:fails_at_row_1", default=-1.0), RewardConfig(name="exact_match", weight=2.0)])
    scored = rewards.score([rollout("42", row=0), rollout("", row=1), rollout("", row=2)])
    assert reward_metrics(scored, rewards.names, list) == pytest.approx(
        {
            "reward_mean": (4 - 1 + 4) / 3,
            "reward_std": math.sqrt((2 * (4 - 7 / 3) ** 2 + (-1 - 7 / 3) ** 2) / 3),
            "reward/users:fails_at_row_1": 5 / 3,
            "reward/users:fails_at_row_1_failures": 1,
            "reward/exact_match": 1 / 3,
            "reward/exact_match_failures": 0,
        }
    )


def test_metrics_without_rollouts_have_the_same_keys():
    rewards = Rewards([RewardConfig(name="exact_match")])
    some = reward_metrics(rewards.score([rollout("42")]), rewards.names, list)
    assert reward_metrics([], rewards.names, list) == dict.fromkeys(some, 0.0)


def fails_at_row_3(completion, prompt):
    return 1 / (prompt.index - 3)


def metrics_of_a_rank(rows_by_rank: list[list[int]]) -> dict[str, float]:
    """Of the rollouts of this rank's rows, whose text is the row."""
    mesh = open_mesh(HybridConfig(device="cpu"))
    rewards = Rewards([RewardConfig(name="numeric_match"), RewardConfig(name="test_rewards:fails_at_row_3", default=5.0)])
    scored = rewards.score([rollout(str(row), "1", row=row) for row in rows_by_rank[mesh.rank]])
    return reward_metrics(scored, rewards.names, mesh.sum)


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[], [1, 2, 3]], [[3, 2, 1], []], [[], []]])
def test_metrics_are_over_all_ranks(pool2, rows):
    rewards = Rewards([RewardConfig(name="numeric_match"), RewardConfig(name="test_rewards:fails_at_row_3", default=5.0)])
    scored = rewards.score([rollout(str(row), "1", row=row) for part in rows for row in part])
    expected = reward_metrics(scored, rewards.names, list)
    assert expected["reward/test_rewards:fails_at_row_3_failures"] == sum(part.count(3) for part in rows)
    for found in pool2.run(metrics_of_a_rank, rows):
        assert found == pytest.approx(expected)
        assert list(found) == list(expected)
