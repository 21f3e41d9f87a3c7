"""`hybrid bench learning`: how many tokens each of several recipes generates until its held-out score reaches a target.

Every recipe is run with every seed, as `hybrid train` runs it; a finished run in the folder is not run again. Tokens are those
that all ranks sampled, also what dynamic sampling threw away; the score is that of the recipe's own evaluations, and between two
of them it is taken to rise in a straight line.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from recipes.bench.machine import machine, versions
from recipes.commands.plot import read_metrics

Curve = list[tuple[float, float]]  # (generated tokens so far, held-out score), by evaluation


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises ValueError for a recipe given twice, and where a run fails or has no evaluation."""
    recipes: dict[str, list[str]] = {}  # by name: the file, and what is set for it alone
    for recipe, *own in map(shlex.split, args.recipes):
        name = f"{Path(recipe).parent.name}/{Path(recipe).stem}"
        if name in recipes:
            raise ValueError(f"--recipes: {name} twice; allowed: each once, in one --out")
        recipes[name] = [recipe, *own]
    curves: dict[str, list[Curve]] = {}
    for name, line in recipes.items():
        curves[name] = [learning_curve(_trained(line, name, seed, args)) for seed in args.seeds]
    if args.plot is not None:
        draw(curves, args.target, args.plot)
    return {
        "command": "learning",
        "target": args.target,
        "seeds": args.seeds,
        "settings": {name: " ".join([*own, *args.set]) for name, (_, *own) in recipes.items()},
        "tokens_to_target": {name: _summary([reached(c, args.target) for c in of_seeds]) for name, of_seeds in curves.items()},
        "scores": {name: [f"{c[0][1]:.3f} -> {c[-1][1]:.3f}" for c in of_seeds] for name, of_seeds in curves.items()},
        "machine": machine(),
        "versions": versions(),
    }


def learning_curve(run_dir: Path) -> Curve:
    """Of a run's records. Raises ValueError for a run without evaluations, or that sampled nothing."""
    curve, generated = Curve(), 0.0
    for record in read_metrics(run_dir):
        generated += record.get("generated_tokens", 0.0)
        if record.get("eval_reward") is not None:
            curve.append((generated, record["eval_reward"]))
    if len(curve) < 2 or not generated:
        raise ValueError(f"{run_dir}: {len(curve)} evaluations, {generated:.0f} sampled tokens; set eval.every and data.eval")
    return curve


def reached(curve: Curve, target: float) -> float | None:
    """Tokens at which the score first is `target`; None if it never is."""
    if curve[0][1] >= target:
        return curve[0][0]
    for (tokens, score), (next_tokens, next_score) in pairwise(curve):
        if next_score >= target:
            return tokens + (next_tokens - tokens) * (target - score) / (next_score - score)
    return None


def draw(curves: dict[str, list[Curve]], target: float, path: Path) -> None:
    """All runs, a colour for each recipe. Raises ValueError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs the package matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, of_seeds) in enumerate(curves.items()):
        for i, curve in enumerate(of_seeds):
            axes.plot(*zip(*curve), color=f"C{number}", label=name if i == 0 else None, marker="o", markersize=3, linewidth=1)
    axes.axhline(target, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="tokens generated in training", ylabel="held-out score, greedy", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _trained(line: list[str], name: str, seed: int, args: argparse.Namespace) -> Path:
    """The folder of the finished run."""
    folder = args.out / f"{name.replace('/', '_')}_seed{seed}"
    command = [sys.executable, "-m", "recipes.cli", "train", *line, f"seed={seed}", f"output_dir={folder}", *args.set]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with code {done.returncode}: {done.stdout[-2000:]}")
    return folder


def _summary(tokens: list[float | None]) -> dict[str, Any]:
    found = [t for t in tokens if t is not None]
    shown = ["not reached" if t is None else round(t) for t in tokens]
    return {"by_seed": shown, "median": round(median(found)) if len(found) == len(tokens) else "not reached by all"}
