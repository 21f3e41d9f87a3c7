"""Rows of a data set: the one door to `datasets`.

JSONL is read line by line with the standard library, because Arrow's type inference changes values (a string that looks like a
date becomes a timestamp) and would cache them. Parquet and hub names go through `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


def load_rows(source: str, *, split: str = "train", limit: int | None = None) -> Sequence[Row]:
    """At most `limit` rows of a .jsonl / .parquet file or of `split` of a hub data set (or a local folder of one).

    Raises ValueError, in one line, for a missing or unreadable file, a line that is no JSON object, an unknown split or name.
    """
    path = Path(source).expanduser()
    if path.suffix in JSON_SUFFIXES:
        rows: Sequence[Row] = _json_lines(path, limit)
    else:
        rows = _through_datasets(path, source, split)
        if limit is not None and limit < len(rows):
            rows = rows.select(range(limit))  # type: ignore[attr-defined]
    if not len(rows):
        raise ValueError(f"data: {source} has no rows")
    return rows


def _json_lines(path: Path, limit: int | None) -> list[Row]:
    rows: list[Row] = []
    try:
        with path.open(encoding="utf-8-sig") as file:  # some editors put a byte-order mark first
            for number, line in enumerate(file, 1):
                if limit is not None and len(rows) == limit:
                    break
                if line.strip():
                    rows.append(_json_object(line, f"{path} line {number}"))
    except OSError as error:
        raise ValueError(f"data: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return rows


def _json_object(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
        if "\\u" in line:  # an escape may be half of a character, which no tokenizer and no file takes
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # ValueError also for a number of thousands of digits
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise ValueError(f"data: {place} is not JSON: {reason}") from error
    if not isinstance(row, dict):
        raise ValueError(f"data: {place} is a {type(row).__name__}; allowed: one JSON object a line")
    return row


def _through_datasets(path: Path, source: str, split: str) -> Any:
    parquet = path.suffix == ".parquet"
    looks_local = parquet or path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1
    if looks_local and not path.exists():
        raise ValueError(f"data: {source} does not exist; give a .jsonl or .parquet file, or a hub name")
    try:
        import datasets
    except ImportError as error:
        raise ValueError("data: parquet files and hub names need the package datasets: pip install datasets") from error
    try:
        if parquet:
            return datasets.load_dataset("parquet", data_files=str(path), split="train")
        return datasets.load_dataset(str(path) if path.is_dir() else source, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"data: cannot load {source} (split {split}): {reason}") from error
