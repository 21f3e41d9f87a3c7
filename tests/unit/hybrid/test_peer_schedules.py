"""DeepSpeed's learning-rate schedules: closed-form tables, resume, groups."""

from __future__ import annotations

import copy
import json
import logging
import math

import pytest
import torch
from torch import nn

from hybrid.optim.peer_schedules import PeerSchedule, make_schedule
from hybrid.optim.rates import MAX_MOMENTUM, rates
from hybrid.training.config.schedulers import SchedulerConfig

LOG_2, LOG_10 = math.log(2), math.log(10)


def section(kind: str, **params: object) -> SchedulerConfig:
    return SchedulerConfig.model_validate({"type": kind, "params": params})


def table(kind: str, indices: range, base: float = 1.0, **params: object) -> list[float]:
    """The rate at each index, of one group whose own rate is `base`."""
    return [rates(section(kind, **params).params, [base], index)[0] for index in indices]


def groups_of(*learning_rates: object, kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **settings: object):
    return kind([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in learning_rates], **settings)


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("settings", "expected"),  # at indices -1, 0, 1, ...
    [
        ({"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.25, 0.5, 0.75, 1, 1]),
        ({"warmup_num_steps": 10}, [0, 0, LOG_2 / LOG_10, math.log(3) / LOG_10, math.log(4) / LOG_10]),
        ({"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.2}, [0.2, 0.2, 0.4, 0.6, 0.8, 1, 1]),
        ({"warmup_num_steps": 2, "warmup_type": "linear", "warmup_max_lr": 3.0}, [0, 0, 1.5, 3, 3]),
        ({"warmup_num_steps": 1, "warmup_type": "linear"}, [0, 0, 0.5, 1, 1]),  # 1 counts as 2
        ({"warmup_num_steps": 2}, [0, 0, 1, 1]),
        ({"warmup_num_steps": 0}, [1, 1, 1]),
    ],
)
def test_warmup_rises_and_stays(settings, expected):
    assert table("WarmupLR", range(-1, len(expected) - 1), **settings) == pytest.approx(expected, rel=1e-12)


# (W, T): the factor after a linear rise, from index W (1 counts as 2) on
COSINE = {
    (10, 10): [0.1, 0.1, 0.1],
    (10, 5): [0.1, 0.1, 0.1],
    (1, 1): [0.1, 0.1, 0.1],
    (2, 100): [0.1 + 0.45 * (1 + math.cos(math.pi * k / 98)) for k in range(1, 99)] + [0.1, 0.1, 0.1],
}
LINE = {
    (10, 10): [0, 0, 0],
    (10, 5): [0, 0, 0],
    (1, 1): [0, 0, 0],
    (2, 100): [k / 98 for k in range(98, -1, -1)] + [0, 0, 0],
}
RISE = {10: [0, *(k / 10 for k in range(10))], 1: [0, 0, 0.5], 2: [0, 0, 0.5]}


@pytest.mark.parametrize(("warmup", "total"), [(10, 10), (10, 5), (1, 1), (2, 100)])
def test_the_decays_are_their_closed_forms_and_never_under_the_floor(warmup, total):
    settings = {"warmup_num_steps": warmup, "total_num_steps": total, "warmup_type": "linear"}
    expected = [rise * 2.0 for rise in RISE[warmup]] + [factor * 2.0 for factor in COSINE[warmup, total]]
    cosine = table("WarmupCosineLR", range(-1, len(expected) - 1), base=2.0, cos_min_ratio=0.1, **settings)
    assert cosine == pytest.approx(expected, rel=1e-12)
    expected = [0.5 + 1.5 * share for share in RISE[warmup] + LINE[warmup, total]]
    bounds = {"warmup_min_lr": 0.5, "warmup_max_lr": 2.0}
    line = table("WarmupDecayLR", range(-1, len(expected) - 1), **bounds, **settings)
    assert line == pytest.approx(expected, rel=1e-12)
    logarithmic = table(
        "WarmupCosineLR", range(-1, 150), cos_min_ratio=0.1, warmup_min_ratio=0.1, **settings | {"warmup_type": "log"}
    )
    for found, floor in ((cosine[max(2, warmup) + 1 :], 0.2), (line, 0.5), (logarithmic, 0.1)):
        assert min(found) == floor
    peak = max(2, warmup) + 1  # the index after the rise, in lists from -1 on
    for found in (cosine, line, logarithmic):
        assert found[:peak] == sorted(found[:peak])
        assert found[peak:] == sorted(found[peak:], reverse=True)


def test_a_decay_without_warmup_starts_at_the_full_rate():
    settings = {"warmup_num_steps": 0, "total_num_steps": 4}
    line = table("WarmupDecayLR", range(-1, 6), warmup_max_lr=1.0, **settings)
    assert line == [1, 1, 0.75, 0.5, 0.25, 0, 0]
    cosine = table("WarmupCosineLR", range(-1, 5), cos_min_ratio=0.0, **settings)
    half = math.sqrt(0.5) / 2
    assert cosine == pytest.approx([1, 0.5 + half, 0.5, 0.5 - half, 0, 0], abs=1e-15)


def test_the_cosine_starts_at_the_ratio_it_was_given():
    settings = {"warmup_num_steps": 4, "total_num_steps": 8, "warmup_type": "linear", "warmup_min_ratio": 0.2}
    assert table("WarmupCosineLR", range(-1, 4), base=10.0, **settings) == pytest.approx([2, 2, 4, 6, 8])


@pytest.mark.parametrize(
    ("settings", "expected"),  # at indices -1, 0, 1, ...
    [
        ({}, [1, 1.5, 2, 2.5, 3, 2.5, 2, 1.5, 1, 1, 1]),
        ({"cycle_second_step_size": 2}, [1, 1.5, 2, 2.5, 3, 2, 1, 1]),
        ({"cycle_second_step_size": 0}, [1, 1.5, 2, 2.5, 1, 1]),
        ({"cycle_first_stair_count": 2}, [1, 1, 2, 2, 3, 2, 2, 1, 1]),
        ({"cycle_first_stair_count": 2, "cycle_second_stair_count": 0}, [1, 1, 2, 2, 3, 2.5, 2, 1.5, 1]),
        ({"cycle_first_stair_count": 0, "cycle_second_stair_count": 1}, [1, 1.5, 2, 2.5, 3, 1, 1, 1, 1]),
        ({"decay_lr_rate": 0.5, "decay_step_size": 2}, [1, 1.5, 2, 2.5, 3, 2.5, 2, 1.5, 1, 1 / 1.25, 1 / 1.5, 1 / 1.75, 0.5]),
        ({"decay_lr_rate": 0.5}, [1, 1.5, 2, 2.5, 3, 2.5, 2, 1.5, 1, 1, 1, 1]),
    ],
)
def test_one_cycle(settings, expected):
    cycle = {"cycle_min_lr": 1.0, "cycle_max_lr": 3.0, "cycle_first_step_size": 4}
    assert table("OneCycle", range(-1, len(expected) - 1), **cycle, **settings) == pytest.approx(expected, rel=1e-12)


def test_stairs_of_uneven_halves_reach_the_peak():
    cycle = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 7, "cycle_second_step_size": 3}
    found = table("OneCycle", range(-1, 10), cycle_first_stair_count=7, cycle_second_stair_count=3, **cycle)
    assert found == pytest.approx([k / 7 for k in range(8)] + [2 / 3, 1 / 3, 0], rel=1e-12)


@pytest.mark.parametrize(
    ("staircase", "expected"), [(False, [0.5, 0.75, 1.0, 1.25, 1.5, 1.75]), (True, [0.5, 0.5, 1.0, 1.0, 1.5, 1.5])]
)
def test_the_range_test_rises_without_end(staircase, expected):
    settings = {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2, "lr_range_test_staircase": staircase}
    assert table("LRRangeTest", range(-1, 5), **settings) == expected


def test_one_cycle_moves_beta_1_against_the_rate():
    settings = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2, "cycle_min_mom": [0.5, 0.7]}
    optimizer = groups_of(0.3, 0.3, betas=(0.9, 0.999))
    schedule = make_schedule(section("OneCycle", decay_step_size=1, decay_mom_rate=0.05, **settings), optimizer)
    found = []
    for _ in range(8):
        found.append([group["betas"] for group in optimizer.param_groups])
        schedule.step()
    # The step before the first call runs at the minimum; after the cycle the momentum rises, but stays under 1
    first = [0.5, 0.7, 0.5, 0.7, 0.9, 0.9 * 1.05, 0.9 * 1.1, MAX_MOMENTUM]
    assert [betas[0][0] for betas in found] == pytest.approx(first, rel=1e-12)
    assert [betas[1][0] for betas in found[:5]] == pytest.approx([0.7, 0.8, 0.7, 0.8, 0.9], rel=1e-12)
    assert {beta2 for betas in found for _, beta2 in betas} == {0.99}


def test_one_cycle_moves_the_momentum_of_sgd_if_it_has_one(caplog):
    settings = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 2}
    optimizer = groups_of(0.3, kind=torch.optim.SGD, momentum=0.5)
    schedule = make_schedule(section("OneCycle", **settings), optimizer)
    schedule.seek(0)
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.85)
    still = groups_of(0.3, kind=torch.optim.SGD, momentum=0.5)
    make_schedule(section("OneCycle", cycle_momentum=False, **settings), still)
    assert still.param_groups[0]["momentum"] == 0.5
    assert not caplog.records
    none = groups_of(0.3, kind=torch.optim.SGD)
    make_schedule(section("OneCycle", **settings), none).seek(0)
    assert none.param_groups[0]["momentum"] == 0
    assert "cycle_momentum has no effect" in caplog.text


