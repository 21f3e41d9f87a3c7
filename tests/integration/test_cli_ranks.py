"""Kills and signals, with real processes: a killed run, a killed rank, a killed launcher; `--nproc 2` and torchrun."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from tiny import save_tiny

RECIPE = {
    "recipe": "sft",
    "max_steps": 100000,
    "model": {
        "new": {
            "architecture": "qwen3",
            "characters": "0123456789+=",
            "settings": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
                "intermediate_size": 16, "max_position_embeddings": 64,
            },
        }
    },
    "data": {"train": "made:addition/train", "max_train": 64},
    "train": {"batch_size": 4},
    "log": {"completions": 0},
    "checkpoint": {"every": None},
}  # fmt: skip


@pytest.fixture
def start(tmp_path):
    """Starts a command on the recipe in a process group of its own; everything it leaves behind is killed."""
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(RECIPE))
    started: list[subprocess.Popen] = []

    def _start(*command: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen:
        with (tmp_path / "log").open("a") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command, "train", "r.yaml", "output_dir=out", *arguments],
                    cwd=tmp_path, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )  # fmt: skip
        return started[-1]

    yield _start
    for process in started:
        for pid in [*children(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()


def children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def ranks(launcher: subprocess.Popen) -> dict[int, int]:
    """Rank -> pid of a launcher's workers."""
    found = {}
    for pid in children(launcher.pid):
        environment = dict(pair.split("=", 1) for pair in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in pair)
        if "RANK" in environment:
            found[int(environment["RANK"])] = pid
    return found


def steps(folder: Path) -> list[int]:
    metrics = folder / "out" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]  # the last may be on its way


def wait_for_step(folder: Path, process: subprocess.Popen, step: int, poll: float = 0.2) -> None:
    while not (done := steps(folder)) or done[-1] < step:
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(poll)


def checkpoints(folder: Path) -> list[str]:
    path = folder / "out" / "checkpoints"
    return sorted(p.name for p in path.iterdir()) if path.exists() else []


def test_sigterm_saves_one_agreed_step_and_the_same_command_goes_on_until_a_rank_is_killed(start, tmp_path):
    job = start("recipes.cli", arguments=("--nproc", "2"))
    wait_for_step(tmp_path, job, 2)
    job.send_signal(signal.SIGTERM)
    assert job.wait(120) == 128 + signal.SIGTERM
    log = (tmp_path / "log").read_text()
    (saved,) = checkpoints(tmp_path)
    state = json.loads((tmp_path / "out" / "checkpoints" / saved / "state.json").read_text())
    assert state["world_size"] == 2
    assert saved == f"step_{steps(tmp_path)[-1]}"
    assert f"stopped and saved at step {steps(tmp_path)[-1]}" in log
    assert "Traceback" not in log

    before = steps(tmp_path)
    job = start("recipes.cli", arguments=("--nproc", "2"))
    wait_for_step(tmp_path, job, before[-1] + 2)
    assert steps(tmp_path)[: len(before)] == before
    pids = ranks(job)
    os.kill(pids[1], signal.SIGKILL)
    assert job.wait(30) == 1
    assert "hybrid: error: rank 1 was killed by SIGKILL" in (tmp_path / "log").read_text()
    assert not Path(f"/proc/{pids[0]}").exists()


TORCHRUN = ("torch.distributed.run", "--nproc_per_node=2", "-m", "recipes.cli")


@pytest.mark.parametrize(
    ("command", "arguments", "signum"),
    [
        (("recipes.cli",), ("--nproc", "2"), signal.SIGINT),
        pytest.param(TORCHRUN, (), signal.SIGINT, marks=pytest.mark.slow),
        (TORCHRUN, (), signal.SIGTERM),
    ],
    ids=["nproc-ctrl-c", "torchrun-ctrl-c", "torchrun-sigterm"],
)
def test_a_signal_saves_one_agreed_step(start, tmp_path, command, arguments, signum):
    job = start(*command, arguments=arguments)
    wait_for_step(tmp_path, job, 2)
    if signum == signal.SIGINT:
        os.killpg(job.pid, signum)  # as a terminal does
    else:
        job.send_signal(signum)
    code = job.wait(120)
    assert code == 128 + signum if command == ("recipes.cli",) else code != 0
    (saved,) = checkpoints(tmp_path)
    assert saved == f"step_{steps(tmp_path)[-1]}"
    assert f"stopped and saved at step {steps(tmp_path)[-1]}" in (tmp_path / "log").read_text()


DISTIL = (
    "recipe=opsd", "teacher={kind: self, weights: ema}", "data.privileged_column=response", "data.response_column=none",
    'data.privileged_template="{privileged}+{prompt}"',
    "rollout={prompts_per_step: 4, sampling: {max_new_tokens: 4}}", "engine.optimizer.lr=1e-2", "log.completions=2",
    "checkpoint.every=4", "max_steps=60",
)  # fmt: skip


def test_a_run_killed_in_training_and_in_a_checkpoint_write_ends_as_one_that_never_was(start, tmp_path):
    whole = start("recipes.cli", arguments=(*DISTIL, "output_dir=whole"))
    job = start("recipes.cli", arguments=DISTIL)
    wait_for_step(tmp_path, job, 6, poll=0.01)
    job.kill()
    assert job.wait() == -signal.SIGKILL
    reached = steps(tmp_path)[-1]

    job = start("recipes.cli", arguments=DISTIL)
    kill_in_a_checkpoint_write(tmp_path / "out" / "checkpoints", job)
    assert 6 <= reached < 60
    assert steps(tmp_path)[-1] < 60

    assert start("recipes.cli", arguments=DISTIL).wait(120) == 0
    assert whole.wait(120) == 0
    assert "going on from" in (tmp_path / "log").read_text()
    killed, whole_dir = tmp_path / "out", tmp_path / "whole"
    assert steps(tmp_path) == list(range(1, 61))
    for file in ("model/model.safetensors", "completions.jsonl"):
        assert (killed / file).read_bytes() == (whole_dir / file).read_bytes(), file
    assert values(killed) == values(whole_dir)
    assert not list((killed / "checkpoints").glob(".*"))


def kill_in_a_checkpoint_write(folder: Path, process: subprocess.Popen) -> None:
    """SIGKILL while a checkpoint has its temporary name: the process is halted first, to be sure that it still has."""
    while True:
        assert process.poll() is None, "the run ended before a write of it was seen"
        if any(folder.glob(".*")):
            process.send_signal(signal.SIGSTOP)
            if any(path.name.endswith("partial") for path in folder.glob(".*")):
                process.kill()
                process.wait()
                assert list(folder.glob(".*"))
                return
            process.send_signal(signal.SIGCONT)


def values(folder: Path) -> list[dict]:
    """The metrics that do not belong to a process: no timings, no bytes, no certificate of its first rollout."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in r.items() if not ("second" in k or k.startswith(("swap", "memory", "certificate", "rollout_idle")))}
        for r in records
    ]


def test_a_broken_model_is_one_line_of_two_ranks(start, tmp_path):
    save_tiny(tmp_path / "m", "qwen3")
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    assert start("recipes.cli", arguments=("model={path: m}", "--nproc", "2")).wait(60) == 2
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("hybrid: error: m/model.safetensors")


def test_ranks_leave_when_their_launcher_is_killed(start, tmp_path):
    job = start("recipes.cli", arguments=("--nproc", "2"))
    wait_for_step(tmp_path, job, 1)
    pids = ranks(job)
    assert sorted(pids) == [0, 1]
    job.kill()
    job.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):  # pytest's timeout is the limit
        time.sleep(0.2)
