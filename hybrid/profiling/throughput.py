"""Tokens, samples and operations a second, and the share of the device's peak, of training and of generation apart.

Times are those of `phases`, as the monitor keeps them for each step; here they are summed over an interval. A phase that the
monitor timed can be handed over (`add`) and is not timed again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hybrid.profiling.phases import Phase, Phases

PHASES = ("train", "generate")


class Throughput:
    """Rates of this rank, every `interval` steps.

        with meter.phase("train"):
            ...
            meter.count(tokens=4096, flops=profiled)
        if (report := meter.step()) is not None:
            ...

    Steps are counted from 1 and reported at multiples of `interval`; the first `warmup_steps` enter no report. On CUDA phases are
    not waited for as they end, only where a report (or the warm-up) ends: that wait counts to the phase that was last.
    """

    def __init__(
        self,
        interval: int,
        batch: int,
        warmup_steps: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        *,
        peak_flops: float | None = None,
        device: torch.device | str = "cpu",
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        """batch: samples that this rank trains on in a step, where none are counted. clock: seconds. peak_flops: operations a
        second of which `mfu` is the share; None: not known, as of CPUs, and mfu is None. synchronize: waits for the device; None:
        as `device` needs. Raises ValueError for numbers out of range."""
        if interval < 1 or batch < 1 or warmup_steps < 0:
            raise ValueError(
                f"interval={interval}, batch={batch}, warmup_steps={warmup_steps}; allowed: 1 or more, 1 or more, 0 or more"
            )
        if peak_flops is not None and not 0 < peak_flops < math.inf:
            raise ValueError(f"peak_flops={peak_flops}; allowed: a positive number, or None where it is not known")
        self._interval, self._batch, self._warmup_steps, self._peak = interval, batch, warmup_steps, peak_flops
        self._synchronize = _synchronizer(torch.device(device)) if synchronize is None else synchronize
        self._clock = clock
        self._phases = Phases(clock)  # of the step that runs
        self._open: Phase | None = None
        self._last: str | None = None
        self._sums: dict[str, Phase] = {}  # of the steps since the last report
        self._step_count = self._measured = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Times a part of a step: "train" or "generate". Raises ValueError for another name, and inside another phase."""
        _require_known(name)
        if self._open is not None:
            raise ValueError(f"phase({name!r}) inside another phase; leave that one first")
        self._last = name
        with self._phases.phase(name) as self._open:
            try:
                yield self._open
            finally:
                self._open = None

    def count(self, *, tokens: int = 0, samples: int = 0, flops: float = 0.0) -> None:
        """Adds what was done to the phase that runs. Raises ValueError outside a phase, and for a negative or infinite number."""
        if self._open is None:
            raise ValueError("count() outside a phase; call it inside `with meter.phase(...)`")
        if not all(0 <= number < math.inf for number in (tokens, samples, flops)):
            raise ValueError(f"count(tokens={tokens}, samples={samples}, flops={flops}); allowed: finite, 0 or more")
        self._open.add(Phase(tokens, 0.0, samples, flops))

    def add(self, name: str, phase: Phase) -> None:
        """A phase of this step that was timed elsewhere, such as by the monitor, with its counts."""
        _require_known(name)
        self._last = name
        self._phases.totals.setdefault(name, Phase()).add(phase)

    def step(self) -> dict[str, float | None] | None:
        """Ends a step. At multiples of `interval`: the rates since the last report, else None.

        `step`, `steps` (how many were measured) and, for each phase P that ran: `P/seconds`, `P/tokens_per_second`,
        `P/samples_per_second`, `P/tflops` (1e12 operations a second), `P/mfu`. A rate is None where nothing was counted or no
        time passed. The report is None too where every step of it was a warm-up.
        """
        if self._open is not None:
            raise ValueError("step() inside a phase; call it after the `with`")
        self._step_count += 1
        due = self._step_count % self._interval == 0
        if due or self._step_count == self._warmup_steps:
            self._wait()
        totals = dict(self._phases.totals)
        self._phases.clear()
        if self._step_count > self._warmup_steps:
            self._measured += 1
            for name, phase in totals.items():
                if name == "train" and not phase.samples:
                    phase.samples = self._batch
                self._sums.setdefault(name, Phase()).add(phase)
        if not due or not self._measured:
            return None
        report: dict[str, float | None] = {"step": self._step_count, "steps": self._measured}
        for name, phase in self._sums.items():
            report |= {f"{name}/{key}": value for key, value in self._rates(phase).items()}
        self._sums, self._measured = {}, 0
        return report

    def _wait(self) -> None:
        start = self._clock()
        self._synchronize()
        if self._last is not None:
            self._phases.totals.setdefault(self._last, Phase()).seconds += self._clock() - start

    def _rates(self, phase: Phase) -> dict[str, float | None]:
        flops = _rate(phase.flops, phase.seconds)
        return {
            "seconds": phase.seconds,
            "tokens_per_second": _rate(phase.tokens, phase.seconds),
            "samples_per_second": _rate(phase.samples, phase.seconds),
            "tflops": None if flops is None else flops / 1e12,
            "mfu": None if flops is None or self._peak is None else flops / self._peak,
        }


def _rate(count: float, seconds: float) -> float | None:
    """None also for a quotient that no float holds."""
    if count <= 0 or seconds <= 0:
        return None
    rate = count / seconds
    return rate if math.isfinite(rate) else None


def _require_known(name: str) -> None:
    if name not in PHASES:
        raise ValueError(f"phase {name!r}; allowed: {', '.join(PHASES)}")


def _synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
