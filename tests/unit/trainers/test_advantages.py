"""Advantages against loops in plain Python floats, from the definitions, over whole responses with an environment's tokens."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Sequence

import pytest
import torch
from beartype import beartype
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from pool import Pool
from torch import Tensor

from hybrid.config import HybridConfig
from hybrid.mesh import open_mesh
from trainers import advantages
from trainers.advantages import AdaptiveKL, RunningMoments
from trainers.config.policy import Mismatch

checked = jaxtyped(typechecker=beartype)
kl_estimate = checked(advantages.kl_estimate)
token_rewards = checked(advantages.token_rewards)
rewards_to_go = checked(advantages.rewards_to_go)
gae = checked(advantages.gae)
group_advantages = checked(advantages.group_advantages)
whiten = checked(advantages.whiten)
explained_variance = checked(advantages.explained_variance)
mismatch_weights = checked(advantages.mismatch_weights)

EXACT = {"rel": 1e-6, "abs": 1e-7}  # fp32 of a result in fp64


def here(values: Sequence[float]) -> list[float]:
    """`total` of a single rank."""
    return list(values)


@dataclasses.dataclass
class Response:
    """A response as it was generated: who made each token, and for each the value read at the token *before* it."""

    by_policy: list[bool]
    values: list[float]
    value_at_last: float
    kl: list[float]
    score: float
    ended: bool  # by an end-of-sequence token; else cut by the length limit

    @property
    def places(self) -> list[int]:
        return [t for t, policy in enumerate(self.by_policy) if policy]

    @property
    def bootstrap(self) -> float:
        return 0.0 if self.ended else self.value_at_last

    def counted(self, per_token: list[float]) -> Tensor:
        return torch.tensor([per_token[t] for t in self.places])


def response(made_by: str, ended: bool, seed: int = 0) -> Response:
    """`made_by`: p for a token of the policy, e for one of the environment."""
    draw = random.Random(f"{made_by}{ended}{seed}")
    numbers = [[float(torch.tensor(draw.gauss(0, 1))) for _ in made_by] for _ in range(2)]
    return Response([c == "p" for c in made_by], *numbers[:1], draw.gauss(0, 1), numbers[1], draw.gauss(0, 1), ended)


SHAPES = ("", "p", "pp", "ppppppp", "ppeep", "epppeeeppe", "eee", "e" * 3 + "p")
RESPONSES = [response(made_by, ended) for made_by in SHAPES for ended in (True, False)]
IDS = [f"{made_by or 'empty'}-{'end' if ended else 'cut'}" for made_by in SHAPES for ended in (True, False)]
every_response = pytest.mark.parametrize("r", RESPONSES, ids=IDS)


# -- KL


def test_kl_estimates_by_hand() -> None:
    for lp, ref in itertools.product((-0.01, -0.5, -3.0, -11.0), repeat=2):
        d = float(torch.tensor(lp)) - float(torch.tensor(ref))
        expected = {"k1": d, "k2": d**2 / 2, "k3": math.exp(-d) - 1 + d}
        for kind, value in expected.items():
            found = kl_estimate(kind, torch.tensor([lp]), torch.tensor([ref]))
            assert found.dtype == torch.float32
            assert found.item() == pytest.approx(value, **EXACT), kind


def test_kl_estimates_are_finite_for_every_pair_and_exact_near_zero() -> None:
    extremes = torch.tensor([0.0, -1e-30, -20.0, -1e3, -1e30, torch.finfo(torch.float32).min, -math.inf])
    lp, ref = (torch.tensor(column) for column in zip(*itertools.product(extremes.tolist(), repeat=2)))
    for kind in ("k1", "k2", "k3"):
        estimate = kl_estimate(kind, lp, ref)
        assert estimate.isfinite().all()
        assert kind == "k1" or (estimate >= 0).all()
        assert kl_estimate(kind, torch.zeros(0), torch.zeros(0)).shape == (0,)
    for d in (5 * 2**-23, -5 * 2**-23):  # exp(-d) - 1 + d would lose its digits in fp32
        ref = torch.tensor([-1.0])
        assert kl_estimate("k3", ref + d, ref).item() == pytest.approx(d**2 / 2, rel=1e-4, abs=0)


def test_a_ratio_beyond_the_clamp_counts_as_one_at_it() -> None:
    assert kl_estimate("k3", torch.tensor([-50.0]), torch.tensor([0.0])).item() == pytest.approx(math.exp(20) - 1 - 50, rel=1e-6)
    assert kl_estimate("k3", torch.tensor([0.0]), torch.tensor([-50.0])).item() == pytest.approx(49, rel=1e-6)


def test_the_coefficient_follows_the_kl() -> None:
    start = AdaptiveKL(beta=0.2, target=6.0, horizon=10_000)
    assert start.updated(6.0, 64) == start
    assert start.updated(6.6, 64).beta == pytest.approx(0.2 * (1 + 0.1 * 64 / 10_000), rel=1e-12)
    assert start.updated(60.0, 64).beta == pytest.approx(0.2 * (1 + 0.2 * 64 / 10_000), rel=1e-12)
    assert start.updated(-3.0, 64).beta == pytest.approx(0.2 * (1 - 0.2 * 64 / 10_000), rel=1e-12)
    assert start.updated(5.4, 64).updated(5.4, 64).beta == pytest.approx(0.2 * (1 - 0.1 * 64 / 10_000) ** 2, rel=1e-12)
    assert AdaptiveKL(1.0, 1.0, 10).updated(0.0, 49).beta == pytest.approx(0.02)
    with pytest.raises(ValueError, match="horizon=10 for 50 responses"):
        AdaptiveKL(1.0, 1.0, 10).updated(0.0, 50)
    with pytest.raises(ValueError, match="nan"):
        start.updated(math.nan, 64)


# -- rewards of tokens, GAE


@every_response
def test_token_rewards(r: Response) -> None:
    expected = [-0.3 * r.kl[t] for t in r.places]
    if expected:
        expected[-1] += r.score
    found = token_rewards(r.score, len(r.places), r.counted(r.kl), 0.3)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected, **EXACT)
    without = [0.0] * (len(expected) - 1) + [r.score] * bool(expected)
    assert token_rewards(r.score, len(r.places)).tolist() == pytest.approx(without, **EXACT)


def test_token_rewards_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"beta=0\.1 and None KLs for 3"):
        token_rewards(1.0, 3, None, 0.1)
    with pytest.raises(ValueError, match="2 KLs for 3"):
        token_rewards(1.0, 3, torch.zeros(2), 0.1)


def by_definition(rewards: list[float], r: Response, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """A_t = sum over l of (gamma lam)^l delta_{t + l}, over the policy's tokens."""
    places = r.places
    deltas = []
    for i, t in enumerate(places):
        following = r.values[places[i + 1]] if i + 1 < len(places) else r.bootstrap
        deltas.append(rewards[i] + gamma * following - r.values[t])
    found = [sum((gamma * lam) ** later * d for later, d in enumerate(deltas[i:])) for i in range(len(deltas))]
    return found, [a + r.values[t] for a, t in zip(found, places)]


