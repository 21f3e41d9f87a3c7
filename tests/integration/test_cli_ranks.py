"""`--nproc 2` and torchrun: signals, a killed rank, a killed launcher. Each starts processes of its own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

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
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines]


def wait_for_step(folder: Path, process: subprocess.Popen, step: int) -> None:
    while not (done := steps(folder)) or done[-1] < step:
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.2)


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


def test_ctrl_c_under_torchrun_saves_one_agreed_step(start, tmp_path):
    job = start("torch.distributed.run", "--nproc_per_node=2", "-m", "recipes.cli")
    wait_for_step(tmp_path, job, 2)
    os.killpg(job.pid, signal.SIGINT)
    assert job.wait(120) != 0
    (saved,) = checkpoints(tmp_path)
    assert saved == f"step_{steps(tmp_path)[-1]}"


def test_ranks_leave_when_their_launcher_is_killed(start, tmp_path):
    job = start("recipes.cli", arguments=("--nproc", "2"))
    wait_for_step(tmp_path, job, 1)
    pids = ranks(job)
    assert sorted(pids) == [0, 1]
    job.kill()
    job.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in pids.values()):  # pytest's timeout is the limit
        time.sleep(0.2)
