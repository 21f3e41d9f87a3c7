"""The doctor's table as a whole; each check has broken recipes of its own in test_doctor_*.py."""

import pytest
import yaml
from doctor_cases import RECIPES, complaints, healthy, of, rows, tree
from trainer_cases import SIZES, configure, settings

from recipes.doctor import examine as examined
from recipes.doctor.examine import examine
from recipes.doctor.finding import Finding, exit_code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return healthy(tmp_path_factory.mktemp("healthy"))


def test_nothing_is_said_against_healthy_recipes_and_every_check_has_its_row(folder):
    seen = set()
    for recipe in RECIPES:
        findings = rows(recipe, folder)
        assert not complaints(findings), recipe
        seen |= {f.check for f in findings}
        assert (folder / "run").exists() is False
    assert seen == {name for name, _ in examined.CHECKS}


def test_an_error_in_one_check_is_a_row_and_the_others_are_seen(folder, monkeypatch):
    def broken(case):
        yield Finding("mine", "seen before the error")
        raise ZeroDivisionError("of its own")

    monkeypatch.setattr(examined, "CHECKS", (("mine", broken), *examined.CHECKS))
    findings = rows("opsd", folder)
    assert findings[0].found == "seen before the error"
    assert (findings[1].level, findings[1].check) == ("FAIL", "mine")
    assert "ZeroDivisionError: of its own" in findings[1].found
    assert len(of(findings, "memory")) == 4
    assert len(complaints(findings)) == 1


def test_data_that_cannot_be_read_is_said_once_and_noted_by_those_who_need_it(folder):
    findings = rows("opsd", folder, **{"data.train": str(folder / "nothing.jsonl")})
    said = complaints(findings)
    assert [line for line in said if line.startswith("FAIL data: ")]
    assert all("nothing.jsonl" in line for line in said if line.startswith("FAIL"))
    assert any(line.startswith("warn template: not examined: data.train cannot be read, see row `data`") for line in said)
    assert of(findings, "tokenizer")[0].level == "ok"
    assert len(of(findings, "memory")) == 4  # of full micro-batches


def test_a_model_that_cannot_be_opened_is_said_once_and_the_others_are_examined(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    findings = rows("opsd", folder, **{"teacher.path": str(tmp_path / "empty")})
    (failed,) = [f for f in findings if f.level == "FAIL"]
    assert failed.check == "models"
    assert "no model_type" in failed.found
    assert [f.level for f in of(findings, "models")] == ["ok", "FAIL"]
    assert of(findings, "special ids")[0].level == "ok"


def test_parts_that_other_recipes_train_first_are_examined_by_what_these_start_from(folder, tmp_path):
    part = settings("sft", folder, model={"new": {"architecture": "qwen3", "characters": "0123456789+=?\n", "settings": SIZES}})
    del part["output_dir"]
    for name in ("start", "part"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(part))
    parts = {"model": {"recipe": str(tmp_path / "start.yaml")}, "teacher": {"recipe": str(tmp_path / "part.yaml")}}
    findings = rows("opsd", folder, **parts, output_dir=str(tmp_path / "out"))
    assert not complaints(findings)
    policy, teacher = of(findings, "tokenizer")
    assert "a fresh qwen3, from which" in policy.found
    assert "start.yaml trains it first (model.recipe)" in policy.found
    assert "the policy's 16 tokens under the same ids" in teacher.found
    assert of(findings, "weights")[0].found.startswith("teacher: other weights than the student")
    assert any("is trained first" in f.found for f in of(findings, "files"))
    assert not (tmp_path / "out").exists()


def test_at_most_so_many_rows_are_read(folder):
    findings = examine(configure(tree("sft", folder)), max_rows=3)
    assert "the first 3 rows: 3 of 3 rows" in of(findings, "data")[0].found


@pytest.mark.parametrize(
    ("levels", "strict", "code"), [("ok", True, 0), ("ok warn", False, 0), ("ok warn", True, 2), ("warn FAIL", False, 2)]
)
def test_exit_codes(levels, strict, code):
    assert exit_code([Finding("x", "y", level) for level in levels.split()], strict=strict) == code