@every_response
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_gae(r: Response, gamma: float, lam: float) -> None:
    rewards = token_rewards(r.score, len(r.places), r.counted(r.kl), 0.3)
    found = gae(rewards, r.counted(r.values), gamma=gamma, lam=lam, bootstrap=r.bootstrap)
    for name, tensor, expected in zip(("advantages", "returns"), found, by_definition(rewards.tolist(), r, gamma, lam)):
        assert tensor.dtype == torch.float32
        assert tensor.tolist() == pytest.approx(expected, **EXACT), name
    if gamma == lam == 1:  # the return is what is still to come
        to_come = [x + r.bootstrap for x in rewards_to_go(rewards).tolist()]
        assert found[1].tolist() == pytest.approx(to_come, rel=1e-5, abs=1e-5)


@every_response
def test_rewards_to_go(r: Response) -> None:
    rewards = [r.kl[t] for t in r.places]
    expected = [sum(rewards[i:]) for i in range(len(rewards))]
    assert rewards_to_go(torch.tensor(rewards)).tolist() == pytest.approx(expected, **EXACT)


def test_gae_refuses_lengths_that_differ() -> None:
    with pytest.raises(ValueError, match="3 rewards and 2 values"):
        advantages.gae(torch.zeros(3), torch.zeros(2), gamma=1.0, lam=1.0, bootstrap=0.0)


