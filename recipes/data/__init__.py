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

from recipes.data import addition, short_questions, word_arithmetic

Row = dict[str, Any]
MAKERS: dict[str, Callable[[], Iterator[Row]]] = {
    "addition/train": addition.train,
    "addition/held_out": addition.held_out,
    "short_questions/train": short_questions.train,
    "short_questions/held_out": short_questions.held_out,
    "word_arithmetic/train": word_arithmetic.train,
    "word_arithmetic/held_out": word_arithmetic.held_out,
}


def check_name(name: str) -> None:
    """Raises ValueError for an unknown data set, naming the nearest."""
    if name not in MAKERS:
        near = difflib.get_close_matches(name, MAKERS, 1, 0.0)
        raise ValueError(f"data: made:{name} is not known; the nearest is made:{near[0]}")


def make(name: str, folder: Path) -> Path:
    """Write data set `name` into `folder`, unless it is there, and return its path. Several ranks may do so at once: each
    writes the same bytes to a file of its own and renames it."""
    check_name(name)
    path = folder / f"{name.replace('/', '-')}.jsonl"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in MAKERS[name]())
        temporary.replace(path)
    return path
