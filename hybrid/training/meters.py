"""What a run of the training engine is measured by: phases of a step, throughput, operations, collectives."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from hybrid.mesh import Mesh
from hybrid.profiling.comms import CommsLogger
from hybrid.profiling.flops import FlopsProfiler
from hybrid.profiling.phases import Phases
from hybrid.profiling.throughput import Throughput
from hybrid.training.config.top import TrainingConfig

WARMUP_STEPS = 2  # allocations, compilation


class Meters:
    """Of one engine. Each phase is timed once; what is off costs nothing."""

    def __init__(self, module: nn.Module, settings: TrainingConfig, mesh: Mesh, log: logging.Logger) -> None:
        self._settings, self._log, self._rank = settings, log, mesh.rank
        micro, accumulation = settings.train_micro_batch_size_per_gpu or 1, settings.gradient_accumulation_steps or 1
        peak = None if settings.peak_tflops is None else settings.peak_tflops * 1e12
        self.throughput = Throughput(
            settings.steps_per_print or 10, micro * accumulation, WARMUP_STEPS, peak_flops=peak, device=mesh.device
        )
        self.last: Mapping[str, float | None] = {}  # the last report of throughput
        self.phases = Phases()  # of the step that runs
        self.comms = CommsLogger(settings.comms_logger)
        if settings.comms_logger.enabled:
            self.comms.start()
        self.flops: FlopsProfiler | None = None
        if settings.flops_profiler.enabled:
            self.flops = FlopsProfiler(module, data_parallel_size=mesh.world_size)
        self._profiling = False
        self._flops_per_step = 0.0  # as profiled

    @contextmanager
    def phase(self, name: str, *, tokens: int = 0) -> Iterator[None]:
        """forward, backward and step are training, generate is generation."""
        with self.phases.phase(name, tokens) as phase:
            yield
        self.throughput.add("generate" if name == "generate" else "train", phase)

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Has its time among those of a step, and is neither in the throughput nor in the counted operations."""
        with self.phases.phase(name, 0), nullcontext() if self.flops is None else self.flops.paused():
            yield

    def before_forward(self, step: int) -> None:
        """The first forward of optimizer step `step` (from 1) that is to be profiled starts the profile."""
        if self.flops is not None and not self._profiling and step == self._settings.flops_profiler.profile_step:
            self._profiling = True
            self.flops.start_profile()

    def after_step(self, step: int) -> dict[str, float | None] | None:
        """What is reported after optimizer step `step`, if it is time."""
        if self._profiling and self.flops is not None:
            self._profiling = False
            self.flops.stop_profile()
            self._flops_per_step = float(self.flops.get_total_flops())
            section = self._settings.flops_profiler
            if self._rank == 0:
                self.flops.print_model_profile(
                    profile_step=step,
                    module_depth=section.module_depth,
                    top_modules=section.top_modules,
                    detailed=section.detailed,
                    output_file=section.output_file,
                )
        if self._flops_per_step and step > self._settings.flops_profiler.profile_step:
            with self.throughput.phase("train"):
                self.throughput.count(flops=self._flops_per_step)
        report = self.throughput.step()
        times = {name: phase.seconds for name, phase in self.phases.totals.items()}
        self.phases.clear()
        if report is not None:
            self.last = report
            if self._settings.wall_clock_breakdown and self._rank == 0:
                self._log.info("step=%d, times: %s", step, ", ".join(f"{n} {s * 1e3:.1f} ms" for n, s in times.items()))
        return report

    def close(self) -> None:
        """No hook and no mode is left."""
        if self._settings.comms_logger.enabled:
            self.comms.stop()
        if self._profiling and self.flops is not None:
            self.flops.stop_profile()


def tokens_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many token ids a forward was given: those of `input_ids`, else of a first argument of integers, else none."""
    given = kwargs.get("input_ids", args[0] if args else None)
    is_ids = isinstance(given, Tensor) and not given.is_floating_point() and given.ndim >= 1
    return given.numel() if is_ids else 0