# -- over all ranks


def whitened(rows: list[list[float]]) -> list[list[float]]:
    every = [x for row in rows for x in row]
    mean = math.fsum(every) / max(len(every), 1)
    variance = math.fsum((x - mean) ** 2 for x in every) / max(len(every), 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in rows]


ROWS = [[3.0, -1.0, 0.5], [], [10.0], [0.25] * 5, [-2.0, 7.5]]


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_whitening(offset: float) -> None:
    rows = [[x + offset for x in row] for row in ROWS]
    found = whiten([torch.tensor(row) for row in rows], here)
    for given_row, expected in zip(found, whitened(rows), strict=True):
        assert given_row.dtype == torch.float32
        assert given_row.tolist() == pytest.approx(expected, **EXACT)


def test_whitening_of_little_is_finite() -> None:
    assert whiten([], here) == []
    assert [len(row) for row in whiten([torch.zeros(0)], here)] == [0]
    assert whiten([torch.tensor([5.0])], here)[0].tolist() == [0.0]
    assert whiten([torch.tensor([5.0, 5.0]), torch.tensor([5.0])], here)[0].tolist() == [0.0, 0.0]


def of_one_rank(rows: list[list[list[float]]]) -> tuple[list[list[float]], dict, float]:
    """Whitened rows, moments and explained variance of this rank's part of `rows`."""
    mesh = open_mesh(HybridConfig(device="cpu"))
    mine = rows[mesh.rank] if mesh.world_size > 1 else [row for part in rows for row in part]
    tensors = [torch.tensor(row) for row in mine]
    moments = RunningMoments().updated([x for row in mine for x in row], mesh.sum)
    values = [row.sin() for row in tensors]
    explained = explained_variance(values, tensors, mesh.sum)
    return [row.tolist() for row in whiten(tensors, mesh.sum)], dataclasses.asdict(moments), explained


@pytest.mark.parametrize("cut", [0, 2, 5])
def test_two_ranks_are_as_one(pool2: Pool, cut: int) -> None:
    """Also where one of them has nothing at all."""
    every = [x for row in ROWS for x in row]
    first, second = pool2.run(of_one_rank, [ROWS[:cut], ROWS[cut:]])
    for given_row, expected in zip(first[0] + second[0], whitened(ROWS), strict=True):
        assert given_row == pytest.approx(expected, **EXACT)
    assert first[1] == second[1]
    mean = math.fsum(every) / len(every)
    m2 = math.fsum((x - mean) ** 2 for x in every)
    assert first[1] == pytest.approx({"count": len(every), "mean": mean, "m2": m2}, rel=1e-12)
    errors = [x - float(torch.tensor(x).sin()) for x in every]
    rest = math.fsum((e - math.fsum(errors) / len(errors)) ** 2 for e in errors)
    assert first[2] == second[2] == pytest.approx(1 - rest / m2, rel=1e-6)


def test_explained_variance_at_its_ends() -> None:
    returns = [torch.tensor([1.0, 2.0, 4.0]), torch.zeros(0), torch.tensor([-1.0])]
    assert explained_variance(returns, returns, here) == 1
    assert explained_variance([row + 7 for row in returns], returns, here) == pytest.approx(1)  # a bias is not variance
    assert explained_variance([torch.zeros_like(row) for row in returns], returns, here) == 0
    assert explained_variance([-row for row in returns], returns, here) == pytest.approx(-3)
    assert explained_variance([torch.tensor([1.0, 2.0])], [torch.tensor([0.1, 0.1])], here) == 0
    assert explained_variance([], [], here) == 0


