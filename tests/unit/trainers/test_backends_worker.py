"""The process beside the trainer, run by an interpreter that has no vLLM: its start, its end, time-outs, and what it accepts as
weights. With vLLM itself: tests/vllm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainer_cases import tiny_folder

from hybrid.engine import HybridEngine
from trainers.backends import vllm_worker
from trainers.backends.config import VLLMConfig
from trainers.backends.requests import BackendError
from trainers.backends.vllm import VLLMGenerator, Worker, WorkerError

CONFIG = VLLMConfig(python=sys.executable)


@pytest.fixture
def worker():
    worker = Worker(CONFIG)
    yield worker
    worker.close()


def ask(worker: Worker, verb: str, fields: dict[str, object], timeout_s: float = 60.0) -> object:
    worker.send(verb, fields, timeout_s)
    while (answer := worker.receive(1.0)) is None:
        pass
    return answer


def is_gone(pid: int) -> bool:
    """Also a zombie, which its new parent has not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_an_interpreter_without_vllm_is_named_with_the_end_of_the_log(worker):
    with pytest.raises(WorkerError, match=r"could not start: ModuleNotFoundError: No module named 'vllm'; the end of its log: "):
        ask(worker, "start", {"model": "m"})
    with pytest.raises(WorkerError, match="could not load: AttributeError"):  # it lives on
        ask(worker, "load", {"version": 1, "files": [], "sent": {}})


def test_a_killed_worker_is_reported_each_time(worker):
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerError, match=r"asked to generate: it has ended \(SIGKILL\); its log is empty"):
            ask(worker, "generate", {})


@pytest.mark.parametrize("size", [1, 2**20], ids=["in the pipe", "more than a pipe holds"])
def test_a_worker_that_does_not_answer_in_time_is_ended(worker, size):
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"asked to generate: (no answer|it did not take that) within 0.3 s"):
        ask(worker, "generate", {"prompts": "x" * size}, 0.3)
    assert is_gone(worker.pid)


def test_an_answer_to_an_interrupted_request_is_not_taken_for_the_next(worker):
    worker.send("load", {}, 60.0)  # answered with an error, which nobody receives
    with pytest.raises(WorkerError, match="could not start: ModuleNotFoundError"):
        ask(worker, "start", {})


def test_it_is_private_and_leaves_nothing(worker):
    assert worker.folder.stat().st_mode & 0o777 == 0o700
    worker.close()
    assert is_gone(worker.pid)
    assert not worker.folder.exists()
    with pytest.raises(WorkerError, match="is closed"):
        worker.send("start", {}, 1.0)


def test_it_ends_with_its_parent_also_where_somebody_else_holds_the_pipe():
    """A parent killed by SIGKILL closes nothing itself, and here `sleep` keeps its end of the pipe open."""
    code = (
        "import os, signal, sys, time, subprocess\n"
        "from trainers.backends.config import VLLMConfig\n"
        "from trainers.backends.vllm import Worker\n"
        "worker = Worker(VLLMConfig(python=sys.executable))\n"
        "quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "held = subprocess.Popen(['sleep', '60'], pass_fds=[worker._stdin], **quiet)\n"
        "print(worker.pid, held.pid, worker.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, sleeper, folder = done.stdout.split()
    try:
        wait_until(lambda: is_gone(int(pid)))
        assert not Path(folder).exists()
    finally:
        os.kill(int(sleeper), signal.SIGKILL)


@pytest.mark.parametrize("python", ["/no/such/python", __file__])
def test_an_interpreter_that_cannot_be_run_is_refused(python):
    with pytest.raises(ValueError, match=r"rollout.vllm.python=.*: no program; allowed: the path of a Python interpreter"):
        Worker(VLLMConfig(python=python))


def test_a_program_that_starts_the_interpreter_is_told_apart_from_it(tmp_path):
    """Its end would not be the worker's."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\n{sys.executable} "$@"\nexit $?\n')
    script.chmod(0o700)
    worker = Worker(VLLMConfig(python=str(script)))
    with pytest.raises(WorkerError, match=r"exit code 1.*started by process \d+, not by \d+: give the interpreter itself"):
        ask(worker, "start", {})
    worker.close()


def _open(folder: str) -> str:
    engine = HybridEngine.from_pretrained(folder)
    try:
        VLLMGenerator(engine, CONFIG)
    except BackendError as error:
        return str(error)
    finally:
        engine.close()
    return "it started"


def test_a_failed_start_is_raised_on_every_rank(pool2, tmp_path):
    first, second = pool2.run(_open, tiny_folder(tmp_path))
    assert first == second
    assert first.startswith("rank 0: the vLLM worker could not start: ModuleNotFoundError: No module named 'vllm'")


# -- what it accepts as weights; the model that takes them is vLLM's, so a list stands for it


class _Worker(vllm_worker.RolloutWorker):
    def __init__(self) -> None:
        self.model_runner, self.loaded = self, None

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Module()

    def reload_weights(self, weights_iterator) -> None:
        self.loaded = dict(weights_iterator)


TENSORS = {
    "a": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "b": torch.tensor(1.5),
    "c": torch.zeros(0, 4),
    "d": torch.ones(3),
}
SENT = {name: vllm_worker.describe(tensor) for name, tensor in TENSORS.items()}


def load(path: Path, sent: dict[str, list]) -> dict[str, torch.Tensor] | None:
    """In two files."""
    save_file({n: TENSORS[n] for n in "ab"}, path / "1.safetensors")
    save_file({n: TENSORS[n] for n in "cd"}, path / "2.safetensors")
    worker = _Worker()
    try:
        worker.load_version([str(path / "1.safetensors"), str(path / "2.safetensors")], sent)
    finally:
        assert worker.loaded is None or sent == SENT
    return worker.loaded


def test_what_was_sent_is_loaded(tmp_path):
    loaded = load(tmp_path, SENT)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[n], TENSORS[n]) for n in TENSORS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"d": vllm_worker.describe(torch.tensor([1.0, 1.0, 1.0 + 2**-20]))}, "d is not what was sent"),
        ({"a": vllm_worker.describe(TENSORS["a"].view(3, 2))}, "a is not what was sent"),
        ({"a": vllm_worker.describe(TENSORS["a"].view(torch.float16))}, "a is not what was sent"),
        ({"e": SENT["d"]}, "weights differ in e"),
        ({"d": None}, "weights differ in d"),
    ],
    ids=["a bit", "the shape", "the dtype", "one missing", "one too many"],
)
def test_anything_else_is_not(tmp_path, changed, message):
    sent = {name: description for name, description in (SENT | changed).items() if description is not None}
    with pytest.raises(ValueError, match=message):
        load(tmp_path, sent)
