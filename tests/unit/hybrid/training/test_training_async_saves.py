"""Saves that go on behind training: what is written is what was there, `latest` waits for the whole folder, errors are raised."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training_cases import config, micro_batches, open_engine, train, weights_of

from hybrid import folders
from hybrid.folders import FolderError

SETTINGS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "checkpoint": {"async_save": True}}
CPU = {"device": "cpu"}
LAYOUTS = [{"stage": 0}, {"stage": 3}, {"stage": 3, "offload_optimizer": CPU}]


@contextmanager
def held_back(what: Any = None) -> Iterator[threading.Event]:
    """Writing stops before a folder is renamed, until the event is set; then `what` is called."""
    gate, plain = threading.Event(), folders.sync_tree

    def wait(folder: Path) -> None:
        assert gate.wait(60)
        if what is not None:
            what()
        plain(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "sync_tree", wait)
        yield gate


def trains_while_it_is_written(path: str, zero: dict[str, Any]) -> dict[str, Any]:
    engine = open_engine(config(zero_optimization=zero, **SETTINGS))
    train(engine, micro_batches(2, 1))
    saved = weights_of(engine)
    with held_back() as gate:
        engine.save_checkpoint(path, client_state={"at": 2})
        train(engine, micro_batches(2, 1, seed=3))  # its collectives and those of the writing do not mix
        changed = weights_of(engine)
        before = sorted(p.name for p in Path(path).iterdir() if not p.name.startswith("."))
        dist.barrier()  # all have looked
        gate.set()
        engine.wait_for_checkpoint()
    after = sorted(p.name for p in Path(path).iterdir())
    client = engine.load_checkpoint(path)[1]
    loaded = weights_of(engine)
    engine.destroy()
    return {
        "before": before,
        "after": after,
        "client": client,
        "same": all(torch.equal(saved[n], loaded[n]) for n in saved),
        "changed": not any(torch.equal(saved[n], changed[n]) for n in saved),
        "steps": engine.global_steps,
    }


@pytest.mark.parametrize("zero", LAYOUTS, ids=str)
def test_what_is_written_is_what_was_there_when_it_was_saved(pool2, tmp_path, zero):
    for result in pool2.run(trains_while_it_is_written, str(tmp_path), zero):
        assert result == {
            "before": [],
            "after": ["global_step2", "latest"],
            "client": {"at": 2},
            "same": True,
            "changed": True,
            "steps": 2,
        }


def next_verb_waits(path: str, verb: str) -> list[str]:
    engine = open_engine(config(**SETTINGS))
    with held_back() as gate:
        engine.save_checkpoint(path, "first")
        threading.Timer(0.3, gate.set).start()
        if verb == "save":
            engine.save_checkpoint(path, "second")
        else:
            engine.load_checkpoint(path, "first")
        found = sorted(p.name for p in Path(path).iterdir() if not p.name.startswith("."))
        dist.barrier()
        engine.wait_for_checkpoint()
    engine.destroy()
    return [*found, (Path(path) / "latest").read_text()]


def test_a_second_save_and_a_load_wait_for_the_first(pool2, tmp_path):
    first, last = pool2.run(next_verb_waits, str(tmp_path / "a"), "load")[0], "first"
    assert first == ["first", "latest", last]
    for found in pool2.run(next_verb_waits, str(tmp_path / "b"), "save"):
        assert {"first", "latest"} <= {*found}
        assert found[-1] == "second"


def fails_behind(path: str, verb: str) -> tuple[str, str, bool]:
    engine = open_engine(config(**SETTINGS))
    engine.save_checkpoint(path, "good")
    engine.wait_for_checkpoint()

    def full() -> None:
        raise OSError(28, "No space left on device")

    with held_back(full) as gate:
        engine.save_checkpoint(path, "bad")
        gate.set()
        with pytest.raises(FolderError) as caught:
            {
                "wait": engine.wait_for_checkpoint,
                "load": lambda: engine.load_checkpoint(path),
                "save": lambda: engine.save_checkpoint(path, "third"),
            }[verb]()
    engine.wait_for_checkpoint()  # it is raised once
    folder, _ = engine.load_checkpoint(path)
    engine.destroy()
    return str(caught.value), str(folder), (Path(path) / "bad").exists()


@pytest.mark.parametrize("verb", ["wait", "load", "save"])
def test_what_goes_wrong_behind_is_raised_by_the_next_verb_on_every_rank(pool2, tmp_path, verb):
    for message, folder, left in pool2.run(fails_behind, str(tmp_path), verb):
        assert message == f"could not write {tmp_path / 'bad'}: rank 0: [Errno 28] No space left on device"
        assert folder == str(tmp_path / "good")
        assert not left


ENDS = """
import sys
sys.path[:0] = sys.argv[2:]
from training_cases import config, micro_batches, open_engine, train
engine = open_engine(config(ranks=1, checkpoint={"async_save": True}))
train(engine, micro_batches(1, 1))
engine.save_checkpoint(sys.argv[1])
"""


def test_the_end_of_the_process_waits_for_the_folder(tmp_path):
    done = subprocess.run([sys.executable, "-c", ENDS, str(tmp_path), *sys.path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    engine = open_engine(config(ranks=1))
    assert engine.load_checkpoint(tmp_path) == (str(tmp_path / "global_step1"), {})
