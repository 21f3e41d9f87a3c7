"""`hybrid plot`: the curves of a run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# File name -> what it shows: axis label, and the metrics drawn into it where a run has them.
PLOTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "loss": ("loss per token", ("loss",)),
    "reward": ("reward of sampled responses", ("reward_mean",)),
    "eval": ("held-out reward, greedy; pairs ranked right", ("eval_reward", "eval_accuracy")),
    "kl": ("KL to the reference, nats per token", ("kl_reference", "kl_first_token")),
    "entropy": ("nats per token", ("entropy", "student_entropy", "teacher_entropy")),
    "critic": ("share of the returns' variance explained", ("explained_variance",)),
    "length": ("tokens per response", ("response_length_mean", "eval_length")),
    "throughput": ("tokens per second", tuple(f"{phase}/tokens_per_second" for phase in ("rollout", "score", "train"))),
}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "plot",
        help="draw the curves of a run",
        description="Draw what a run has of loss, rewards, KL, entropy, lengths and tokens per second into RUN_DIR/plots/*.png.",
        epilog="example:\n  hybrid plot runs/demo",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    return parser


def run(args: argparse.Namespace) -> int:
    for path in plot(args.run_dir):
        print(path)
    return 0


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl. A last line that a kill cut short is left out. Raises FileNotFoundError, ValueError."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number < len(lines) or line.endswith("\n"):
                raise ValueError(f"{path}:{number}: not JSON; was it edited?") from None
    return records


def plot(run_dir: Path) -> list[Path]:
    """Draw the plots for which the run has numbers; returns their paths. Raises ValueError where there are none."""
    records = read_metrics(run_dir)
    series = {
        name: {metric: points for metric in metrics if (points := _points(records, metric))}
        for name, (_, metrics) in PLOTS.items()
    }
    if not any(series.values()):
        raise ValueError(f"{run_dir}/metrics.jsonl has no step with a number to draw")
    try:
        from matplotlib.figure import Figure  # no pyplot: no display and no global state
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError("plots need the package matplotlib: pip install matplotlib") from None
    folder = run_dir / "plots"
    folder.mkdir(exist_ok=True)
    paths = []
    for name, curves in series.items():
        if not curves:
            continue
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for metric, points in curves.items():
            axes.plot(
                *zip(*points),
                label=metric.removesuffix("/tokens_per_second"),
                marker="o" if len(points) < 20 else None,
                markersize=4,
            )
        axes.set(xlabel="step", ylabel=PLOTS[name][0], title=run_dir.name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if len(curves) > 1:
            axes.legend()
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _points(records: Sequence[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [
        (r["step"], r[metric])
        for r in records
        if isinstance(r.get(metric), int | float) and math.isfinite(r[metric]) and "step" in r
    ]
