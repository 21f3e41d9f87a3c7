"""What tests of whole runs share: tiny settings, and a run whose records and weights come back (also from a pool's rank)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from trainers.config import CONFIGS, NewModel, RunConfig
from trainers.loop import train
from trainers.new_model import write_new_model
from trainers.types import Prompt

CHARACTERS = "0123456789+=?\n"
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.2, "tie_word_embeddings": True,
}  # fmt: skip


class Killed(BaseException):
    """Stands for a kill: nothing of ours catches it."""


def tiny_folder(path: Path, *, seed: int = 0, characters: str = CHARACTERS, **settings: Any) -> str:
    """A qwen3 with a character tokenizer, of 16 ids where nothing else is said."""
    write_new_model(NewModel(architecture="qwen3", characters=characters, settings=SIZES | settings, seed=seed), path)
    return str(path)


def reward_that_fails(completion: str, prompt: Prompt) -> float:
    """At one row only, which one rank has."""
    return {1: 0.5}[prompt.index != 1]


def write_sums(path: Path, count: int = 10) -> str:
    """Rows of prompt, privileged, response and answer; prompts of 4 and 5 tokens. `long` is too long for a response."""
    sums = [(a, (7 * a) % 13) for a in range(count)]
    rows = [
        {"prompt": f"{a}+{b}=", "privileged": f"{a}+{b}={a + b}?", "response": str(a + b), "answer": str(a + b), "long": "1" * 70}
        for a, b in sums
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def settings(recipe: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of 4 steps on `folder`/student and `folder`/sums.jsonl, checkpoints every 2; `changes` by dotted key."""
    tree: dict[str, Any] = {
        "recipe": recipe,
        "output_dir": str(folder / "run"),
        "max_steps": 4,
        "model": {"path": str(folder / "student")},
        "data": {"train": str(folder / "sums.jsonl")},
        "train": {"micro_batch_tokens": 24, "batch_size": 3},
        "engine": {"optimizer": {"lr": 1e-2}, "dropout": False},
        "checkpoint": {"every": 2},
        "log": {"console": False, "completions": 1},
    }
    if recipe == "opsd":
        tree["teacher"] = {"path": str(folder / "teacher")}
        tree["rollout"] = {"prompts_per_step": 3, "samples_per_prompt": 2, "sampling": {"max_new_tokens": 5}}
    for key, value in changes.items():
        *section, last = key.split(".")
        part = tree
        for name in section:
            part = part.setdefault(name, {})
        part[last] = value
    return tree


def configure(tree: dict[str, Any]) -> RunConfig:
    return CONFIGS[tree["recipe"]].model_validate(tree)


def run(
    tree: dict[str, Any], *, stop_after: int | None = None, kill_after: int | None = None, stop_rank: int | None = None
) -> Any:
    """(result, records by step) of `train`. A stop is asked for after a step, on `stop_rank` only if given; a kill raises
    Killed once the step is logged and before its checkpoint."""
    records: dict[int, dict[str, Any]] = {}
    mine = stop_rank is None or torch.distributed.get_rank() == stop_rank

    def on_step(step: int, record: dict[str, Any]) -> None:
        records[step] = dict(record)
        if step == kill_after:
            raise Killed

    result = train(configure(tree), stop=lambda: mine and stop_after is not None and max(records) >= stop_after, on_step=on_step)
    return result, records


def run_and_report(tree: dict[str, Any], **how: Any) -> dict[str, Any]:
    """What crosses a process border of `run`: steps, stopped, losses by step."""
    result, records = run(tree, **how)
    losses = {step: record["loss"] for step, record in records.items() if "loss" in record}
    return {"steps": result.steps, "stopped": result.stopped_by_signal, "losses": losses}


def weights(tree: dict[str, Any]) -> dict[str, Tensor]:
    return load_file(Path(tree["output_dir"]) / "model" / "model.safetensors")


def lines(tree: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(tree["output_dir"]) / name).read_text(encoding="utf-8").splitlines()]
