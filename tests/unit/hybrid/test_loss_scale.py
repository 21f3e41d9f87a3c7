"""Loss scales: the sequence of a dynamic one, its limits, its state; a user's own."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.optim.loss_scale import DynamicLossScale, LossScaleError, StaticLossScale, check_loss_scaler, loss_scaler_of
from hybrid.training.config.precision import Fp16Config


def scales_of(scaler, events: str) -> list[float]:
    """The scale of each backward: before the first event, and after each (o: overflow, c: clean)."""
    found = [scaler.scale]
    for event in events:
        scaler.update(event == "o")
        found.append(scaler.scale)
    return found


@pytest.mark.parametrize(
    ("settings", "events", "expected"),
    [
        ({"window": 2}, "cccccc", [256, 256, 256, 512, 512, 1024, 1024]),  # the first growth is with update window + 1
        ({"window": 2}, "ccccccc", [256, 256, 256, 512, 512, 1024, 1024, 2048]),
        ({"window": 1}, "cccc", [256, 256, 512, 1024, 2048]),  # with a window of 1 from the second on
        ({"window": 3}, "ccccccc", [256, 256, 256, 256, 512, 512, 512, 1024]),
        # An overflow starts the count anew
        ({"window": 2, "hysteresis": 1}, "cocccc", [256, 256, 128, 128, 128, 256, 256]),
        ({"window": 2, "hysteresis": 1}, "ccocccoc", [256, 256, 256, 128, 128, 128, 256, 128, 128]),
        # Hysteresis: the n-th overflow lowers the scale, and so does each after it
        ({"window": 9, "hysteresis": 1}, "ooo", [256, 128, 64, 32]),
        ({"window": 9, "hysteresis": 2}, "ooo", [256, 256, 128, 64]),
        ({"window": 9, "hysteresis": 3}, "oooo", [256, 256, 256, 128, 64]),
        # Without consecutive_hysteresis clean updates forget nothing until one grows the scale
        ({"window": 9, "hysteresis": 2}, "ocococ", [256, 256, 256, 128, 128, 64, 64]),
        ({"window": 9, "hysteresis": 3}, "ococo", [256, 256, 256, 256, 256, 128]),
        ({"window": 2, "hysteresis": 2}, "ococccoo", [256, 256, 256, 128, 128, 128, 256, 256, 128]),
        # With it any clean update does
        ({"window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "ocococ", [256] * 7),
        ({"window": 9, "hysteresis": 2, "consecutive_hysteresis": True}, "oocoo", [256, 256, 128, 128, 128, 64]),
        ({"window": 9, "hysteresis": 3, "consecutive_hysteresis": True}, "oocooo", [256, 256, 256, 256, 256, 256, 128]),
        ({"window": 9, "hysteresis": 1, "consecutive_hysteresis": True}, "ococ", [256, 128, 128, 64, 64]),
        # An overflow that only counts down still starts the window anew
        ({"window": 2, "hysteresis": 2}, "ccoccc", [256, 256, 256, 256, 256, 256, 512]),
        ({"window": 1, "max_scale": 600.0}, "cccc", [256, 256, 512, 600, 600]),
        ({"window": 9, "hysteresis": 1, "min_scale": 100.0}, "oo", [256, 128, 100]),
        ({"window": 1, "hysteresis": 1, "growth": 3.0, "backoff": 0.25}, "ccoc", [256, 256, 768, 192, 192]),
        # At the cap a growth still forgets overflows
        ({"window": 1, "hysteresis": 2, "max_scale": 256.0}, "occoo", [256, 256, 256, 256, 256, 128]),
    ],
)
def test_the_scale_of_each_step(settings, events, expected):
    assert scales_of(DynamicLossScale(initial_scale=256.0, **settings), events) == expected


@pytest.mark.parametrize(("hysteresis", "allowed"), [(1, 2), (2, 3), (3, 4)])
def test_an_overflow_at_the_floor_ends_the_run_and_says_how_many_came(hysteresis, allowed):
    scaler = DynamicLossScale(initial_scale=4.0, window=9, hysteresis=hysteresis, min_scale=1.0)
    scaler.update(False)
    for _ in range(allowed):
        scaler.update(True)
    assert scaler.scale == 1.0
    with pytest.raises(LossScaleError, match=rf"{allowed + 1} overflows in a row, {allowed + 1} in {allowed + 2} updates; lower"):
        scaler.update(True)
    assert issubclass(LossScaleError, RuntimeError)
    assert scaler.scale == 1.0


@given(
    events=st.text("ccco", max_size=40),
    cut=st.integers(0, 40),
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
)
def test_a_resumed_scaler_goes_on_as_if_nothing_had_happened(events, cut, window, hysteresis, consecutive):
    def fresh() -> DynamicLossScale:
        return DynamicLossScale(2.0**16, window, hysteresis, consecutive, min_scale=2.0**-60, max_scale=2.0**18)

    whole = fresh()
    expected = scales_of(whole, events)
    first, second = fresh(), fresh()
    before = scales_of(first, events[:cut])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before[:-1] + scales_of(second, events[cut:]) == expected
    assert second.state_dict() == whole.state_dict()


def test_a_resumed_scaler_keeps_within_its_own_limits():
    saved = DynamicLossScale(initial_scale=2.0**20, hysteresis=4)
    wide = DynamicLossScale(initial_scale=64.0, hysteresis=2, max_scale=1024.0)
    wide.load_state_dict(saved.state_dict())
    assert scales_of(wide, "oo") == [1024, 1024, 512]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"kind": "static"}, "dynamic here, static there"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": True}, "scale=True"),
        ({"clean": -1}, "clean=-1"),
        ({"hysteresis_left": 1.5}, "hysteresis_left=1.5"),
        ({"updates": True}, "updates=True"),
        ({"surplus": 1}, "surplus"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change, match):
    scaler = DynamicLossScale(initial_scale=256.0)
    scaler.update(True)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=match):
        scaler.load_state_dict({**before, **change})
    assert scaler.state_dict() == before


def test_a_state_that_lacks_something_is_refused():
    scaler = DynamicLossScale()
    with pytest.raises(ValueError, match=r"missing \['clean'\]"):
        scaler.load_state_dict({name: value for name, value in scaler.state_dict().items() if name != "clean"})


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 0},
        {"window": True},
        {"window": 1.5},
        {"hysteresis": 0},
        {"hysteresis": -1},
        {"growth": 1.0},
        {"growth": math.nan},
        {"growth": math.inf},
        {"backoff": 0.0},
        {"backoff": 1.0},
        {"min_scale": 0.0},
        {"initial_scale": 2.0, "min_scale": 4.0},
        {"initial_scale": 8.0, "max_scale": 4.0},
        {"max_scale": math.inf},
        {"initial_scale": math.nan},
    ],
)
def test_a_number_out_of_its_range_is_refused_at_the_start(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.*allowed"):
        DynamicLossScale(**settings)


def test_a_static_scale_never_changes():
    scaler = StaticLossScale(128)
    assert scales_of(scaler, "oocco") == [128.0] * 6
    other = StaticLossScale(64.0)
    other.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert other.scale == 64.0  # the configuration's
    with pytest.raises(ValueError, match="static here, dynamic there"):
        other.load_state_dict(DynamicLossScale().state_dict())
    for scale in (0.0, -1.0, math.inf, math.nan, True):
        with pytest.raises(ValueError, match="scale="):
            StaticLossScale(scale)


def test_the_section_says_which_scaler():
    off = loss_scaler_of(Fp16Config(loss_scale=128.0))
    static = loss_scaler_of(Fp16Config(enabled=True, loss_scale=128.0))
    assert (type(off), off.scale, type(static), static.scale) == (StaticLossScale, 1.0, StaticLossScale, 128.0)
    section = {"enabled": True, "initial_scale_power": 3, "loss_scale_window": 1, "hysteresis": 3, "consecutive_hysteresis": True}
    section |= {"min_loss_scale": 2, "max_loss_scale": 30.0, "growth_factor": 3.0, "backoff_factor": 0.25}
    dynamic = loss_scaler_of(Fp16Config(**section))
    assert scales_of(dynamic, "ccc" + "oo" + "c" + "ooo" + "o") == [8, 8, 24, 30, 30, 30, 30, 30, 30, 7.5, 2]
    with pytest.raises(LossScaleError):
        dynamic.update(True)


def test_the_defaults_of_scaler_and_section_agree():
    events = "c" * 1002 + "oo"
    assert scales_of(loss_scaler_of(Fp16Config(enabled=True)), events) == scales_of(DynamicLossScale(), events)
    assert scales_of(DynamicLossScale(), "c" * 1001)[-2:] == [2.0**16, 2.0**17]


def gradient_of(weight: torch.Tensor, target: float, scale: float) -> torch.Tensor:
    leaf = weight.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((leaf.cos().sum() - target).square() * scale, leaf)
    return gradient


def test_a_scaled_step_is_the_unscaled_one_bit_for_bit_also_where_the_scale_grows():
    weight = torch.linspace(-1, 1, 5)
    scaler = DynamicLossScale(initial_scale=2.0**10, window=3, hysteresis=1)
    growths = overflows = 0
    for step in range(80):
        before = scaler.scale
        gradient = gradient_of(weight, math.sin(step), before)
        overflow = gradient.abs().max().item() > torch.finfo(torch.float16).max
        overflows += overflow
        if not overflow:
            gradient /= before
            assert torch.equal(gradient, gradient_of(weight, math.sin(step), 1.0))
            weight.sub_(gradient, alpha=1e-2)
        scaler.update(overflow)
        growths += scaler.scale > before
    assert growths > 5
    assert overflows > 2


class DoublesWhenClean:
    """A user's own, which knows nothing of ours."""

    def __init__(self) -> None:
        self.scale = 8.0

    def update(self, has_overflow: bool) -> None:
        self.scale = self.scale / 4 if has_overflow else self.scale * 2

    def state_dict(self) -> dict:
        return {"scale": self.scale}

    def load_state_dict(self, state) -> None:
        self.scale = state["scale"]


