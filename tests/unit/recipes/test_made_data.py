import json
from pathlib import Path

import pytest

from recipes.data import MAKERS, make
from recipes.data.addition import NUM_HELD_OUT
from recipes.data.short_questions import COUNTRIES, THINGS

SETS = sorted({name.split("/")[0] for name in MAKERS})


def rows(name):
    return list(MAKERS[name]())


@pytest.mark.parametrize("name", SETS)
def test_no_held_out_prompt_is_trained_on(name):
    train, held_out = ([json.dumps(row["prompt"]) for row in rows(f"{name}/{split}")] for split in ("train", "held_out"))
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out)


@pytest.mark.parametrize("name", MAKERS)
def test_a_data_set_is_the_same_each_time(name):
    assert rows(name) == rows(name)


def test_sums_are_right_and_at_least_500_are_held_out():
    assert NUM_HELD_OUT >= 500
    for row in rows("addition/held_out"):
        a, b = row["prompt"].rstrip("=").split("+")
        assert row["response"] == row["answer"] == str(int(a) + int(b))


def test_no_name_stands_in_both_splits_of_the_short_questions():
    text = {split: json.dumps([r["prompt"] for r in rows(f"short_questions/{split}")]) for split in ("train", "held_out")}
    words = {split: set(t.replace("?", " ").replace('"', " ").split()) for split, t in text.items()}
    names = {*COUNTRIES, *THINGS}
    assert words["train"] & words["held_out"] & names == set()
    assert len(words["held_out"] & names) >= 15


def test_the_worked_calculation_gives_the_answer_and_its_sum_belongs_to_one_split():
    sums = {}
    for split in ("train", "held_out"):
        for row in rows(f"word_arithmetic/{split}"):
            *stages, result = row["privileged"].removesuffix(f". The answer is {row['answer']}.").split(" = ")
            assert {sum(map(int, stage.split(" + "))) for stage in stages} == {int(row["answer"])}
            assert result == row["answer"]
            sums.setdefault(split, set()).add(stages[0])
    assert not sums["train"] & sums["held_out"]


def test_make_writes_once_and_leaves_other_sources_alone(tmp_path):
    path = make("made:addition/held_out", tmp_path)
    assert len(Path(path).read_text().splitlines()) == NUM_HELD_OUT
    Path(path).write_text("kept")
    assert make("made:addition/held_out", tmp_path) == path
    assert Path(path).read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["addition-held_out.jsonl"]
    assert make("rows.jsonl", tmp_path) == "rows.jsonl"
    assert make(None, tmp_path) is None


def test_an_unknown_data_set_names_the_nearest(tmp_path):
    with pytest.raises(ValueError, match="nearest is made:addition/train"):
        make("made:adition/train", tmp_path)
