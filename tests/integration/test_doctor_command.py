"""`hybrid doctor` as it is called, and its memory plan beside a run's own peak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from doctor_cases import edit_json, healthy, tree, write_rows
from tiny import save_tiny
from trainer_cases import configure

from inference_v2.loading import FolderSource
from recipes.cli import main
from recipes.doctor.case import Case
from recipes.doctor.plan import Plan


@pytest.fixture
def recipe(tmp_path):
    healthy(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree("opsd", tmp_path)))
    return str(path)


def table(capsys) -> str:
    """What was printed, with the lines of a cell in one."""
    return " ".join(capsys.readouterr().out.split())


def test_a_table_a_sum_and_exit_code_0(recipe, capsys):
    assert main(["doctor", recipe, "--strict"]) == 0
    said = table(capsys)
    assert said.startswith(f"{recipe} check what was found")
    assert "tokenizer policy: 16 tokens and no chat template" in said
    assert said.endswith("0 warn, 0 FAIL")


def test_warnings_and_failures_have_exit_codes_and_remedies(recipe, tmp_path, capsys):
    edit_json(tmp_path / "student" / "generation_config.json", lambda c: c.update(top_k=5))
    assert main(["doctor", recipe]) == 0
    said = table(capsys)
    assert "1 warn, 0 FAIL" in said
    assert "-> the exported folder carries the file" in said
    assert main(["doctor", recipe, "--strict"]) == 2
    assert main(["doctor", recipe, "engine.optimizer.lr=0.0"]) == 2
    assert "-> no weight will change: set engine.optimizer.lr" in table(capsys)


def test_json_has_every_row(recipe, capsys):
    assert main(["doctor", recipe, "--json", "--nproc", "2", "engine.optimizer.lr=0.0"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["recipe"] == recipe
    assert report["FAIL"] == 1
    (failed,) = [row for row in report["rows"] if row["level"] == "FAIL"]
    assert failed == {
        "check": "learning rate",
        "found": "engine.optimizer: adamw, 4 steps, lr 0 first, 0 at most, 0 last",
        "level": "FAIL",
        "remedy": "no weight will change: set engine.optimizer.lr",
    }
    assert any("free for each of 2" in row["found"] for row in report["rows"])


@pytest.mark.parametrize("bad", [["engine.optimizr.lr=1"], ["max_steps=0", "seed=-1"], ["model.path"], ["recipe=opsdd"]])
def test_a_bad_config_is_refused_as_train_refuses_it(bad, recipe, capsys):
    assert main(["train", recipe, *bad]) == 2
    refused = capsys.readouterr()
    assert main(["doctor", recipe, *bad]) == 2
    assert capsys.readouterr() == refused
    assert refused.err


def test_bad_options_are_refused(recipe, capsys):
    assert main(["doctor", recipe, "--nproc", "0"]) == 2
    assert "--nproc 0; allowed: 1 or more" in capsys.readouterr().err
    assert main(["doctor", "nothing.yaml"]) == 2
    assert "no recipe nothing.yaml" in capsys.readouterr().err


def test_no_weights_are_read_and_nothing_is_written(recipe, tmp_path, capsys, monkeypatch):
    def read(self, name, rows=None):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(FolderSource, "get", read)
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    assert main(["doctor", recipe, "--strict"]) == 0
    assert sorted(str(p) for p in tmp_path.rglob("*")) == before


def test_shipped_recipes_are_examined_through_what_their_parts_start_from(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "recipes/opsd/demo.yaml", "--rows", "50", "--strict"]) == 0
    assert "from which" in table(capsys)


RUN = """
import os, sys
from recipes.cli import main
code = main(["train", sys.argv[1]])
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print("peak", int(status["VmHWM"].split()[0]) * 1024)
sys.exit(code)
"""


def test_the_plans_peak_is_a_runs_own_within_a_quarter(tmp_path):
    """Of 20 million parameters, so that they outweigh the process."""
    healthy(tmp_path)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 20000,
             "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 512}  # fmt: skip
    save_tiny(tmp_path / "student", "qwen3", **sizes)
    rows = [{"prompt": "12+34=" + "1" * 100, "response": "3" * 60} for _ in range(6)]
    changes = {
        "data.train": write_rows(tmp_path / "long.jsonl", rows),
        "data.eval": None,
        "data.chat": "never",
        "engine.vocab_limit": 20000,
        "engine.loss_chunk_tokens": 256,
        "train": {"batch_size": 6, "micro_batch_tokens": 1600},
        "max_steps": 2,
        "checkpoint.every": None,
    }
    given = tree("sft", tmp_path, **changes)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given))
    with Case.opened(configure(given)) as case:
        planned = max(phase.total for phase in Plan(case).phases())
    command = [sys.executable, "-c", RUN, str(tmp_path / "run.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    peak = int(done.stdout.rpartition("peak ")[2])
    assert peak / 1.25 < planned < peak * 1.25, (planned, peak)