def test_a_users_scaler_is_taken_as_it_is():
    scaler = DoublesWhenClean()
    assert check_loss_scaler(scaler) is scaler
    assert scales_of(scaler, "ccoc") == [8, 16, 32, 8, 16]
    for own in (StaticLossScale(2.0), DynamicLossScale()):
        assert check_loss_scaler(own) is own


def changed(**attributes: object) -> object:
    return type("Changed", (DoublesWhenClean,), attributes)()


@pytest.mark.parametrize(
    ("scaler", "match"),
    [
        (object(), r"object lacks scale, update\(overflow\), state_dict\(\), load_state_dict\(state\); allowed"),
        (DoublesWhenClean, "is a class; allowed: an object"),
        (changed(update=None), r"lacks update\(overflow\); allowed"),
        (changed(update=lambda self: None), r"lacks update\(overflow\); allowed"),
        (changed(load_state_dict=3), r"lacks load_state_dict\(state\); allowed"),
        (changed(state_dict=lambda self, prefix: {}), r"lacks state_dict\(\); allowed"),
        (changed(state_dict=lambda self: {"x": object()}), "no JSON object"),
        (changed(state_dict=lambda self: {"x": math.nan}), "no JSON object"),
        (changed(state_dict=lambda self: [1]), "no JSON object"),
        (changed(scale=property(lambda self: math.inf, lambda self, _: None)), r"lacks scale \(is inf"),
        (changed(scale=property(lambda self: 0, lambda self, _: None)), r"lacks scale \(is 0"),
        (changed(scale=property(lambda self: True, lambda self, _: None)), r"lacks scale \(is True"),
        (changed(scale=property(lambda self: "8", lambda self, _: None)), r"lacks scale \(is '8'"),
    ],
)
def test_what_a_users_scaler_lacks_is_named(scaler, match):
    with pytest.raises(ValueError, match=match):
        check_loss_scaler(scaler)
