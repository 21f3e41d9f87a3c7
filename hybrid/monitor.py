"""What a run tells: metrics.jsonl and completions.jsonl always, a progress line, and TensorBoard, W&B, trackio by choice."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Phase:
    """A timed part of a step; `tokens` may be added to inside the `with`."""

    tokens: int = 0
    seconds: float = 0.0


class Monitor:
    def __init__(
        self, output_dir: str | os.PathLike[str], config: Any, *, rank: int = 0, total_steps: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None: ...  # fmt: skip

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[Phase]:
        yield Phase(tokens)

    def add(self, metrics: Mapping[str, float]) -> None:
        """Metrics that join the next `log`."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One record for `step`, higher than the last one's."""

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def truncate(self, step: int) -> None:
        """Forgets the records of steps after `step`."""

    def close(self) -> None: ...
