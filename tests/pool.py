"""A pool of gloo ranks for tests: processes are started once (an import of torch costs seconds) and given one function at a time.

`Pool(2).run(function, *args)` runs an importable function on every rank at once and returns the results by rank. An exception of
any rank comes back as `RankError` with its traceback. A call that takes too long (a hung collective) kills the pool; the next
call starts a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

CALLS = 250
SETTLE_S = 5.0  # after one rank failed, how long the others may take to end too


class RankError(AssertionError):
    """A function failed on some rank; the message holds that rank's traceback."""


class Pool:
    """`size` processes that form one gloo group. Lazy: nothing runs before the first call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[SpawnProcess, Connection]] = []
        self._calls = 0

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """Results by rank. `function` is a module-level function; it, arguments and results cross process borders."""
        self._calls += 1
        if self._calls % CALLS == 0:
            self.close()
        if not self._workers:
            self._start()
        for _, connection in self._workers:
            connection.send((list(sys.path), function.__module__, function.__qualname__, args, kwargs))
        return self._collect(function.__qualname__, timeout_s)

    def close(self) -> None:
        """End every process, by force if it does not listen."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, there), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))

    def _collect(self, name: str, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        end = time.monotonic() + timeout_s
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        while ranks:
            ready = wait(list(ranks), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = ranks.pop(connection)
                try:
                    ok, value = connection.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                elif not errors.setdefault(rank, value) or len(errors) == 1:
                    end = min(end, time.monotonic() + SETTLE_S)
        if ranks or any(value == "the process died" for value in errors.values()):
            self.close()
        if ranks and not errors:
            raise TimeoutError(f"{name}: rank {sorted(ranks.values())} of {self.size} did not end within {timeout_s} s")
        if errors:
            hung = f"\n(rank {sorted(ranks.values())} hung and was killed)" if ranks else ""
            raise RankError("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())) + hung)
        return [results[rank] for rank in range(self.size)]


def _serve(rank: int, size: int, port: int, connection: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=100)
    )
    while True:
        try:
            sys.path[:], module, name, args, kwargs = connection.recv()
        except EOFError:
            return
        try:
            target: Any = __import__(module, fromlist=["_"])
            for part in name.split("."):
                target = getattr(target, part)
            reply = (True, target(*args, **kwargs))
        except BaseException:  # whatever it is, the test must see it
            reply = (False, traceback.format_exc())
        connection.send(reply)
