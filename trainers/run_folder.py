"""The folder of a run: config.yaml first, what may change on a resume, and where to go on. No torch.

config.yaml  metrics.jsonl  completions.jsonl  checkpoints/step_N/  model/  plots/  init/ (model.new)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainers.config import RunConfig

# Keys (and what is below them) that a resumed run may set anew: they do not enter what is trained, or only for how long.
FREE_KEYS = ("output_dir", "max_steps", "log", "checkpoint", "eval", "data.eval", "data.eval_split", "data.max_eval")
DECAY_END = "engine.optimizer.total_steps"


def write_config(config: RunConfig, run_dir: Path) -> None:
    """`run_dir/config.yaml`, whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    partial = run_dir / ".config.yaml.partial"
    partial.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(partial, run_dir / "config.yaml")


def check_same_config(config: RunConfig, run_dir: Path) -> None:
    """Raises ValueError naming every key in which `config` differs from the run's own, but for those that may change."""
    path = run_dir / "config.yaml"
    try:
        earlier = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{run_dir} holds checkpoints but no readable config.yaml: {error}; set another output_dir") from error
    if not isinstance(earlier, dict):
        raise ValueError(f"{path} is no config; set another output_dir")
    before, now = (_compared(tree) for tree in (earlier, config.model_dump(mode="json")))
    differing = [
        f"{key} (was {before.get(key)!r}, now {now.get(key)!r})"
        for key in dict.fromkeys([*now, *before])
        if before.get(key) != now.get(key)
    ]
    if differing:
        raise ValueError(
            f"{run_dir} was trained with another config: {', '.join(differing)}; set these back, choose another output_dir, or "
            "start over with checkpoint.resume=never"
        )


def _compared(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves that must not change, by dotted key. A decay that ends with the run follows max_steps."""
    leaves = dict(_leaves(tree))
    if leaves.get(DECAY_END) == leaves.get("max_steps"):
        leaves[DECAY_END] = None
    return {key: value for key, value in leaves.items() if not any(f"{key}.".startswith(f"{free}.") for free in FREE_KEYS)}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
