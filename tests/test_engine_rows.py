"""docs/engine_rows.md names tests that are there, and no row that must be green is missing."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
REQUIRED = set(
    """R02 R05 R08 R09 R10 R12 R20 R22 R32 R34 R41 R42 R48 R54 R56 S01 S02 S03 S04 S05 S06 S07 S08 S09 S10 S13 S14
                  D8 D13 D14""".split()
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (TESTS.parent / "docs/engine_rows.md").read_text().splitlines()
    if re.match(r"\| [RSD]\d", line)
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_tests_that_are_there(row):
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[2])
    assert named
    for file, name in named:
        functions = {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if isinstance(node, ast.FunctionDef)}
        assert name in functions, f"{file}::{name}"


def test_every_row_that_must_be_is_green():
    green = {name.strip() for row in ROWS if row[3].startswith("green") for name in row[0].split(",")}
    assert green >= REQUIRED
