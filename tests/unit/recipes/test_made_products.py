"""The conversations that made:products gives are those that the calculator would lead."""

from __future__ import annotations

from recipes.data import MAKERS
from recipes.settings import load_settings
from trainers.environments.calculator import calculate
from trainers.environments.registry import resolve
from trainers.types import Prompt


def test_a_given_call_is_answered_as_the_calculator_does_and_then_copied():
    rows = list(MAKERS["products/train"]())
    calls = [row for row in rows if row["response"].startswith("[")]
    assert 0.2 < len(calls) / len(rows) < 0.3
    rule = load_settings("recipes/grpo/products_calculator.yaml").rollout.environment
    for row in calls[:100]:
        environment = resolve(rule.name, rule.settings)(Prompt(index=0, ids=(2,), text=""))
        call, _, rest = row["response"].partition("]")
        said = environment.reply(f"{call}]", (), "stop").text + rule.suffix
        assert rest == said + row["answer"]
        assert environment.reply(row["answer"], (), "stop").text is None


def test_products_are_right():
    for row in MAKERS["products/held_out"]():
        assert row["answer"] == calculate(row["prompt"].rstrip("="))
    assert all(row["response"].endswith(row["answer"]) for row in MAKERS["products/train"]())
