"""What a peer's process shares with ours: a job in, a result out, both JSON files. Standard library only, since it runs under the
peer's own interpreter.

    python -m recipes.bench.peer_NAME JOB.json RESULT.json
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def read_job() -> dict[str, Any]:
    return json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


def write_result(packages: Sequence[str], **result: Any) -> None:
    """With the peak memory and the versions; called while the peer's own children still live."""
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
    result = {"peak_memory_bytes": tree_peak_bytes(), "versions": versions, **result}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


def timed(work: Callable[[], int], repeats: int) -> dict[str, Any]:
    """The `seconds` of each of `repeats` calls, after one that does not count, and the `tokens` of which a call says that it
    made them."""
    tokens, seconds = work(), []
    for _ in range(repeats):
        start = time.perf_counter()
        tokens = work()
        seconds.append(time.perf_counter() - start)
    return {"tokens": tokens, "seconds": seconds}


def tree_peak_bytes() -> int:
    """The sum of the peaks of resident memory of this process and all below it: no less than the peak of the sum."""
    parents, peaks = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines() if ":" in line)
        except OSError:  # it has ended
            continue
        parents[int(folder.name)] = int(fields["PPid"])
        peaks[int(folder.name)] = int(fields.get("VmHWM", "0 kB").split()[0]) * 1024
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine:
        mine |= more
    return sum(peaks[pid] for pid in mine)
