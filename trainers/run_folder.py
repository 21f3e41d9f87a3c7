"""The folder of a run: config.yaml first, what may change on a resume, and where to go on.

config.yaml  metrics.jsonl  completions.jsonl  checkpoints/step_N/  model/  plots/; of some recipes adapter/  critic/  model_ema/;
init/ (model.new); what recipes.parts makes: data/  start/  teacher/  reward/
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hybrid.checkpoint import last_checkpoint
from hybrid.folders import remove_folder, write_folder
from hybrid.mesh import Mesh, first_error
from trainers.config import RunConfig

# Keys (and what is below them) that a resumed run may set anew: they do not enter what is trained, or only for how long.
FREE_KEYS = (
    *("output_dir", "max_steps", "log", "checkpoint", "certificate", "eval", "data.eval", "data.eval_split", "data.max_eval"),
    "engine.timeout_s",
    # Of memory and speed alone, but for rounding, as the number of ranks
    *("engine.zero_stage", "engine.shard_ranks", "engine.offload_optimizer", "engine.activation_checkpointing"),
    *("engine.loss_chunk_tokens", "engine.rollout.gather", "engine.rollout.on_leave", "engine.rollout.max_copy_bytes"),
    *("engine.rollout.engine.cache_bytes", "engine.rollout.engine.max_running", "engine.rollout.engine.max_step_tokens"),
    *("train.micro_batch_tokens", "critic.offload", "reference.offload", "teacher.offload"),
)
DECAY_END = "engine.optimizer.total_steps"


def open_run(config: RunConfig, run_dir: Path, mesh: Mesh) -> Path | None:
    """Write config.yaml and return the checkpoint to go on from, if any. Collective: rank 0 looks and writes.

    Raises ValueError on every rank if the folder was trained with another config (see FREE_KEYS), or cannot be written (rank 0:
    OSError).
    """
    error: ValueError | OSError | None = None
    if mesh.rank == 0:
        try:
            _prepare(config, run_dir)
        except ValueError as caught:
            error = caught
        except OSError as caught:
            error = OSError(caught.errno, caught.strerror, str(caught.filename or run_dir / "config.yaml"))
    if (line := first_error(error)) is not None:
        if isinstance(error, OSError):
            raise error
        raise ValueError(line if error is None else str(error)) from error
    return last_checkpoint(run_dir)


def _prepare(config: RunConfig, run_dir: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    while config.checkpoint.resume == "never" and (old := last_checkpoint(run_dir)) is not None:
        remove_folder(old)
    if last_checkpoint(run_dir) is not None:
        check_same_config(config, run_dir)
    write_config(config, run_dir)


def starting_model(config: RunConfig, run_dir: Path, *, resumed: bool) -> str:
    """The folder or hub name that the run starts from; `model.new` is written to `run_dir/init` by rank 0. Collective."""
    if config.model.new is None:
        if config.model.path is None:
            raise ValueError("model.recipe is not trained yet; run it first and set model.path to its model folder")
        return config.model.path
    folder, new = run_dir / "init", config.model.new
    if not resumed:  # a resumed run's self-teacher starts from the very same weights
        from trainers.new_model import write_new_model

        write_folder(folder, lambda _: None, finish=lambda partial: write_new_model(new, partial))
    return str(folder)


def write_config(config: RunConfig, run_dir: Path) -> None:
    """`run_dir/config.yaml`, whole or not at all."""
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
