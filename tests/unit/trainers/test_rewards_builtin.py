"""The functions of text and length, by hand."""

from __future__ import annotations

import re
from decimal import Decimal

import pytest

from trainers.rewards.builtin import exact_match, format_match, last_number, length_penalty, numeric_match, regex
from trainers.types import Prompt


def prompt(answer: str | None) -> Prompt:
    return Prompt(index=7, ids=(1,), text="", answer=answer)


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (" 42\n", "42", 1.0),
        ("42", " 42 ", 1.0),
        ("42.", "42", 0.0),
        ("", "42", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match(completion, answer, expected):
    assert exact_match(completion, prompt(answer)) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("3 + 4 = 7, so 1,234.50", "#### 1234.5", 1.0),
        ("7 - 9 = -2", "-2", 1.0),
        ("7 - 9 = \u22122", "-2", 1.0),
        ("it is 3-4", "-4", 0.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
        ("4, or rather 5", "4", 0.0),
        ("007", "7", 1.0),
        ("1,000,000", "1e6", 1.0),
        ("1,00", "100", 0.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("\u0664", "4", 1.0),
        ("1e999", "1e999", 1.0),
    ],
)
def test_numeric_match(completion, answer, expected):
    assert numeric_match(completion, prompt(answer)) == expected


def test_numbers_are_read_as_they_are_written():
    assert [str(last_number(t)) for t in ("a 1,000", "2024-05", "3.", "1,2", "is -5")] == ["1000", "5", "3", "2", "-5"]
    assert [last_number(t) for t in ("1,234.50", "-3", "x = .5", "-.5", "\u22123", "$1,000,000.", "2 eggs")] == [
        Decimal(n) for n in ("1234.5", "-3", "0.5", "-0.5", "-3", "1000000", "2")
    ]
    assert [last_number(t) for t in ("1e-5", "2.5E3", "3e", "1e99999")] == [Decimal("0.00001"), Decimal(2500), 3, 99999]
    assert [last_number(t) for t in ("", "none", "\u00b2")] == [None] * 3


def test_a_regex_is_found_anywhere_and_a_format_matches_everything():
    starts = regex(r"^\s*Answer: \S")
    assert [starts(text, prompt(None)) for text in (" Answer: Paris", "The Answer: Paris", "")] == [1.0, 0.0, 0.0]
    thinks = format_match("<think>.*</think>.+")
    texts = ("<think>a\nb</think>\n4", "<think></think>4", "<think>a</think>", "so <think>a</think>4", "")
    assert [thinks(text, prompt(None)) for text in texts] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert format_match("a|ab")("ab", prompt(None)) == 1.0
    assert format_match("a$")("a\n", prompt(None)) == 0.0, "a dollar sign would let a line break pass"
    assert re.compile("a$").match("a\n")


def test_the_length_penalty_falls_linearly_over_its_buffer():
    """DAPO's example, divided by 1024: 16 expected tokens and a buffer of 4."""
    lengths = (0, 1, 15, 16, 17, 18, 19, 20, 21, 1000)
    assert [length_penalty(n, max_tokens=20, buffer=4) for n in lengths] == [0, 0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1]
    assert [length_penalty(n, max_tokens=3, buffer=1) for n in (0, 2, 3, 4)] == [0, 0, -1, -1]
    assert [length_penalty(n, max_tokens=4, buffer=4) for n in (0, 1, 2, 4)] == [0, -0.25, -0.5, -1]


def test_a_missing_answer_names_the_row():
    for reward in (exact_match, numeric_match):
        with pytest.raises(ValueError, match=r"row 7 .*no answer"):
            reward("x", prompt(None))
    with pytest.raises(ValueError, match=r"row 7 .*holds no number"):
        numeric_match("4", prompt("four"))
