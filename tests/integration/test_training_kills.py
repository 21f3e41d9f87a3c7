"""kill -9 of one rank of two while a checkpoint is written: what `latest` names is whole, and training goes on from it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_cases import config, micro_batches, open_engine, plain_sgd, weights_of, worst

from hybrid.folders import PARTIAL

RUN = """
import sys
sys.path[:0] = sys.argv[3:]
from training_cases import config, micro_batches, open_engine, train
engine = open_engine(config(checkpoint={"async_save": sys.argv[2] == "behind"}, timeout_s=60.0))
for step in micro_batches(300, 1):
    train(engine, [step])
    engine.save_checkpoint(sys.argv[1])
    if engine.global_steps == 2 and engine.global_rank == 0:
        print("two", flush=True)
"""


@pytest.mark.parametrize(
    ("how", "rank", "when"),
    [
        ("at once", 1, f".global_step*{PARTIAL}/shards/shard-00002*"),
        ("behind", 0, f".global_step*{PARTIAL}/shards/shard-00001*"),
        ("behind", 0, f".latest{PARTIAL}"),
    ],
)
def test_latest_loads_after_kill_9_of_a_rank(tmp_path, how, rank, when):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path), how, *sys.path],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "RANK": str(r), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for r in (0, 1)
    ]
    try:
        assert ranks[0].stdout is not None
        assert ranks[0].stdout.readline() == "two\n"
        end = time.monotonic() + 30
        while not list(tmp_path.glob(when)) and time.monotonic() < end:
            pass
        ranks[rank].kill()
        assert ranks[1 - rank].wait(90) != 0  # it hears of it and does not hang
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    engine = open_engine(config(ranks=1))
    folder, _ = engine.load_checkpoint(tmp_path)
    assert folder == str(tmp_path / Path(tmp_path / "latest").read_text())
    assert 1 <= engine.global_steps < 300
    assert folder.endswith(f"global_step{engine.global_steps}")
    assert worst(weights_of(engine), plain_sgd(micro_batches(300, 1)[: engine.global_steps])) < 1e-5
    engine.save_checkpoint(tmp_path)  # over what the kill left
    assert not (tmp_path / f".global_step{engine.global_steps}{PARTIAL}").exists()