ALL = {
    "WarmupLR": {"warmup_num_steps": 6, "warmup_min_lr": [0.01, 0.0]},
    "WarmupDecayLR": {"warmup_num_steps": 3, "total_num_steps": 9, "warmup_max_lr": "auto"},
    "WarmupCosineLR": {"warmup_num_steps": 3, "total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [1.0, 2.0], "cycle_first_step_size": 4, "decay_step_size": 0},
    "LRRangeTest": {"lr_range_test_step_size": 3, "lr_range_test_min_lr": [0.1, 0.2]},
}


def train(optimizer: torch.optim.Optimizer, schedule: PeerSchedule, steps: int) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = p.detach().clone()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("order", ["schedule made last", "schedule loaded first", "optimizer loaded first"])
@pytest.mark.parametrize("kind", ALL)
def test_a_resumed_run_is_the_uninterrupted_one(kind, order, as_tensor):
    def fresh() -> torch.optim.Optimizer:
        learning_rates = (torch.tensor(0.5), torch.tensor(0.25)) if as_tensor else (0.5, 0.25)
        return groups_of(*learning_rates, foreach=False)

    config = section(kind, **ALL[kind])
    whole = fresh()
    schedule = make_schedule(config, whole)
    train(whole, schedule, 5)
    saved = json.loads(json.dumps(schedule.state_dict()))
    saved_optimizer = copy.deepcopy(whole.state_dict())  # else they share tensors
    weights = [[p.detach().clone() for p in group["params"]] for group in whole.param_groups]

    resumed = fresh()
    if order == "schedule made last":  # over an optimizer whose rates are those of mid-schedule
        resumed.load_state_dict(saved_optimizer)
        other = make_schedule(config, resumed)
        other.load_state_dict(saved)
    else:
        other = make_schedule(config, resumed)
        steps = [lambda: other.load_state_dict(saved), lambda: resumed.load_state_dict(saved_optimizer)]
        for load in steps if order == "schedule loaded first" else reversed(steps):
            load()
    for group, values in zip(resumed.param_groups, weights, strict=True):
        for p, value in zip(group["params"], values, strict=True):
            p.data.copy_(value)
    for _ in range(6):
        assert rates_of(resumed) == rates_of(whole)
        assert [g["betas"] for g in resumed.param_groups] == [g["betas"] for g in whole.param_groups]
        assert other.get_last_lr() == schedule.get_last_lr()
        train(whole, schedule, 1)
        train(resumed, other, 1)
    for group, same in zip(resumed.param_groups, whole.param_groups, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(group["params"], same["params"], strict=True))


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_two_groups_keep_their_ratio(kind):
    settings = {} if kind == "WarmupLR" else {"total_num_steps": 9}
    settings |= {} if kind == "WarmupCosineLR" else {"warmup_max_lr": None}
    optimizer = groups_of(0.3, 0.03)
    schedule = make_schedule(section(kind, warmup_num_steps=4, **settings), optimizer)
    seen = []
    for _ in range(8):
        seen.append(rates_of(optimizer))
        schedule.step()
    assert seen[0] == [0.0, 0.0]
    assert max(seen)[0] == pytest.approx(0.3, rel=0.1)
    assert [b for _, b in seen] == pytest.approx([a / 10 for a, _ in seen], rel=1e-12)


def test_one_list_may_stand_beside_one_number():
    optimizer = groups_of(1.0, 1.0)
    make_schedule(section("WarmupLR", warmup_min_lr=0.1, warmup_max_lr=[0.2, 0.3]), optimizer).seek(10**6)
    assert rates_of(optimizer) == pytest.approx([0.2, 0.3])


def test_a_rate_that_is_a_tensor_stays_that_tensor():
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = groups_of(rate, 0.25, foreach=False)
    schedule = make_schedule(section("WarmupCosineLR", warmup_num_steps=2, total_num_steps=9, warmup_type="linear"), optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.0
    for _ in range(2):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert (rate.item(), optimizer.param_groups[1]["lr"]) == (0.25, 0.125)
    assert schedule.get_last_lr() == [0.25, 0.125]
    schedule.load_state_dict(schedule.state_dict() | {"last_batch_iteration": 10})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.5e-4)


def test_a_schedule_may_start_in_the_middle_and_be_told_where_it_is():
    optimizer = groups_of(1.0)
    settings = {"warmup_num_steps": 4, "warmup_type": "linear"}
    schedule = make_schedule(section("WarmupLR", last_batch_iteration=2, **settings), optimizer)
    assert rates_of(optimizer) == [0.5]
    schedule.step()
    assert rates_of(optimizer) == [0.75]
    schedule.step(1)
    assert (rates_of(optimizer), schedule.last_batch_iteration) == ([0.25], 1)
    with pytest.raises(ValueError, match="index -2"):
        schedule.step(-2)


@pytest.mark.parametrize(
    ("kind", "params", "match"),
    [
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.1, 0.1]}, "3 values .* for 2 parameter groups"),
        ("WarmupLR", {"warmup_max_lr": [0.1]}, "1 values .* for 2 parameter groups"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": [1.0] * 3}, "3 values"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_max_mom": [0.9] * 3}, "3 values"),
        ("LRRangeTest", {"lr_range_test_min_lr": [0.1] * 3}, "3 values"),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, "needs total_num_steps; give it"),
        ("WarmupCosineLR", {"total_num_steps": None}, "needs total_num_steps; give it"),
    ],
)
def test_what_fails_leaves_the_optimizer_as_it_was(kind, params, match):
    rate = torch.tensor(0.5)
    optimizer = groups_of(rate, 0.25, foreach=False)
    with pytest.raises(ValueError, match=match):
        make_schedule(section(kind, **params), optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rates_of(optimizer) == [0.5, 0.25]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999)] * 2


