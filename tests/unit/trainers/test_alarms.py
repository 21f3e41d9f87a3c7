"""Alarms say what they saw, after several steps of it, and not at every step; a healthy run has none."""

import pytest

from trainers.alarms import PATIENCE, SILENCE, Alarms

HEALTHY = {
    "reward_std": 0.4, "reward_mean": 0.5, "no_signal": 0.3, "entropy": 0.8, "student_entropy": 0.8,
    "teacher_entropy": 0.7, "repetition": 0.05, "truncated": 0.1,
    "top1_agreement": 0.7, "teacher_logprob": -0.9, "first_token_loss": 0.5, "loss": 0.3, "kl_reference": 0.05,
    "mismatch_abs": 1e-6, "updates": 1, "reward/exact_match_failures": 0.0,
}  # fmt: skip
FAULTS = {
    "no signal": [{"reward_std": 0.0}, {"no_signal": 1.0}],
    "collapse": [{"entropy": 0.001}, {"student_entropy": 0.01}, {"repetition": 0.9}],
    "no update": [{"updates": 0}],
    "endless": [{"truncated": 1.0}],
    "wrong teacher": [{"top1_agreement": 0.05, "teacher_logprob": -9.0}, {"first_token_loss": 30.0}],
    "runaway": [{"kl_reference": 9.0}],
    "mismatch": [{"mismatch_abs": 0.4}],
    "failing reward": [{"reward/exact_match_failures": 3.0}],
}


def lines_of(records):
    alarms = Alarms()
    return [line for step, record in enumerate(records, start=1) for line in alarms.look(step, record)]


def test_a_healthy_run_has_no_alarm():
    assert lines_of([HEALTHY] * 200) == []


def test_records_without_these_numbers_have_no_alarm():
    assert lines_of([{"loss": 1.0, "epoch": 0}] * 20) == []


@pytest.mark.parametrize(("name", "change"), [(name, change) for name, changes in FAULTS.items() for change in changes])
def test_a_fault_is_named_after_several_steps_of_it(name, change):
    steps = [HEALTHY] * 3 + [HEALTHY | change] * (PATIENCE - 1)
    assert lines_of(steps) == []
    (line,) = lines_of([*steps, HEALTHY | change])
    assert line.startswith(f"step {3 + PATIENCE}: alarm ({name}): ")


def test_a_policy_that_has_learnt_its_task_has_not_collapsed():
    assert lines_of([HEALTHY] * 3 + [HEALTHY | {"entropy": 0.001, "reward_mean": 0.9}] * 20) == []
    assert lines_of([HEALTHY] * 3 + [HEALTHY | {"student_entropy": 0.01, "teacher_entropy": 0.01}] * 20) == []


def test_one_odd_step_is_no_alarm():
    assert lines_of([HEALTHY, HEALTHY | {"reward_std": 0.0, "truncated": 1.0}] * 20) == []


def test_an_alarm_is_not_said_at_every_step_but_again_later():
    steps = [HEALTHY | {"reward_std": 0.0}] * (PATIENCE + SILENCE)
    assert len(lines_of(steps)) == 2
    assert len(lines_of(steps[:-1])) == 1
