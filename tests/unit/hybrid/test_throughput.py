"""Rates under a clock that only moves when it is told to: exact numbers, no wall time."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest

from hybrid.profiling.phases import Phase, Phases
from hybrid.profiling.throughput import Throughput


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def one_step(meter: Throughput, clock: Clock, *, train: float = 0.25, generate: float = 0.5) -> dict | None:
    with meter.phase("generate"):
        clock.now += generate
        meter.count(tokens=64, samples=8, flops=1e9)
    clock.now += 100.0  # between phases: nobody's
    with meter.phase("train"):
        clock.now += train
        meter.count(tokens=1000)
        meter.count(tokens=24, flops=3e12)
    return meter.step()


def test_a_hundred_steps_are_reported_exactly_by_phase():
    clock = Clock()
    meter = Throughput(100, 16, clock=clock, peak_flops=24e12)
    reports = [one_step(meter, clock) for _ in range(200)]
    assert [i + 1 for i, report in enumerate(reports) if report is not None] == [100, 200]
    assert reports[99] == {
        "step": 100, "steps": 100,
        "generate/seconds": 50.0, "generate/tokens_per_second": 128.0, "generate/samples_per_second": 16.0,
        "generate/tflops": 0.002, "generate/mfu": 2e9 / 24e12,
        "train/seconds": 25.0, "train/tokens_per_second": 4096.0, "train/samples_per_second": 64.0,
        "train/tflops": 12.0, "train/mfu": 0.5,
    }  # fmt: skip
    assert reports[199] == reports[99] | {"step": 200}


@pytest.mark.parametrize(("warmup", "first"), [(0, 100), (2, 98), (99, 1), (100, None), (150, None)])
def test_warm_up_enters_no_report(warmup, first):
    clock = Clock()
    meter = Throughput(100, 1, warmup, clock)
    reports = [one_step(meter, clock, train=60.0 if i < warmup else 0.25) for i in range(300)]
    steps = [report and report["steps"] for report in reports if report is not None]
    assert steps == ([first] if first else []) + {150: [50]}.get(warmup, [100]) + [100]
    for report in filter(None, reports):
        assert report["train/tokens_per_second"] == 4096.0
        assert report["train/seconds"] == 0.25 * report["steps"]


def test_what_is_not_known_is_none_and_nothing_is_divided_by_zero():
    clock = Clock()
    meter = Throughput(1, 4, clock=clock)
    assert meter.step() == {"step": 1, "steps": 1}
    with meter.phase("train"):
        pass  # no time passes
    with meter.phase("generate"):
        clock.now += 2.0  # nothing is counted
    report = meter.step()
    assert report == {
        "step": 2, "steps": 1,
        "train/seconds": 0.0, "train/tokens_per_second": None, "train/samples_per_second": None, "train/tflops": None,
        "train/mfu": None,
        "generate/seconds": 2.0, "generate/tokens_per_second": None, "generate/samples_per_second": None,
        "generate/tflops": None, "generate/mfu": None,
    }  # fmt: skip
    with meter.phase("train"):
        clock.now += 5e-324
        meter.count(tokens=10**9, flops=1e20)
    clock.now = 0.0
    with meter.phase("generate"):
        clock.now += 5e-324
        meter.count(tokens=10**9, flops=1e20)
    report = meter.step()
    assert all(value is None or math.isfinite(value) for value in report.values())
    assert report["generate/tflops"] is report["train/mfu"] is None


def test_the_device_is_waited_for_where_a_report_or_the_warm_up_ends_and_nowhere_else():
    clock, waited = Clock(), []

    def wait() -> None:
        waited.append(clock.now)
        clock.now += 1.0

    meter = Throughput(10, 1, 2, clock, synchronize=wait)
    reports = [one_step(meter, clock) for _ in range(20)]
    assert len(waited) == 3
    assert reports[9]["train/seconds"] == 8 * 0.25 + 1.0  # the wait is the last phase's; that of the warm-up is nobody's
    assert reports[9]["generate/seconds"] == 8 * 0.5
    assert reports[19]["train/seconds"] == 10 * 0.25 + 1.0


def test_a_phase_that_the_monitor_timed_is_taken_as_it_is():
    clock = Clock()
    phases, meter = Phases(clock), Throughput(1, 3, clock=clock)
    with phases.phase("whatever", tokens=6) as phase:
        clock.now += 2.0
        phase.tokens += 4
    meter.add("train", phase)
    meter.add("train", Phase(tokens=10, seconds=3.0))
    report = meter.step()
    assert (report["train/seconds"], report["train/tokens_per_second"], report["train/samples_per_second"]) == (5.0, 4.0, 0.6)


def test_mistakes_are_met_at_the_door():
    for arguments in ((0, 1), (1, 0), (1, 1, -1)):
        with pytest.raises(ValueError, match="allowed: 1 or more"):
            Throughput(*arguments)
    for peak in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="peak_flops"):
            Throughput(1, 1, peak_flops=peak)
    meter = Throughput(1, 1)
    with pytest.raises(ValueError, match="allowed: train, generate"), meter.phase("rollout"):
        pass
    with pytest.raises(ValueError, match="allowed: train, generate"):
        meter.add("rollout", Phase())
    with pytest.raises(ValueError, match="outside a phase"):
        meter.count(tokens=1)
    with meter.phase("train"):
        with pytest.raises(ValueError, match="inside another phase"), meter.phase("generate"):
            pass
        with pytest.raises(ValueError, match="after the `with`"):
            meter.step()
        for wrong in ({"tokens": -1}, {"flops": math.inf}, {"flops": math.nan}):
            with pytest.raises(ValueError, match="finite, 0 or more"):
                meter.count(**wrong)


def test_a_phase_that_raises_is_over():
    clock = Clock()
    meter = Throughput(1, 1, clock=clock)
    with suppress(RuntimeError), meter.phase("train"):
        clock.now += 1.0
        raise RuntimeError
    with meter.phase("generate"):
        clock.now += 1.0
    assert {"train/seconds", "generate/seconds"} <= meter.step().keys()