def test_rates_that_are_not_finite_and_new_groups_are_refused():
    with pytest.raises(ValueError, match="learning rate nan of the optimizer"):
        make_schedule(section("WarmupLR"), groups_of(math.nan))
    optimizer = groups_of(0.5)
    schedule = make_schedule(section("WarmupLR", warmup_num_steps=2), optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.25})
    with pytest.raises(ValueError, match="2 parameter groups, 1 when"):
        schedule.step()
    assert rates_of(optimizer) == [0.0, 0.25]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"last_batch_iteration": -2}, "from -1"),
        ({"last_batch_iteration": True}, "from -1"),
        ({"last_batch_iteration": 1.5}, "from -1"),
        ({"base_lrs": None}, "base_lrs"),
        ({"base_lrs": ["1"]}, "base_lrs"),
        ({"base_lrs": [1.0, 1.0]}, "2 groups, the optimizer 1"),
        ({"base_lrs": [math.inf]}, "learning rate inf"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, match):
    optimizer = groups_of(0.5)
    schedule = make_schedule(section("WarmupLR", warmup_num_steps=4, warmup_type="linear"), optimizer)
    schedule.seek(2)
    before = schedule.state_dict()
    with pytest.raises(ValueError, match=match):
        schedule.load_state_dict(before | change)
    assert (schedule.state_dict(), rates_of(optimizer)) == (before, [0.25])


def test_an_end_within_the_warmup_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        make_schedule(section("WarmupCosineLR", total_num_steps=10, warmup_num_steps=10), groups_of(1.0))
        assert not caplog.records
        make_schedule(section("WarmupCosineLR", total_num_steps=5, warmup_num_steps=10), groups_of(1.0))
    assert "total_num_steps=5 ends within warmup_num_steps=10" in caplog.text
