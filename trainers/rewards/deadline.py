"""Calls with a deadline, in a thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

MOST_STUCK = 8  # calls that have not returned; with so many of them no further one is made


class Late(TimeoutError):
    """The call took too long."""


class NotCalled(Late):
    """Too many calls before it have not returned."""


class Deadline:
    """Calls made one after the other in a daemon thread, each given up after `timeout_s`.

    Python cannot end a thread. One that is given up stays until its call returns (the process may exit meanwhile) and another
    takes its place; with MOST_STUCK of them no further call is made. They are counted anew at each `begin`. A call that never
    lets go of the interpreter (a regular expression, one product of huge integers) stops the process, deadline or not.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._thread: _Thread | None = None
        self._given_up: list[_Thread] = []

    def begin(self) -> None:
        """Forget those given up that have returned."""
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the call returns, or the exception that it raised: Late where it took too long, NotCalled where none was made."""
        if len(self._given_up) >= MOST_STUCK:
            return NotCalled(f"not called: {MOST_STUCK} calls before it took longer than timeout_s={self.timeout_s:g}")
        thread, self._thread = self._thread or _Thread(), None
        try:
            value = thread.call(function, args, self.timeout_s)
        except Empty:
            self._given_up.append(thread)
            thread.leave()
            return Late(f"it took longer than timeout_s={self.timeout_s:g}")
        self._thread = thread  # only one that has answered: Ctrl-C must not leave an answer for the next call to find
        return value

    def close(self) -> None:
        if self._thread is not None:
            self._thread.leave()
            self._thread = None


class _Thread(threading.Thread):
    """One thread for all calls, not one per call: a user's connections and OpenMP's teams are per thread."""

    def __init__(self) -> None:
        super().__init__(name="reward", daemon=True)
        self._calls: SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        self._device = _cuda_device()
        self.start()

    def run(self) -> None:
        if self._device is not None:
            sys.modules["torch"].cuda.set_device(self._device)
        while (call := self._calls.get()) is not None:
            function, args = call
            try:
                self._results.put(function(*args))
            except BaseException as error:  # also SystemExit: who waits for the call must hear of it
                self._results.put(error)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Any:
        """Raises queue.Empty after `timeout_s`; the thread is then not to be used again."""
        self._calls.put((function, args))
        return self._results.get(timeout=timeout_s)

    def leave(self) -> None:
        """End it, once its call returns."""
        self._calls.put(None)


def _cuda_device() -> int | None:
    """This rank's device, where CUDA is in use: the current device is per thread, and in a new one it is the first. Torch is not
    imported for it."""
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None
