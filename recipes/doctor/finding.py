"""A row of the doctor's table, and the table."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Level = Literal["ok", "warn", "FAIL"]
STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "FAIL": "bold red"}
WIDTH = 140  # of the table where it goes to a file


class NotExamined(Exception):
    """What this check reads could not be opened; another row says why."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row. `found` is what is there, `remedy` what to do about it (empty where all is well)."""

    check: str
    found: str
    level: Level = "ok"
    remedy: str = ""


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """2 where anything fails, or with `strict` is warned of; else 0."""
    bad = {"FAIL", "warn"} if strict else {"FAIL"}
    return 2 if any(f.level in bad for f in findings) else 0


def as_json(recipe: str, findings: Sequence[Finding]) -> str:
    return json.dumps({"recipe": recipe, "rows": [asdict(f) for f in findings], **counts(findings)}, ensure_ascii=False)


def counts(findings: Sequence[Finding]) -> dict[Level, int]:
    """How many rows there are of each level."""
    return {level: sum(f.level == level for f in findings) for level in STYLES}


def print_table(recipe: str, findings: Sequence[Finding]) -> None:
    """The table on stdout, as wide as the terminal, and a line with the sum."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = shutil.get_terminal_size((WIDTH, 50)).columns if sys.stdout.isatty() else WIDTH
    table = Table("check", "what was found", "", title=recipe, title_justify="left", box=SIMPLE_HEAD)
    for f in findings:
        found = Text(f.found)  # no markup: a template's tokens may look like some
        if f.remedy:
            found.append(f"\n-> {f.remedy}", style=STYLES[f.level])
        table.add_row(Text(f.check), found, Text(f.level, style=STYLES[f.level]))
    console = Console(width=width, highlight=False, emoji=False)
    console.print(table)
    console.print(", ".join(f"{number} {level}" for level, number in counts(findings).items()))
