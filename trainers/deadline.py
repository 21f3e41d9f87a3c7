"""Calls of others' code, in threads, given up when they take too long: none can stop a run. No torch."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

MOST_STUCK = 8  # calls that have not returned; with so many of them no further one is made


class Late(TimeoutError):
    """The call took too long."""


class NotCalled(Late):
    """Too many calls before it have not returned."""


class OutOfTime(NotCalled):
    """Its batch had no time left."""


class Deadline:
    """Makes calls in daemon threads, `workers` at a time (math.inf: all), and gives up those that take longer than `timeout_s`.

    Python cannot end a thread. One that is given up stays until its call returns (the process may exit meanwhile) and another
    takes its place; while there are `most_stuck` of them no further call is made. A call that never lets go of the interpreter
    (a regular expression, one product of huge integers) stops the process, deadline or not.
    """

    def __init__(self, timeout_s: float, *, workers: float = 1, most_stuck: float = MOST_STUCK) -> None:
        self.timeout_s = timeout_s
        self._workers, self._most_stuck = workers, most_stuck
        self._batch_s = self._end = math.inf
        self._idle: list[_Thread] = []
        self._given_up: list[_Thread] = []

    def begin(self, batch_timeout_s: float) -> None:
        """A batch: the calls from here to the next `begin` have `batch_timeout_s` together."""
        self._batch_s, self._end = batch_timeout_s, time.monotonic() + batch_timeout_s

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """As `run`, of one call; `timeout_s` in place of the one of all."""
        (found,) = self.run([partial(function, *args)], timeout_s)
        return found

    def run(self, calls: Sequence[Callable[[], Any]], timeout_s: float | None = None) -> list[Any]:
        """Per call what it returns, or raised; Late where it took too long, NotCalled where none was made."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        found: list[Any] = [None] * len(calls)
        answers: SimpleQueue[tuple[_Thread, Any]] = SimpleQueue()  # of these calls: what comes after their end is nobody's
        running: dict[_Thread, tuple[int, float]] = {}  # which call, until when
        waiting = deque(range(len(calls)))
        try:
            while waiting or running:
                if waiting and len(running) < self._workers:
                    i = waiting.popleft()
                    found[i] = self._refusal()
                    if found[i] is None:
                        thread = self._idle.pop() if self._idle else _Thread()
                        running[thread] = i, min(time.monotonic() + timeout_s, self._end)
                        thread.take(calls[i], answers)
                    continue
                try:
                    first = min(until for _, until in running.values())
                    thread, value = answers.get(timeout=max(0.0, first - time.monotonic()))
                except Empty:
                    now = time.monotonic()
                    for thread in [thread for thread, (_, until) in running.items() if until <= now]:
                        i, until = running.pop(thread)
                        limit = f"batch_timeout_s={self._batch_s:g}" if until == self._end else f"timeout_s={timeout_s:g}"
                        found[i] = Late(f"it took longer than {limit}")
                        self._give_up(thread)
                    continue
                if thread in running:
                    found[running.pop(thread)[0]] = value
                    self._idle.append(thread)
        finally:
            for thread in running:  # Ctrl-C
                self._give_up(thread)
        return found

    def close(self) -> None:
        """End the threads that wait for calls. Others may still be made."""
        while self._idle:
            self._idle.pop().leave()

    def _refusal(self) -> NotCalled | None:
        if time.monotonic() >= self._end:
            return OutOfTime(f"not called: batch_timeout_s={self._batch_s:g} was over")
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if len(self._given_up) >= self._most_stuck:
            return NotCalled(f"not called: {len(self._given_up)} calls before it took too long and have not returned")
        return None

    def _give_up(self, thread: _Thread) -> None:
        self._given_up.append(thread)
        thread.leave()


class _Thread(Thread):
    """One thread for many calls, not one per call: a user's connections and OpenMP's teams are per thread."""

    def __init__(self) -> None:
        super().__init__(name="deadline", daemon=True)
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        self._device = _cuda_device()
        self.start()

    def run(self) -> None:
        if self._device is not None:
            sys.modules["torch"].cuda.set_device(self._device)
        while (taken := self._calls.get()) is not None:
            call, answers = taken
            try:
                answers.put((self, call()))
            except BaseException as error:  # also SystemExit: who waits for the call must hear of it
                answers.put((self, error))

    def take(self, call: Callable[[], Any], answers: SimpleQueue[Any]) -> None:
        self._calls.put((call, answers))

    def leave(self) -> None:
        """End it, once its call returns."""
        self._calls.put(None)


def _cuda_device() -> int | None:
    """This rank's device, where CUDA is in use: the current device is per thread, and in a new one it is the first. Torch is not
    imported for it."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None
