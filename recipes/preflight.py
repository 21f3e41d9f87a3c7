"""`hybrid train --check`: everything that can be known to be wrong before a model is loaded or a rank started."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from recipes.data import made_name, make_all
from recipes.parts import sub_recipes
from trainers.config import RunConfig

FILE_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")


def check_files(config: RunConfig) -> None:
    """Data files, made data sets and model folders that a run and those before it name are there. No torch.

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
            if made_name(source) is None and source.endswith(FILE_SUFFIXES) and not Path(source).expanduser().is_file():
                raise FileNotFoundError(f"data.{key}={source}: no such file, neither from here nor beside the recipe")
        for key, path in (("model.path", run.model.path), ("teacher.path", getattr(getattr(run, "teacher", None), "path", None))):
            if path is not None and _looks_local(path) and not Path(path, "config.json").is_file():
                raise FileNotFoundError(f"{key}={path}: no Hugging Face folder there (no config.json)")


def check(config: RunConfig) -> Iterator[str]:
    """All of `check_files`, then every row through tokenizer and reward, and every model's config and weight files. A line for
    each thing that was found in order. Raises ValueError, FileNotFoundError."""
    check_files(config)
    for folder, run in (*sub_recipes(config).items(), (config.output_dir, config)):
        yield f"{folder}: the recipe is valid"
        yield from _check_run(run)


def _check_run(run: RunConfig) -> Iterator[str]:
    from inference_v2.loading import load_model
    from trainers.data.prompts import load_prompts
    from trainers.evaluation import Evaluator
    from trainers.new_model import write_new_model

    with tempfile.TemporaryDirectory() as temporary:
        model = run.model.path
        if run.model.new is not None:
            model = temporary
            write_new_model(run.model.new, Path(temporary))
        teacher = getattr(getattr(run, "teacher", None), "path", None)
        for path in filter(None, (model, teacher)):
            loaded = load_model(path, trust_remote_code=run.engine.trust_remote_code)
            shown = "a fresh model" if path == temporary else path
            yield f"  {shown}: {loaded.hf_config.model_type}, weights complete and readable"
        if model is None:
            yield "  data: read with the tokenizer of the model that is trained first"
            return
        loaded = load_model(model, trust_remote_code=run.engine.trust_remote_code, tokenizer=run.model.tokenizer)
        tokenizer = loaded.tokenizer
        if tokenizer is None:
            raise ValueError(f"{model}: no tokenizer, which training data needs; set model.tokenizer")
        data = make_all(run.data, Path(temporary))
        prompts = load_prompts(data, tokenizer, eos_token_ids=loaded.eos_token_ids)
        yield f"  {run.data.train}: {len(prompts)} prompts"
        if data.eval is not None:
            held_out = load_prompts(data, tokenizer, held_out=True)
            Evaluator(run.eval, held_out.prompts)
            yield f"  {run.data.eval}: {len(held_out)} held-out prompts, scored by {run.eval.reward}"


def _looks_local(path: str) -> bool:
    return path.startswith((".", "/", "~")) or path.count("/") != 1 or Path(path).exists()
