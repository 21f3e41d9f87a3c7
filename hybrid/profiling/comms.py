"""How often, how much and how fast the ranks talk: the collectives of a stretch of the program, by operation and message size.

A dispatch mode sees them. Every collective of torch.distributed, FSDP2's and DTensor's included, is an operator that passes by
the modes of its thread, backward's too. So nothing of torch is replaced, a logger belongs to its owner, and a stopped one costs
nothing. While it records, each torch operation costs a few microseconds more. (The profiler sees collectives too, but one
profiler runs in a process, and it keeps every event; wrapped functions would be everybody's, and miss what was imported before.)

Latency is from the call to the completion, queueing included. A collective is not waited for to time it: gloo's future tells,
on CUDA an event on a stream of its own does. Where torch gives no such sign, gloo's reduce-scatter and the functional collectives
are waited for; sends and receives, which could then wait for each other, are counted without a latency.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybrid.mesh import Mesh, gather_texts, get_rank
from hybrid.profiling.collectives import BUS_FACTORS, Collective, collectives, group_of, work_of
from hybrid.profiling.latencies import Traffic, TrafficTable
from hybrid.profiling.modes import on_top
from hybrid.training.config.monitoring import CommsLoggerConfig

log = logging.getLogger(__name__)

MAX_PENDING = 1024  # collectives on CUDA whose end is not known yet; above, the oldest is waited for
TORCH = str(Path(torch.__file__).parent)
Report = Callable[[float | None], None]  # takes a latency in seconds


class CommsLogger:
    """Records collectives between `start` and `stop`, also as `with CommsLogger(...):`, of the thread that started it.

    Two loggers may record at once; each sees everything that its thread sends, so an engine wraps its own verbs. What was sent
    before `stop` and ends after it still counts.
    """

    def __init__(
        self, config: CommsLoggerConfig, mesh_or_group: Mesh | dist.ProcessGroup | None = None, *, max_keys: int = 256
    ) -> None:
        """mesh_or_group: the ranks that `log_summary` compares; a mesh or None: all. max_keys: pairs of operation and size that
        are told apart; the rest is summed by operation. Raises ValueError for max_keys below 1."""
        if max_keys < 1:
            raise ValueError(f"max_keys={max_keys}; allowed: 1 or more")
        self.config = config
        self._group = None if isinstance(mesh_or_group, Mesh) else mesh_or_group
        self._table = TrafficTable(max_keys)
        self._watcher: _Watcher | None = None
        self._timer = _CudaTimer()
        self._silent = False

    def start(self) -> None:
        """Nothing happens if it records already, or is not enabled."""
        if self.config.enabled and self._watcher is None:
            self._watcher = _Watcher(self._watch)
            self._watcher.__enter__()

    def stop(self) -> None:
        """Nothing happens if it does not record. Raises ValueError on another thread than start's."""
        if self._watcher is not None:
            with on_top(self._watcher):
                self._watcher.__exit__(None, None, None)
            self._watcher = None

    def __enter__(self) -> CommsLogger:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def summary(self) -> dict[str, dict[int | str, dict[str, Any]]]:
        """{operation: {bytes of the message, or "other": numbers}} of this rank; what is recorded stays as it is.

        Numbers: count, bytes (of a message, in "other" their mean), total_bytes, timed (how many have a latency), total_s,
        mean_s, min_s, max_s, algbw and busbw (bytes a second), histogram (latencies below 2^i microseconds, by i).
        """
        found: dict[str, dict[int | str, dict[str, Any]]] = {}
        for (name, size), traffic in self._traffic().items():
            found.setdefault(name, {})["other" if size is None else size] = traffic.row()
        return found

    def log_summary(self, show_straggler: bool = False) -> str:
        """The summary as a table, also in rank 0's log. show_straggler, collective: a column of the seconds that this rank took
        longer than the fastest, in sum."""
        traffic = self._traffic()
        behind = self._behind(traffic) if show_straggler else None
        header = ("operation", "bytes", "count", "total ms", "mean us", "min us", "max us", "algbw GB/s", "busbw GB/s")
        rows: list[tuple[str, ...]] = [header if behind is None else (*header, "straggler ms")]
        for key, entry in traffic.items():
            row, (name, size) = entry.row(), key
            cells = [name, "other" if size is None else str(size), str(entry.count), _scaled(row["total_s"], 1e3)]
            cells += [_scaled(row[column], 1e6) for column in ("mean_s", "min_s", "max_s")]
            cells += [_scaled(row[column], 1e-9) for column in ("algbw", "busbw")]
            rows.append(tuple(cells if behind is None else [*cells, _scaled(behind[key], 1e3)]))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        text = "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        if get_rank(self._group) == 0:
            log.info("collectives\n%s", text)
        return text

    def _traffic(self) -> dict[tuple[str, int | None], Traffic]:
        self._timer.collect()
        return self._table.copy()

    def _behind(self, traffic: Mapping[tuple[str, int | None], Traffic]) -> dict[tuple[str, int | None], float]:
        own = {json.dumps(key): entry.seconds for key, entry in traffic.items()}
        self._silent = True
        try:
            texts = gather_texts(json.dumps(own), self._group)
        finally:
            self._silent = False
        everyone = [json.loads(text) for text in texts]
        fastest = {key: min(seconds[key] for seconds in everyone if key in seconds) for key in own}
        return {key: entry.seconds - fastest[json.dumps(key)] for key, entry in traffic.items()}

    def _watch(self, operator: Any, collective: Collective, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a collective, and records it unless this is ours or filtered out."""
        if self._silent or not self.config.records(collective.name):
            return operator(*args, **kwargs)
        ranks = group_of(operator, args).size()
        report = self._reporter(collective, collective.num_bytes(args, ranks), ranks)
        if any(isinstance(t, Tensor) and t.is_cuda for t in tree_leaves(args)):
            return self._timer.run(operator, collective, args, kwargs, report)
        start = time.perf_counter()
        result = operator(*args, **kwargs)
        if collective.functional:
            _wait(result)
            report(time.perf_counter() - start)
            return result
        work = work_of(result)
        future = None if work is None else _future(work)
        if future is not None:
            future.add_done_callback(lambda _: report(time.perf_counter() - start))
        elif work is None or collective.name in ("send", "recv"):
            report(None)
        else:
            work.wait()
            report(time.perf_counter() - start)
        return result

    def _reporter(self, collective: Collective, num_bytes: int, ranks: int) -> Report:
        name, factor = collective.name, BUS_FACTORS[collective.name](ranks)
        caller = _caller() if self.config.verbose and self.config.debug else ""

        def report(seconds: float | None) -> None:
            self._table.add(name, num_bytes, factor, seconds)
            if self.config.verbose:
                took = "not timed" if seconds is None else f"{seconds * 1e6:.0f} us"
                log.info("%s of %d bytes over %d ranks: %s%s", name, num_bytes, ranks, took, caller)

        return report


class _Watcher(TorchDispatchMode):
    """Hands collectives to `watch`; all else runs as it is."""

    supports_higher_order_operators = True

    def __init__(self, watch: Callable[[Any, Collective, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._watch = watch
        self._collectives = collectives()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: the collectives that it makes come by here then
        collective = self._collectives.get(getattr(func, "_overloadpacket", None))
        if collective is None:
            return func(*args, **(kwargs or {}))
        return self._watch(func, collective, args, kwargs or {})


class _CudaTimer:
    """Events around a collective, read when they have passed. Not yet run on a GPU."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, Report]] = deque()

    def run(self, operator: Any, collective: Collective, args: Sequence[Any], kwargs: Mapping[str, Any], report: Report) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = operator(*args, **kwargs)
        work = None if collective.functional else work_of(result)
        if collective.functional:
            _wait(result)  # the current stream waits, not the host
            end.record()
        elif work is None:
            end.record()
        else:
            # Not work.wait(): it lets go of the tensors that the backend keeps alive for the caller's own wait
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                work.get_future().wait()
                end.record()
        self._pending.append((start, end, report))
        if len(self._pending) > MAX_PENDING:
            self._pending[0][1].synchronize()
        self.collect()
        return result

    def collect(self) -> None:
        while self._pending and self._pending[0][1].query():
            start, end, report = self._pending.popleft()
            report(start.elapsed_time(end) / 1e3)


def _future(work: dist.Work) -> Any:
    try:
        return work.get_future()
    except RuntimeError:  # "not implemented": gloo's reduce-scatter, send and receive
        return None


def _wait(result: Any) -> None:
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor):
            torch.ops._c10d_functional.wait_tensor(tensor)


def _caller() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(TORCH)):
        frame = frame.f_back
    return "" if frame is None else f", from {frame.f_code.co_filename}:{frame.f_lineno}"


def _scaled(number: float | None, scale: float) -> str:
    return "-" if number is None else f"{number * scale:.3f}"
