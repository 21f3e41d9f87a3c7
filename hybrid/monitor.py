"""What a run tells: metrics.jsonl and completions.jsonl always, a progress line, and TensorBoard, W&B, trackio by choice."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from hybrid.memory import peak_bytes
from hybrid.profiling.phases import Phase, Phases
from hybrid.records import Records

SHOWN = ("loss", "reward_mean", "kl_reference", "accuracy", "grad_norm")  # metrics of the progress line, where a record has them
CELL_CHARACTERS = 120  # of a completion in the console's table


class LogSettings(Protocol):
    """What Monitor reads of a recipe's `log:` section."""

    @property
    def console(self) -> bool: ...
    @property
    def every(self) -> int:
        """Steps between progress lines and points in the loggers; metrics.jsonl has every step."""
        ...

    @property
    def console_completions_every(self) -> int | None: ...
    @property
    def tensorboard(self) -> bool: ...
    @property
    def wandb(self) -> str | None:
        """Project, as of trackio."""
        ...

    @property
    def trackio(self) -> str | None: ...


class Monitor:
    """Made on every rank; only rank 0 writes and shows. Raises ValueError, on every rank, for a logger that is not installed.

    A step's record is what `log` is given, and for each phase P of the step `P/seconds` and, if it counted tokens,
    `P/tokens_per_second` of this rank; `step_seconds`; `memory/peak_rss_gb` and on CUDA `memory/peak_cuda_gb` of this rank.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        config: LogSettings,
        *,
        rank: int = 0,
        total_steps: int | None = None,
        settings: Mapping[str, Any] | None = None,
        console: Console | None = None,
    ) -> None:
        """`settings` (the run's config) goes to W&B and trackio."""
        _require_loggers(config)
        self._dir, self._config, self._settings = Path(output_dir), config, dict(settings or {})
        self._phases = Phases()
        self._last_step: int | None = None
        self._last_time = time.perf_counter()
        self._active = rank == 0
        if not self._active:
            return
        self._dir.mkdir(parents=True, exist_ok=True)
        self._metrics = Records(self._dir / "metrics.jsonl")
        self._completions = Records(self._dir / "completions.jsonl")
        self._loggers: list[Logger] | None = None  # opened with the first point: then it is known where a resumed run goes on
        self._progress = ProgressLine(console or Console(), total_steps) if config.console else None

    def phase(self, name: str, tokens: int = 0) -> AbstractContextManager[Phase]:
        """Times a part of the step; several with one name add up. `tokens` may be added to inside the `with`."""
        return self._phases.phase(name, tokens)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """The one record of `step`. Raises ValueError if `step` is not above the last one logged."""
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"step {step} is logged after step {self._last_step}; give one record a step, in order")
        now = time.perf_counter()
        timings = self._timings()
        if metrics.get("sampled") == 0:  # given responses: nothing was generated, and the rate is that of a list
            timings.pop("rollout/tokens_per_second", None)
        record = {"step": step, **metrics, **timings, "step_seconds": now - self._last_time, **peak_memory()}
        self._last_step, self._last_time = step, now
        self._phases.clear()
        if not self._active:
            return
        self._metrics.write(record)
        if step % self._config.every == 0:
            if self._progress is not None:
                self._progress.show(step, record)
            for logger in self._open_loggers(step):
                logger.log(step, {n: float(v) for n, v in record.items() if n != "step" and isinstance(v, int | float)})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows (JSON) for completions.jsonl; every `console_completions_every` steps also a table on the console."""
        if not self._active:
            return
        for row in rows:
            self._completions.write({"step": step, **row})
        every = self._config.console_completions_every
        if self._progress is not None and rows and every is not None and step % every == 0:
            self._progress.console.print(completions_table(step, rows))

    def truncate(self, step: int) -> None:
        """Forgets records of steps after `step`: a resumed run makes them again. -1 forgets all."""
        self._last_step = None if step < 0 else step
        if self._active:
            self._metrics.truncate(step)
            self._completions.truncate(step)
            if self._progress is not None:
                self._progress.start_at(max(step, 0))

    def close(self) -> None:
        if not self._active:
            return
        if self._progress is not None:
            self._progress.close()
        for logger in self._loggers or ():
            logger.close()
        self._metrics.close()
        self._completions.close()
        self._active = False

    def _timings(self) -> dict[str, float]:
        timings = {}
        for name, phase in self._phases.totals.items():
            timings[f"{name}/seconds"] = phase.seconds
            if phase.tokens and phase.seconds:
                timings[f"{name}/tokens_per_second"] = phase.tokens / phase.seconds
        return timings

    def _open_loggers(self, step: int) -> list[Logger]:
        if self._loggers is None:
            named: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
            chosen = [(kind, project) for name, kind in named.items() if (project := getattr(self._config, name))]
            self._loggers = [kind(self._dir, project, self._settings, step) for kind, project in chosen]
        return self._loggers


class ProgressLine:
    """A live line on a terminal; elsewhere a plain line per step."""

    def __init__(self, console: Console, total_steps: int | None) -> None:
        self.console, self._total = console, total_steps
        self._first, self._start = 0, time.perf_counter()
        self._live: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[line]}"))
            self._live = Progress(*columns, console=console)
            self._task = self._live.add_task("", total=total_steps, line="")
            self._live.start()

    def start_at(self, step: int) -> None:
        self._first, self._start = step, time.perf_counter()
        if self._live is not None:
            self._live.reset(self._task, completed=step, line="")

    def show(self, step: int, record: Mapping[str, Any]) -> None:
        line = progress_text(record)
        if self._live is not None:
            self._live.update(self._task, completed=step, line=line)
            return
        total = "" if self._total is None else f"/{self._total}"
        eta = ""
        if self._total is not None and step > self._first:
            left = (time.perf_counter() - self._start) / (step - self._first) * (self._total - step)
            eta = f" | eta {int(left // 60)}:{int(left % 60):02d}"
        self.console.print(Text(f"step {step}{total} | {line}{eta}"), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def progress_text(record: Mapping[str, Any]) -> str:
    """`loss 0.123 | rollout 1520 tok/s | train 800 tok/s | swap 12 ms | 1.2 GB` of what the record has."""
    parts = [f"{name} {record[name]:.4g}" for name in SHOWN if record.get(name) is not None]
    parts += [f"{name} {value:.4g}" for name, value in record.items() if name.startswith("eval")]
    ending = "/tokens_per_second"
    parts += [f"{name.removesuffix(ending)} {value:.0f} tok/s" for name, value in record.items() if name.endswith(ending)]
    if record.get("swap_ms") is not None:
        parts.append(f"swap {record['swap_ms']:.0f} ms")
    memory = record.get("memory/peak_cuda_gb", record.get("memory/peak_rss_gb"))
    return " | ".join(parts if memory is None else [*parts, f"{memory:.2f} GB"])


def completions_table(step: int, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=f"completions of step {step}", show_lines=True)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for name in columns:
        table.add_column(name)
    for row in rows:
        cells = (str(row.get(name, "")) for name in columns)
        table.add_row(*(Text(c if len(c) <= CELL_CHARACTERS else f"{c[:CELL_CHARACTERS]}…") for c in cells))
    return table


def peak_memory() -> dict[str, float]:
    """Highest memory use of this process so far, in GB (1e9 bytes): resident on the host, allocated on CUDA."""
    peaks = {"memory/peak_rss_gb": peak_bytes(torch.device("cpu")) / 1e9}
    if torch.cuda.is_available():
        peaks["memory/peak_cuda_gb"] = peak_bytes(torch.device("cuda")) / 1e9
    return peaks


# -- loggers


class Logger(Protocol):
    def __init__(self, run_dir: Path, project: Any, settings: dict[str, Any], step: int) -> None:
        """`step` is the first that will be logged; what a killed process logged from there on is replaced where possible."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, run_dir: Path, project: Any, settings: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    def __init__(self, run_dir: Path, project: Any, settings: dict[str, Any], step: int) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project, name=run_dir.name, dir=str(run_dir), config=settings, resume="allow", id=_run_id(run_dir)
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, run_dir: Path, project: Any, settings: dict[str, Any], step: int) -> None:
        trackio = importlib.import_module("trackio")
        self._run = trackio.init(project=project, name=_run_id(run_dir), config=settings, resume="allow")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(run_dir: Path) -> str:
    """Kept in the run folder, so that a resumed run goes on in the same remote one."""
    path = run_dir / "run_id"
    if not path.exists():
        path.write_text(f"{run_dir.name}-{os.urandom(4).hex()}", encoding="utf-8")
    return path.read_text(encoding="utf-8")


def _require_loggers(config: LogSettings) -> None:
    for name in ("tensorboard", "wandb", "trackio"):
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise ValueError(f"log.{name} needs the package {name}, which is not installed; pip install {name}")
