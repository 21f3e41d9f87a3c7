"""One JSON object a line, flushed line by line: metrics.jsonl and completions.jsonl. Every line is strict JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


class Records:
    """Appends to `path`. Records carry their step; `truncate` forgets later ones, so that a resumed run holds each step once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(json_ready(record), allow_nan=False, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def truncate(self, step: int) -> None:
        """Keeps the records of steps up to `step`; also drops a last line that a kill cut short."""
        kept = [line for line, record in read_records(self.path) if record["step"] <= step]
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        self._file.close()
        os.replace(partial, self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()


def read_records(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(line, record) of every whole line. A last line without its end is left out; raises ValueError for any other bad line."""
    lines = path.read_bytes().split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append((line.decode() + "\n", json.loads(line)))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}; repair or remove the file") from error
        if not isinstance(records[-1][1], dict) or not isinstance(records[-1][1].get("step"), int):
            raise ValueError(f"{path}, line {number} is no record of a step; repair or remove the file")
    return records


def json_ready(record: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them. JSON has no NaN and no infinity: such a metric becomes null, and `nonfinite` says what it was."""
    ready: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in record.items():
        value = value.item() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
        if isinstance(value, float) and not math.isfinite(value):
            ready[name], nonfinite[name] = None, str(value)
        else:
            ready[name] = value
    return ready | {"nonfinite": nonfinite} if nonfinite else ready
