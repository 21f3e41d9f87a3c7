"""DeepSpeed's section `scheduler`: what is taken, what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from hybrid.training.config.schedulers import SCHEDULES, SchedulerConfig

REQUIRED = {
    "WarmupLR": {"warmup_min_lr": [0.0, 0.1]},
    "WarmupDecayLR": {"total_num_steps": "auto"},
    "WarmupCosineLR": {"total_num_steps": 9},
    "OneCycle": {"cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [1.0, 2.0]},
    "LRRangeTest": {},
}


def section(kind: str, **params: object) -> SchedulerConfig:
    return SchedulerConfig.model_validate({"type": kind, "params": params})


WARMUPS = ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


@pytest.mark.parametrize("kind", WARMUPS)
@pytest.mark.parametrize("steps", [None, -5, True, False, 1.5, math.nan, math.inf, "5", "abc", [5], np.bool_(True)])
def test_a_warmup_that_is_no_count_is_refused(kind, steps):
    with pytest.raises(ValidationError, match=f"params of {kind}: warmup_num_steps: "):
        section(kind, warmup_num_steps=steps, **{} if kind == "WarmupLR" else {"total_num_steps": 10})


@pytest.mark.parametrize("kind", WARMUPS)
@pytest.mark.parametrize(
    ("steps", "meant"), [(0, 0), (1, 1), (1e3, 1000), (np.int64(5), 5), (np.float64(6.0), 6), ("auto", 1000)]
)
def test_a_warmup_may_be_any_whole_number(kind, steps, meant):
    found = section(kind, warmup_num_steps=steps, **{} if kind == "WarmupLR" else {"total_num_steps": 10}).params
    assert found.warmup_num_steps == meant
    assert type(found.warmup_num_steps) is int


@pytest.mark.parametrize("total", [0, -1, math.nan, math.inf, 1.5, True, "10"])
@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_the_end_of_a_decay_is_a_count(kind, total):
    with pytest.raises(ValidationError, match=f"params of {kind}: total_num_steps"):
        section(kind, total_num_steps=total)
    with pytest.raises(ValidationError, match=f"params of {kind}: total_num_steps: Field required"):
        section(kind)


@pytest.mark.parametrize("kind", ["WarmupDecayLR", "WarmupCosineLR"])
def test_an_end_left_to_be_filled_in_is(kind):
    left = section(kind, total_num_steps="auto", warmup_num_steps=3)
    assert left.until(12) == section(kind, total_num_steps=12, warmup_num_steps=3)
    assert left.until(12).until(13) == left.until(12)
    assert section("WarmupLR").until(3) == section("WarmupLR")
    with pytest.raises(ValidationError, match="total_num_steps"):
        left.until(0)


@pytest.mark.parametrize(
    ("kind", "params", "match"),
    [
        ("WarmupLR", {"warmup_type": "cosine"}, "warmup_type"),
        ("WarmupLR", {"warmup_min_lr": -0.1}, "warmup_min_lr"),
        ("WarmupLR", {"warmup_max_lr": math.nan}, "warmup_max_lr"),
        ("WarmupLR", {"warmup_min_lr": 0.2, "warmup_max_lr": 0.1}, "warmup_min_lr=0.2 is above warmup_max_lr=0.1"),
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.3], "warmup_max_lr": [0.2, 0.2]}, "is above"),
        ("WarmupLR", {"warmup_min_lr": [0.1, 0.3], "warmup_max_lr": [0.2] * 3}, "has 2 values, warmup_max_lr 3"),
        ("WarmupDecayLR", {"warmup_min_lr": 0.2, "total_num_steps": 3}, "above warmup_max_lr=0.001"),
        ("WarmupCosineLR", {"cos_min_ratio": 1.5, "total_num_steps": 3}, "cos_min_ratio"),
        ("WarmupCosineLR", {"warmup_min_ratio": -1.0, "total_num_steps": 3}, "warmup_min_ratio"),
        ("OneCycle", {"cycle_max_lr": 1.0}, "cycle_min_lr: Field required"),
        ("OneCycle", {"cycle_min_lr": 1.0, "cycle_max_lr": 0.5}, "cycle_min_lr=1.0 is above"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 0}, "cycle_first_step_size"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_second_step_size": -1}, "cycle_second_step_size"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_max_mom": 1.0}, "cycle_max_mom"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_max_mom": 0.5}, "cycle_min_mom=0.8 is above"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size"),
        ("LRRangeTest", {"lr_range_test_step_rate": -1.0}, "lr_range_test_step_rate"),
        ("LRRangeTest", {"last_batch_iteration": -2}, "last_batch_iteration"),
        ("LRRangeTest", {"lr_range_step_size": 3}, "lr_range_step_size is unknown; nearest: lr_range_test_step_size"),
        ("warmuplr", {}, "type 'warmuplr' is unknown; nearest: WarmupLR"),
        ("Cyclic", {}, "type 'Cyclic' is unknown; (nearest|allowed): "),
        ("StepLR", {}, "type 'StepLR' is unknown"),
        (None, {}, "type None is unknown"),
    ],
)
def test_wrong_parameters_are_refused_by_name(kind, params, match):
    with pytest.raises(ValidationError, match=match):
        section(kind, **params)


def test_the_section_is_strict_and_reads_back():
    for kind, params in REQUIRED.items():
        config = section(kind, **params)
        assert type(config.params) is SCHEDULES[kind]
        assert SchedulerConfig.model_validate_json(config.model_dump_json()) == config
    for params in (None, {}):
        assert SchedulerConfig.model_validate({"type": "WarmupLR", "params": params}) == section("WarmupLR")
    for wrong in ({"type": "WarmupLR", "parms": {}}, {"params": {}}, {"type": "WarmupLR", "params": [1]}, "WarmupLR"):
        with pytest.raises(ValidationError):
            SchedulerConfig.model_validate(wrong)
    with pytest.raises(ValidationError, match="frozen"):
        section("WarmupLR").type = "OneCycle"


def test_the_defaults_are_deepspeeds():
    assert SCHEDULES["WarmupLR"]().model_dump() == {
        "last_batch_iteration": -1,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
    }
    assert SCHEDULES["WarmupDecayLR"](total_num_steps=3).warmup_max_lr == 0.001
    cosine = SCHEDULES["WarmupCosineLR"](total_num_steps=3)
    assert (cosine.warmup_min_ratio, cosine.cos_min_ratio) == (0.0, 0.0001)
    assert SCHEDULES["OneCycle"](cycle_min_lr=0.1, cycle_max_lr=0.2).model_dump() == {
        "last_batch_iteration": -1,
        "cycle_min_lr": 0.1,
        "cycle_max_lr": 0.2,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    }
    test = SCHEDULES["LRRangeTest"]()
    assert (test.lr_range_test_min_lr, test.lr_range_test_step_size) == (1e-3, 2000)
    assert (test.lr_range_test_step_rate, test.lr_range_test_staircase) == (1.0, False)
