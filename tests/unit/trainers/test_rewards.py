from __future__ import annotations

from decimal import Decimal

import pytest

from trainers.rewards import last_number, resolve
from trainers.types import Prompt


def prompt(answer: str | None) -> Prompt:
    return Prompt(index=7, ids=(1,), text="", answer=answer)


@pytest.mark.parametrize(
    ("name", "completion", "answer", "expected"),
    [
        ("exact_match", " 42\n", "42", 1.0),
        ("exact_match", "42.", "42", 0.0),
        ("numeric_match", "3 + 4 = 7, so 1,234.50", "#### 1234.5", 1.0),
        ("numeric_match", "7 - 9 = -2", "-2", 1.0),
        ("numeric_match", "it is 3-4", "-4", 0.0),
        ("numeric_match", "no idea", "4", 0.0),
        ("numeric_match", "007", "7", 1.0),
        ("numeric_match", "0.1", "0.10000000000000001", 0.0),
        (r"regex:^\s*Answer: \S", " Answer: Paris", None, 1.0),
        (r"regex:^\s*Answer: \S", "The Answer: Paris", None, 0.0),
    ],
)
def test_values(name, completion, answer, expected):
    assert resolve(name)(completion, prompt(answer)) == expected


def test_numbers_are_read_as_they_are_written():
    assert [str(last_number(t)) for t in ("a 1,000", "2024-05", "3.", "1,2", "is -5")] == ["1000", "5", "3", "2", "-5"]
    assert [last_number(t) for t in ("1,234.50", "-3", "x = .5", "-.5", "\u22123", "$1,000,000.", "2 eggs")] == [
        Decimal(n) for n in ("1234.5", "-3", "0.5", "-0.5", "-3", "1000000", "2")
    ]
    assert [last_number(t) for t in ("1e-5", "2.5E3", "3e", "1e99999")] == [Decimal("0.00001"), Decimal(2500), 3, 99999]


def length_reward(completion: str, prompt: Prompt) -> float:
    return float(len(completion))


def test_a_reward_from_a_module(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "my_rewards", sys.modules[__name__])
    assert resolve("my_rewards:length_reward")("abc", prompt(None)) == 3.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exact_mach", "did you mean exact_match"),
        ("zzz", "allowed: exact_match, numeric_match, regex:PATTERN, module:function"),
        ("regex:(", "not a regular expression"),
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        ("math:no_such", "math has no function 'no_such'"),
        ("math:pi", "math has no function 'pi'"),
        (":f", "cannot import ''"),
    ],
)
def test_unknown_rewards_are_named(name, expected):
    with pytest.raises(ValueError, match=expected):
        resolve(name)


def test_a_module_that_fails_to_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="reward broken_rewards:f: cannot import 'broken_rewards': ZeroDivisionError"):
        resolve("broken_rewards:f")


def test_a_missing_answer_names_the_row():
    for name in ("exact_match", "numeric_match"):
        with pytest.raises(ValueError, match=r"row 7 .*no answer"):
            resolve(name)("x", prompt(None))
    with pytest.raises(ValueError, match=r"row 7 .*holds no number"):
        resolve("numeric_match")("4", prompt("four"))
