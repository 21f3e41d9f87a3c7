"""What tests of `hybrid doctor` share: tiny recipes on real folders, and their rows."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from trainer_cases import configure, settings, tiny_folder, write_sums
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from recipes.doctor.examine import examine
from recipes.doctor.finding import Finding

SAMPLED = {"prompts_per_step": 3, "samples_per_prompt": 2, "sampling": {"max_new_tokens": 5}}
RECIPES = ("opsd", "sft", "ppo", "grpo", "reward")


def healthy(folder: Path) -> Path:
    """A student, another teacher, a reward model, sums to train on and others to evaluate, and pairs."""
    tiny_folder(folder / "student")
    tiny_folder(folder / "teacher", seed=1)
    scalar_folder(folder / "judge", beside=folder / "teacher")
    lines = Path(write_sums(folder / "sums.jsonl", count=12)).read_text().splitlines()
    (folder / "sums.jsonl").write_text("\n".join(lines[:10]))
    (folder / "held_out.jsonl").write_text("\n".join(lines[10:]))
    pairs = [{**json.loads(line), "chosen": json.loads(line)["response"], "rejected": "?"} for line in lines]
    write_rows(folder / "pairs.jsonl", pairs[:10])
    write_rows(folder / "held_out_pairs.jsonl", pairs[10:])
    return folder


def scalar_folder(path: Path, *, beside: Path) -> None:
    """A sequence classifier with one label, of the other folder's shape and tokenizer."""
    config = AutoConfig.from_pretrained(beside, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(beside).save_pretrained(path)


def tree(recipe: str, folder: Path, **changes: Any) -> dict[str, Any]:
    """`trainer_cases.settings` of a healthy recipe, with `changes` by dotted key."""
    common: dict[str, Any] = {"data.eval": str(folder / "held_out.jsonl"), "eval.max_new_tokens": 5}
    if recipe in ("ppo", "grpo"):
        common |= {"rollout": SAMPLED, "rewards": [{"name": "exact_match"}, {"model": str(folder / "judge")}]}
    if recipe == "reward":
        common = {"data.train": str(folder / "pairs.jsonl"), "data.eval": str(folder / "held_out_pairs.jsonl")}
    return settings(recipe, folder, **copy.deepcopy(common | changes))


def rows(recipe: str, folder: Path, *, nproc: int = 1, **changes: Any) -> list[Finding]:
    """The doctor's rows for `tree(recipe, folder, **changes)`."""
    return examine(configure(tree(recipe, folder, **changes)), nproc=nproc)


def of(findings: Iterable[Finding], check: str) -> list[Finding]:
    return [f for f in findings if f.check == check]


def complaints(findings: Iterable[Finding]) -> list[str]:
    """What is not ok, one line each: `FAIL check: found -> remedy`."""
    return [f"{f.level} {f.check}: {f.found} -> {f.remedy}" for f in findings if f.level != "ok"]


def only_complaint(findings: Iterable[Finding]) -> str:
    said = complaints(findings)
    assert len(said) == 1, said
    return said[0]


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def edit_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a JSON file after `change`; one that is not there is made."""
    content = json.loads(file.read_text()) if file.is_file() else {}
    change(content)
    file.write_text(json.dumps(content))


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> str:
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)