@hypothesis_settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.lists(st.floats(-100, 100), max_size=6), max_size=6), offset=st.sampled_from([0.0, 1e6]))
def test_running_moments_are_those_of_everything_seen(parts: list[list[float]], offset: float) -> None:
    parts = [[x + offset for x in part] for part in parts]
    moments, resumed = RunningMoments(), RunningMoments()
    for part in parts:
        moments = moments.updated(part, here)
        resumed = RunningMoments(**json.loads(json.dumps(dataclasses.asdict(resumed)))).updated(part, here)
    assert resumed == moments  # every bit, through JSON
    every = [x for part in parts for x in part]
    mean = math.fsum(every) / max(len(every), 1)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in every) / max(len(every), 1))
    assert moments.count == len(every)
    assert moments.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
    assert moments.std == pytest.approx(std, rel=1e-6, abs=1e-6)


def test_rewards_normalised_by_running_moments() -> None:
    moments = RunningMoments().updated([1.0, 3.0], here)
    assert (moments.mean, moments.std) == (2, 1)
    moments = moments.updated([6.0, 10.0], here)
    assert (moments.mean, moments.std) == (5, math.sqrt(46 / 4))
    values = torch.tensor([5.0, 10.0])
    assert moments.normalised(values, shift_mean=True).tolist() == pytest.approx([0, 5 / math.sqrt(11.5)], **EXACT)
    assert moments.normalised(values, shift_mean=False).tolist() == pytest.approx(
        [5 / math.sqrt(11.5), 10 / math.sqrt(11.5)], **EXACT
    )
    for nothing_to_scale_by in (
        RunningMoments(),
        RunningMoments().updated([0.1] * 3, here),
        RunningMoments().updated([4.0], here),
    ):
        assert torch.equal(nothing_to_scale_by.normalised(values, shift_mean=False), values)
    assert moments.normalised(torch.zeros(0), shift_mean=True).shape == (0,)


# -- groups


def group_by_hand(estimator: str, rewards: list[float], groups: list[int]) -> list[float]:
    found = []
    for i, (reward, group) in enumerate(zip(rewards, groups)):
        all_of_it = [x for x, g in zip(rewards, groups) if g == group]
        others = [x for j, (x, g) in enumerate(zip(rewards, groups)) if g == group and j != i]
        mean = math.fsum(all_of_it) / len(all_of_it)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in all_of_it) / len(all_of_it))
        found.append({
            "grpo": (reward - mean) / (std + 1e-6),
            "dr_grpo": reward - mean,
            "rloo": reward - math.fsum(others) / len(others) if others else 0.0,
            "reinforce_pp_baseline": reward - mean,
        }[estimator])  # fmt: skip
    return found


every_estimator = pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])


@every_estimator
def test_group_advantages(estimator: str) -> None:
    draw = random.Random(0)
    groups = [3, 0, 0, 3, 3, 9, 0, 7, 7, 3, 10**12]  # mixed, of 4, 3, 1, 2 and 1 members
    rewards = [float(torch.tensor(draw.gauss(0, 2))) for _ in groups]
    found = group_advantages(estimator, torch.tensor(rewards), groups)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(group_by_hand(estimator, rewards, groups), **EXACT)


@every_estimator
def test_equal_rewards_and_lone_responses_teach_exactly_nothing(estimator: str) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([0.1, 0.1, 0.1, -3.7, 0.1, 0.1, 0.1, 0.1], dtype=dtype)
        assert not group_advantages(estimator, rewards, [0, 0, 0, 5, 1, 1, 1, 1]).any()
    assert group_advantages(estimator, torch.zeros(0), []).shape == (0,)


