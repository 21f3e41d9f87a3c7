"""Tokens to a score, from the records of a run."""

import json

import pytest

from recipes.bench.learning import draw, learning_curve, reached


def write(folder, records):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def test_tokens_add_up(tmp_path):
    records = [
        {"step": 0, "eval_reward": 0.1},
        {"step": 1, "generated_tokens": 100.0},
        {"step": 2, "generated_tokens": 0.0},
        {"step": 3, "generated_tokens": 100.0, "eval_reward": 0.5},
        {"step": 4, "generated_tokens": 200.0, "eval_reward": 0.9},
    ]
    assert learning_curve(write(tmp_path / "run", records)) == [(0.0, 0.1), (200.0, 0.5), (400.0, 0.9)]


def test_a_run_without_samples_or_evaluations_is_refused(tmp_path):
    with pytest.raises(ValueError, match="0 sampled tokens"):
        learning_curve(write(tmp_path / "a", [{"step": 0, "eval_reward": 0.1}, {"step": 1, "eval_reward": 0.2}]))
    with pytest.raises(ValueError, match="0 evaluations"):
        learning_curve(write(tmp_path / "b", [{"step": 1, "generated_tokens": 5.0}]))


@pytest.mark.parametrize(
    ("target", "tokens"), [(0.05, 0.0), (0.1, 0.0), (0.3, 100.0), (0.5, 200.0), (0.7, 300.0), (0.9, 400.0), (0.95, None)]
)
def test_between_evaluations_the_score_rises_in_a_line(target, tokens):
    found = reached([(0.0, 0.1), (200.0, 0.5), (300.0, 0.4), (300.0, 0.7), (400.0, 0.9)], target)
    assert found == (None if tokens is None else pytest.approx(tokens))


def test_the_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    draw({"a": [[(0.0, 0.1), (9.0, 0.8)]], "b": [[(0.0, 0.2), (5.0, 0.9)]]}, 0.8, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 1000
