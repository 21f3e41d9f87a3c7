"""DeepSpeed's sections fp16 and bf16: what is taken, what is refused, and when."""

from __future__ import annotations

import math

import numpy as np
import pytest
from pydantic import ValidationError

from hybrid.training.config.precision import Bf16Config, Fp16Config


def test_the_defaults_are_deepspeeds():
    assert Fp16Config().model_dump() == {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1,
        "fp16_master_weights_and_grads": False,
        "max_loss_scale": 2.0**32,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
    }
    assert Bf16Config().model_dump() == {
        "enabled": False,
        "immediate_grad_update": False,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    }


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize("value", [0, -1])
def test_window_and_floor_count_only_with_a_dynamic_scale(name, value):
    with pytest.raises(ValidationError, match=f"{name}={value} with a dynamic scale"):
        Fp16Config(enabled=True, **{name: value})
    assert getattr(Fp16Config(enabled=True, loss_scale=128, **{name: value}), name) == value
    assert getattr(Fp16Config(enabled=False, **{name: value}), name) == value


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize(
    ("value", "meant"), [(1, 1), (1000, 1000), ("2", 2), (1e3, 1000), (2.0, 2), (np.int64(5), 5), (np.float32(4), 4)]
)
def test_whole_numbers_are_taken_in_any_form(name, value, meant):
    for section in ({"enabled": True}, {"enabled": True, "loss_scale": 128}, {}):
        found = getattr(Fp16Config(**section, **{name: value}), name)
        assert found == meant
        assert type(found) is int


@pytest.mark.parametrize("name", ["loss_scale_window", "min_loss_scale"])
@pytest.mark.parametrize(
    "value", [True, False, math.inf, -math.inf, math.nan, "abc", "1.5", "", None, 1.5, 0.25, [1], np.bool_(True)]
)
def test_what_is_no_whole_number_is_always_refused(name, value):
    for section in ({"enabled": True}, {"enabled": True, "loss_scale": 128}, {}):
        with pytest.raises(ValidationError, match=f"(?s){name}.*allowed: a whole number"):
            Fp16Config(**section, **{name: value})


@pytest.mark.parametrize("value", [True, False, math.inf, math.nan, "abc", "inf", None, -1, -0.5, [1.0], 10**400])
def test_a_loss_scale_is_finite_and_not_negative(value):
    with pytest.raises(ValidationError, match="loss_scale"):
        Fp16Config(loss_scale=value)


@pytest.mark.parametrize(("value", "meant"), [(0, 0.0), ("128", 128.0), (0.5, 0.5), (np.float32(2), 2.0)])
def test_a_loss_scale_may_be_any_number_or_its_text(value, meant):
    section = Fp16Config(enabled=True, loss_scale=value)
    assert section.loss_scale == meant
    assert section.dynamic is (meant == 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hysteresis": 0},
        {"hysteresis": -1},
        {"hysteresis": True},
        {"hysteresis": 1.5},
        {"initial_scale_power": -1},
        {"initial_scale_power": 127},
        {"initial_scale_power": 0.5},
        {"growth_factor": 1.0},
        {"growth_factor": 0.5},
        {"growth_factor": math.inf},
        {"growth_factor": math.nan},
        {"growth_factor": True},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": -0.5},
        {"backoff_factor": math.nan},
        {"max_loss_scale": 0.0},
        {"max_loss_scale": math.inf},
        {"max_loss_scale": 2.0**127},
        {"enabled": "true"},
        {"enabled": 1},
        {"auto_cast": None},
    ],
)
def test_what_fits_no_dynamic_scale_is_refused_at_construction(wrong):
    for section in ({"enabled": True}, {"loss_scale": 128}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Fp16Config(**section | wrong)


def test_the_scale_starts_between_floor_and_cap():
    for section in ({"min_loss_scale": 9}, {"max_loss_scale": 7.0}):
        with pytest.raises(ValidationError, match=rf"initial_scale_power=3, a scale of 8, is .*{next(iter(section))}"):
            Fp16Config(enabled=True, initial_scale_power=3, **section)
        assert not Fp16Config(enabled=True, loss_scale=128, initial_scale_power=3, **section).dynamic
    at_both = Fp16Config(enabled=True, initial_scale_power=3, min_loss_scale=8, max_loss_scale=8.0)
    assert at_both.initial_scale == 8.0
    assert Fp16Config(enabled=True, initial_scale_power=32).initial_scale == 2.0**32  # DeepSpeed's default of long ago


def test_fp16_master_weights_are_refused_with_what_to_do():
    with pytest.raises(ValidationError, match="bf16_master_weights_and_grads and bf16_optimizer_states, or offload"):
        Fp16Config(fp16_master_weights_and_grads=True)


def test_bf16_weights_and_their_optimizer_state_go_together():
    both = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert Bf16Config(enabled=True, **both).bf16_optimizer_states
    with pytest.raises(ValidationError, match="needs bf16_master_weights_and_grads=true"):
        Bf16Config(bf16_optimizer_states=True)
    with pytest.raises(ValidationError, match="set bf16_optimizer_states=true"):
        Bf16Config(bf16_master_weights_and_grads=True)
    with pytest.raises(ValidationError, match="check_grad_overflow"):
        Bf16Config(check_grad_overflow=None)


def test_auto_counts_as_not_given():
    assert Fp16Config(**dict.fromkeys(Fp16Config.model_fields, "auto")) == Fp16Config()
    assert Bf16Config(**dict.fromkeys(Bf16Config.model_fields, "auto")) == Bf16Config()


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValidationError, match="loss_scale_windw is unknown; nearest: loss_scale_window"):
        Fp16Config(loss_scale_windw=3)
    with pytest.raises(ValidationError, match="xyz is unknown; allowed: enabled, immediate_grad_update"):
        Bf16Config(xyz="auto")


def test_a_section_reads_back_as_it_was_written():
    section = Fp16Config(enabled=True, loss_scale_window="2", initial_scale_power=4.0)
    assert Fp16Config.model_validate_json(section.model_dump_json()) == section
