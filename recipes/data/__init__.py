"""Small data sets that are made, not downloaded: `data.train: made:addition/train` in a recipe.

A maker is a deterministic function without arguments that yields rows; the rows land in output_dir/data as JSONL, once.
Its splits share no row. A new data set is a file here and a line in MAKERS.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from recipes.data import addition, arithmetic, products, short_questions, word_arithmetic
from trainers.config import DataConfig

Row = dict[str, Any]
MAKERS: dict[str, Callable[[], Iterator[Row]]] = {
    "addition/train": addition.train,
    "addition/held_out": addition.held_out,
    "addition/mostly_wrong": addition.mostly_wrong,
    "addition/pairs_train": addition.pairs_train,
    "addition/pairs_held_out": addition.pairs_held_out,
    "arithmetic/train": arithmetic.train,
    "arithmetic/held_out": arithmetic.held_out,
    "products/train": products.train,
    "products/held_out": products.held_out,
    "short_questions/train": short_questions.train,
    "short_questions/held_out": short_questions.held_out,
    "word_arithmetic/train": word_arithmetic.train,
    "word_arithmetic/held_out": word_arithmetic.held_out,
}


PREFIX = "made:"


def made_name(source: str | None) -> str | None:
    """`addition/train` for `made:addition/train`, None for any other source. Raises ValueError for an unknown data set."""
    if source is None or not source.startswith(PREFIX):
        return None
    name = source.removeprefix(PREFIX)
    if name not in MAKERS:
        near = difflib.get_close_matches(name, MAKERS, 1, 0.0)
        raise ValueError(f"data: made:{name} is not known; the nearest is made:{near[0]}")
    return name


def make(source: str | None, folder: Path) -> str | None:
    """The path of a made data set, written into `folder` unless it is there; any other source as it is. Several ranks may do
    so at once: each writes the same bytes to a file of its own and renames it."""
    name = made_name(source)
    if name is None:
        return source
    path = folder / f"{name.replace('/', '-')}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in MAKERS[name]())
        temporary.replace(path)
    return str(path)


def make_all(data: DataConfig, folder: Path) -> DataConfig:
    """The config with its made data sets as files in `folder`."""
    return data.model_copy(update={"train": make(data.train, folder), "eval": make(data.eval, folder)})
