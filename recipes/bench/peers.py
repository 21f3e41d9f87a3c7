"""Runs other engines on the same work, each in a process of its own, and what is made of their results."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.bench.measure import spread

ROOT = Path(__file__).parents[2]


def run_apart(
    module: str, job: Mapping[str, Any], *, python: str | None = None, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`python -m module JOB RESULT` in a folder of its own; returns the result, with `startup_s` from before the process was
    started to its `first_token_at`. Raises ValueError with the last line it said where it fails."""
    python = os.path.abspath(python or sys.executable)  # and not resolved: a link is what makes a virtual environment
    if os.path.isdir(job["model"]):
        job = {**job, "model": os.path.abspath(job["model"])}
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}  # `hybrid` sets it for itself
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        asked, answered, said = (Path(folder) / name for name in ("job.json", "result.json", "output"))
        asked.write_text(json.dumps(job), encoding="utf-8")
        with said.open("w") as output:
            start = time.time()
            try:
                done = subprocess.run(
                    [python, "-m", module, str(asked), str(answered)],
                    env=inherited | own | dict(environment or {}),
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    check=False,
                )
            except OSError as error:
                raise ValueError(f"--peer-python {python}: {error.strerror}; allowed: a Python interpreter") from None
        if done.returncode != 0 or not answered.is_file():
            last = (said.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise ValueError(f"{module} under {python} failed (exit {done.returncode}): {last}")
        result = json.loads(answered.read_text(encoding="utf-8"))
    return {**result, "startup_s": result["first_token_at"] - start}


def startup(model: str, dtype: str, prompt: tuple[int, ...], threads: int | None, repeats: int) -> dict[str, Any] | None:
    """Seconds from the start of a fresh process to its first token; the first of `repeats` fills the caches of files and
    kernels where they are cold, so there is one more. None for no repeats."""
    if repeats == 0:
        return None
    job = {"model": model, "dtype": dtype, "prompts": [prompt]}
    own = {"OMP_WAIT_POLICY": "passive", **_thread_limit(threads)}
    runs = [run_apart("recipes.bench.first_token", job, environment=own)["startup_s"] for _ in range(1 + repeats)]
    return spread(runs[1:])


def check_peer_options(args: argparse.Namespace) -> None:
    """Raises ValueError for options of a peer where none is named, and for an interpreter that is not there."""
    if args.peer is None and (args.peer_python is not None or args.peer_dtype is not None or args.peer_env):
        raise ValueError("--peer-python, --peer-dtype and --peer-env are a peer's; give --peer too, or leave them out")
    if args.peer_python is not None and not os.access(args.peer_python, os.X_OK):
        raise ValueError(f"--peer-python {args.peer_python}: not a program; allowed: the path of a Python interpreter")


def run_peer(args: argparse.Namespace, job: Mapping[str, Any]) -> dict[str, Any]:
    """The peer that the options name, as a part of a report. Raises ValueError where it fails."""
    module = f"recipes.bench.peer_{args.peer}"
    job = {**job, "dtype": args.peer_dtype or job["dtype"]}
    result = run_apart(module, job, python=args.peer_python, environment=_thread_limit(args.threads) | dict(args.peer_env))
    return {
        "name": args.peer,
        "dtype": job["dtype"],
        "tokens": result["tokens"],
        "tokens_per_s": spread([result["tokens"] / s for s in result["seconds"]]),
        "seconds": spread(result["seconds"]),
        "startup_s": result["startup_s"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "versions": result["versions"],
        "environment": dict(args.peer_env),
        **{name: result[name] for name in ("mean_logprob",) if name in result},
    }


def _thread_limit(threads: int | None) -> dict[str, str]:
    """Nothing where no number was asked for: a peer then chooses its own, as it is at its best."""
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