@every_estimator
def test_a_group_may_be_in_any_order_and_split_anyhow(estimator: str) -> None:
    """Each rank computes from all responses and takes its own: as if it had the whole group."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 2.0, 3.0, -1.0]), [0, 1, 0, 1, 0, 1]
    whole = group_advantages(estimator, rewards, groups)
    order = [5, 2, 0, 3, 1, 4]
    shuffled = group_advantages(estimator, rewards[order], [groups[i] for i in order])
    assert shuffled.tolist() == pytest.approx(whole[order].tolist(), **EXACT)
    alone = group_advantages(estimator, rewards[::2], [0, 0, 0])
    assert alone.tolist() == pytest.approx(whole[::2].tolist(), **EXACT)


def test_group_advantages_refuse_lengths_that_differ() -> None:
    with pytest.raises(ValueError, match="3 rewards and 2 groups"):
        group_advantages("grpo", torch.zeros(3), [0, 0])


def test_reinforce_pp_whitens_returns_to_go_over_all_tokens() -> None:
    """Hu et al. 2025, from its parts: a long response counts once per token."""
    rewards, expected = [], []
    for r in RESPONSES:
        rewards.append(token_rewards(r.score, len(r.places), r.counted(r.kl), 0.1))
        per_token = [-0.1 * r.kl[t] for t in r.places]
        if per_token:
            per_token[-1] += r.score
        expected.append([sum(per_token[i:]) for i in range(len(per_token))])
    found = whiten([rewards_to_go(row) for row in rewards], here)
    for row, by_hand in zip(found, whitened(expected), strict=True):
        assert row.tolist() == pytest.approx(by_hand, rel=2e-6, abs=2e-6)


# -- rollout against trainer


def mismatch_by_hand(mismatch: Mismatch, old: list[float], rollout: list[float]) -> tuple[list[float], int]:
    differences = [a - b for a, b in zip(old, rollout)]
    logs = differences if mismatch.level == "token" else [sum(differences)] * len(old)
    raw = [math.exp(min(max(x, -20), 20)) for x in logs]
    inside = [(mismatch.low if mismatch.correct == "mask" else 0) <= w <= mismatch.high for w in raw]
    weights = {
        "truncate": [min(w, mismatch.high) for w in raw],
        "mask": [w if ok else 0.0 for w, ok in zip(raw, inside)],
    }[mismatch.correct]
    return weights, inside.count(False)


@pytest.mark.parametrize("correct", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("n", [0, 1, 6])
def test_mismatch_weights(correct: str, level: str, n: int) -> None:
    mismatch = Mismatch(correct=correct, level=level, low=0.5, high=1.5)
    old = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.0, -30.0])[:n].requires_grad_()
    rollout = torch.tensor([-1.2, -2.1, -1.5, -1.0, -0.9, -0.01])[:n]
    weights, corrected = mismatch_weights(mismatch, old, rollout)
    expected, expected_number = mismatch_by_hand(mismatch, old.tolist(), rollout.tolist())
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert corrected == expected_number


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_engines_that_agree_have_weights_of_exactly_one(level: str) -> None:
    logprobs = -torch.rand(7)
    for correct in ("truncate", "mask"):
        weights, corrected = mismatch_weights(Mismatch(correct=correct, level=level), logprobs, logprobs)
        assert weights.tolist() == [1.0] * 7
        assert corrected == 0
    with pytest.raises(ValueError, match="correct=off"):
        mismatch_weights(Mismatch(level=level), logprobs, logprobs)


def test_a_band_without_an_inside_is_refused() -> None:
    with pytest.raises(ValueError, match="low=3 and high=2 leave no weight inside"):
        Mismatch(correct="mask", low=3.0, high=2.0)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
@pytest.mark.parametrize("rewards", [[3.0, 3.0, 3.0, 3.000001], [-200.0, -200.0005], [0.0, 1e-6]])
def test_rounding_is_no_signal(estimator: str, rewards: list[float]) -> None:
    assert not group_advantages(estimator, torch.tensor(rewards), [0] * len(rewards)).any()
    assert group_advantages(estimator, torch.tensor(rewards) + torch.linspace(0, 0.01, len(rewards)), [0] * len(rewards)).any()


def test_mismatch_weights_are_finite_whatever_the_log_probs() -> None:
    old, rollout = torch.tensor([-math.inf, 0.0, -1e30, -math.inf]), torch.tensor([0.0, -math.inf, -1e30, -math.inf])
    for level in ("token", "sequence"):
        weights, _ = mismatch_weights(Mismatch(correct="truncate", level=level), old, rollout)
        assert weights.isfinite().all()
