"""Ranks and signals: `--nproc N` starts N ranks of this command on this machine through torch's elastic agent.

The same worker code runs under `torchrun -m recipes.cli train ...` and `accelerate launch -m recipes.cli train ...`; what they
set in the environment is all it reads. No torch is imported unless ranks are started.

Signals: the first SIGTERM or SIGINT asks for a checkpoint at the end of the step, agreed by all ranks, and exit code
128 + signal. A second one ends the process at once.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from types import FrameType
from typing import Any

SAVE_SECONDS = 600  # how long ranks may take to finish their step and save after a signal, before they are killed
MOST_RANKS = max(8, os.cpu_count() or 1)  # on one machine; each takes memory for itself
LOST_RANK_SECONDS = 10  # how long the others may take to leave after one rank was lost
LAUNCHER = "HYBRID_LAUNCHER"  # in the environment of ranks: the process id of `hybrid ... --nproc N`
SAME_SIGNAL_SECONDS = 1.0  # a launcher may forward what the terminal already delivered


class StopSignal:
    """Callable: has a signal asked this run to stop? Inside of its `with`, a signal sets a flag that the training loop polls."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._first = 0.0

    def __enter__(self) -> StopSignal:
        self._before = {signum: signal.signal(signum, self._note) for signum in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def __call__(self) -> bool:
        return self.signum is not None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self._first = signum, time.monotonic()
        elif time.monotonic() - self._first > SAME_SIGNAL_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    @property
    def exit_code(self) -> int:
        """128 + signal; a rank that stopped because another one was told to counts as SIGTERM."""
        return 128 + (self.signum or signal.SIGTERM)


def is_rank() -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main_rank() -> bool:
    """The one rank that prints."""
    return os.environ.get("RANK", "0") == "0"


def leave_with_launcher() -> None:
    """A rank whose launcher was killed would train on, unseen, into a folder that the next run uses: end it."""
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))  # it may be gone by now, and the parent be another

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(0.5)
        print(f"hybrid: rank {os.environ['RANK']}: the launcher is gone; leaving", file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=watch, name="leave-with-launcher", daemon=True).start()


def run_ranks(argv: Sequence[str], nproc: int) -> int:
    """`hybrid ARGV` on `nproc` local ranks; returns the exit code of the job.

    0: all ranks succeeded. 128 + signal: stopped by that signal after saving. A rank's own exit code where it refused bad
    input (2). 1: a rank was lost; one line names it.
    """
    # Set before anything can load OpenMP in the ranks: N ranks with all cores each are slower than one rank.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    os.environ[LAUNCHER] = str(os.getpid())
    import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
    from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    class Agent(LocalElasticAgent):
        """As torchrun's, but when a rank is lost the others, which may be far from their next collective, get
        LOST_RANK_SECONDS instead of torch's 30 to leave."""

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            pids = super()._start_workers(worker_group)
            context = self._pcontext
            assert context is not None
            close = context.close
            context.close = lambda death_sig=None, timeout=LOST_RANK_SECONDS: close(death_sig, timeout)  # type: ignore[method-assign]
            return pids

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # what matters is said below, in a line
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
    )
    with tempfile.TemporaryDirectory(prefix="hybrid-ranks-") as logs:
        spec = WorkerSpec(
            role="rank",
            local_world_size=nproc,
            entrypoint=sys.executable,
            args=("-m", "recipes.cli", *argv),
            rdzv_handler=rendezvous_registry.get_rendezvous_handler(parameters),
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1",
        )
        agent = Agent(spec, DefaultLogsSpecs(log_dir=logs), shutdown_timeout=SAVE_SECONDS)
        try:
            failures = agent.run().failures
        except SignalException as stopped:  # the agent has passed it on and waited for the ranks
            return 128 + stopped.sigval
        finally:
            spec.rdzv_handler.shutdown()
    return _explain({rank: failure.exitcode for rank, failure in failures.items()})


def _explain(exit_codes: dict[int, int]) -> int:
    """The job's exit code from those of the ranks that failed, with one line where a rank was lost."""

    def cause(item: tuple[int, int]) -> tuple[int, int]:
        """The root cause first: a rank killed from outside, bad input, a crash or abort (which a lost peer may have caused), a
        stop after saving, and last a rank that the agent ended."""
        rank, code = item
        if code < 0:
            return {-signal.SIGTERM: 4, -signal.SIGABRT: 2}.get(code, 0), rank
        return (1 if code == 2 else 2 if code < 128 else 3), rank

    if not exit_codes:
        return 0
    rank, code = min(exit_codes.items(), key=cause)
    if code < 0:
        print(f"hybrid: error: rank {rank} was killed by {signal.Signals(-code).name}; the job ended", file=sys.stderr)
        return 1
    if code != 2 and code < 128:  # the rank itself has explained bad input, and a stop by a signal after saving
        print(f"hybrid: error: rank {rank} failed with exit code {code}; the job ended", file=sys.stderr)
        return 1
    return code
