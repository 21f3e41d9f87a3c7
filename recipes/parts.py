"""What a run needs before it can start: made data, and the models that other recipes train.

Everything lands in output_dir and is used again when it is there: data/, start/model, teacher/model, reward/model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recipes import launch
from recipes.data import make, make_all
from recipes.settings import SettingsError, load_settings
from trainers.config import FrozenTeacher, RewardModelRef, RunConfig


def sub_recipes(config: RunConfig, folder: Path | None = None, above: tuple[str, ...] = ()) -> dict[str, RunConfig]:
    """The runs that come before this one, by the folder they run in, in the order they are to run in. Their seed and device
    are this run's; all else, max_steps included, is their own. Raises SettingsError for a recipe that needs itself."""
    folder = folder or Path(config.output_dir)
    found: dict[str, RunConfig] = {}
    owners = [("teacher", getattr(config, "teacher", None)), *_reward_models(config), ("start", config.model)]
    for name, owner in owners:
        recipe = getattr(owner, "recipe", None)
        if recipe is None:
            continue
        if recipe in above:
            raise SettingsError(f"{recipe}: needs itself, through {' -> '.join([*above, recipe])}")
        part = folder / name
        fixed = {"output_dir": str(part), "seed": config.seed, "engine.device": config.engine.device}
        sub = load_settings(recipe, fixed=fixed)
        found |= sub_recipes(sub, part, (*above, recipe))
        found[str(part)] = sub
    return found


def prepare(config: RunConfig, stop: Callable[[], bool]) -> RunConfig | None:
    """Make or train what is missing, and return the config with every part replaced by its path; None if a signal stopped it.

    Every rank calls it: the parts are trained in the same process group as the run.
    """
    from trainers.loop import train
    from trainers.run_folder import check_same_config

    parts = sub_recipes(config)
    for folder, sub in parts.items():
        if (Path(folder) / "model" / "config.json").exists():
            if (Path(folder) / "config.yaml").exists():  # it was trained here: by this recipe?
                check_same_config(with_paths(sub), Path(folder))
            say(f"{folder}/model is there; using it")
            continue
        say(f"training {folder}/model")
        result = train(with_paths(sub), stop=stop)
        if result.stopped_by_signal:
            say_stopped(result.steps)
            return None
    if parts:
        say(f"training {config.output_dir}/model")
    return with_paths(config)


def with_paths(config: RunConfig) -> RunConfig:
    """The config with made data and trained models as paths; the data is made if missing."""
    out = Path(config.output_dir)
    update: dict[str, Any] = {"data": make_all(config.data, out / "data")}
    if (ptx := getattr(config, "ptx", None)) is not None:
        update["ptx"] = ptx.model_copy(update={"data": make(ptx.data, out / "data")})
    if config.model.recipe is not None:
        update["model"] = config.model.model_copy(update={"path": str(out / "start" / "model"), "recipe": None})
    teacher = getattr(config, "teacher", None)
    if isinstance(teacher, FrozenTeacher) and teacher.recipe is not None:
        update["teacher"] = teacher.model_copy(update={"path": str(out / "teacher" / "model"), "recipe": None})
    trained = dict(_reward_models(config))
    if trained:
        paths = {id(ref): str(out / name / "model") for name, ref in trained.items()}
        rewards = getattr(config, "rewards", ())
        update["rewards"] = tuple(
            ref.model_copy(update={"model": paths[id(ref)], "recipe": None}) if id(ref) in paths else ref for ref in rewards
        )
    return config.model_copy(update=update)


def _reward_models(config: RunConfig) -> list[tuple[str, RewardModelRef]]:
    """The reward models that are trained first, by the folder below output_dir."""
    refs = [r for r in getattr(config, "rewards", ()) if isinstance(r, RewardModelRef) and r.recipe is not None]
    return [("reward" if len(refs) == 1 else f"reward_{i + 1}", ref) for i, ref in enumerate(refs)]


def say_stopped(steps: int) -> None:
    say(f"stopped and saved at step {steps}; the same command goes on from there")


def say(line: str) -> None:
    if launch.is_main_rank():
        print(f"hybrid: {line}", file=sys.stderr, flush=True)
