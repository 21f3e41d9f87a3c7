"""`hybrid train --check`: everything that can be known to be wrong before a model is loaded or a rank started."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from recipes.data import made_name
from recipes.parts import sub_recipes
from trainers.config import RunConfig
from trainers.environments.registry import resolve

FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")


def check_files(config: RunConfig) -> None:
    """Data files, made data sets, model folders and environments that a run and those before it name are there. No torch; an
    environment's `module:Class` is imported.

    Raises ValueError, FileNotFoundError.
    """
    out = Path(config.output_dir)
    if (blocked := next((p for p in (out, *out.parents) if p.exists()), None)) is not None and not blocked.is_dir():
        raise NotADirectoryError(f"output_dir={config.output_dir}: {blocked} is a file; choose another output_dir")
    for run in (*sub_recipes(config).values(), config):
        for key in ("train", "eval"):
            source = getattr(run.data, key)
            if source is None:
                continue
            _check_data(f"data.{key}", source)
        for key, path in _folders(run):
            if _looks_local(path) and not Path(path, "config.json").is_file():
                raise FileNotFoundError(f"{key}={path}: no Hugging Face folder there (no config.json)")
        if (mixed := getattr(getattr(run, "ptx", None), "data", None)) is not None:
            _check_data("ptx.data", mixed)
        vllm = getattr(getattr(run, "rollout", None), "vllm", None)
        if vllm is not None and shutil.which(vllm.python) is None:
            raise FileNotFoundError(
                f"rollout.vllm.python={vllm.python}: no program there; allowed: a Python that has vllm installed"
            )
        environment = getattr(getattr(run, "rollout", None), "environment", None)
        if environment is not None:
            resolve(environment.name, environment.settings)
        adapter = None if run.engine.lora is None else run.engine.lora.path
        if adapter is not None and not Path(adapter, "adapter_config.json").is_file():
            raise FileNotFoundError(f"engine.lora.path={adapter}: no adapter folder there (no adapter_config.json)")


def _check_data(key: str, source: str) -> None:
    if made_name(source) is None and source.endswith(FILE_SUFFIXES) and not Path(source).expanduser().is_file():
        raise FileNotFoundError(f"{key}={source}: no such file, neither from here nor beside the recipe")


def _folders(run: RunConfig) -> Iterator[tuple[str, str]]:
    """The models that a recipe names, by key."""
    for name in ("model", "teacher", "reference", "critic"):
        path = getattr(getattr(run, name, None), "path", None)
        if path is not None:
            yield f"{name}.path", path
    for i, reward in enumerate(getattr(run, "rewards", ())):
        if getattr(reward, "model", None) is not None:
            yield f"rewards.{i}.model", reward.model


def check(config: RunConfig) -> Iterator[str]:
    """All of `check_files`, then every row through tokenizer and reward, and every model's config and weight files. A line for
    each thing that was found in order. Raises ValueError, FileNotFoundError."""
    check_files(config)
    for folder, run in (*sub_recipes(config).items(), (config.output_dir, config)):
        yield f"{folder}: the recipe is valid"
        yield from _check_run(run)


def _check_run(run: RunConfig) -> Iterator[str]:
    from hybrid.models import check_weights
    from recipes.doctor.case import Case
    from trainers.config import RewardRecipe
    from trainers.evaluation import Evaluator
    from trainers.reward_model import check_pairs
    from trainers.rewards import RewardConfig, Rewards

    with Case.opened(run) as case:
        for names, role in case.shared():
            loaded = case.load(role)
            check_weights(loaded, case.settings(role), scalar=role.scalar)
            yield f"  {names}: {loaded.hf_config.model_type} of {role}, weights complete"
        loaded = case.load(case.policy)
        if loaded.tokenizer is None:
            raise ValueError(f"{case.policy}: no tokenizer, which training data needs; set model.tokenizer")
        prompts = case.load_data()
        yield f"  {run.data.train}: {len(prompts)} prompts"
        functions = [c for c in getattr(run, "rewards", ()) if isinstance(c, RewardConfig)]
        with closing(Rewards(functions)) as rewards:
            rewards.check(prompts.prompts)
        if functions:
            yield f"  rewards: {', '.join(rewards.names)}"
        if run.data.eval is None:
            return
        held_out = case.load_data(held_out=True)
        if isinstance(run, RewardRecipe):
            limit = run.engine.rollout.engine.max_model_len
            check_pairs(held_out.prompts, limit or loaded.hf_config.get_text_config().max_position_embeddings)
            yield f"  {run.data.eval}: {len(held_out)} held-out pairs"
            return
        if not run.eval.by_training_rewards:
            Evaluator(run.eval, held_out.prompts).close()
        yield f"  {run.data.eval}: {len(held_out)} held-out prompts, scored by {run.eval.reward}"


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()
