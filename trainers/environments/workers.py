"""Calls of others' code, side by side, none of which can stop a run. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
MOST_STUCK = 64  # calls that have not returned; with so many of them no further one is made


class Workers:
    """Runs calls at the same time, a daemon thread each, and gives up those that take longer than `timeout_s`.

    Python cannot end a thread: one that is given up stays until its call returns, and does not keep the process from ending.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._given_up: list[Thread] = []

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T | Exception]:
        """What each call gave, or raised; a TimeoutError where it takes too long, or where MOST_STUCK calls before it have not
        returned."""
        self._given_up = [thread for thread in self._given_up if thread.is_alive()]
        if len(self._given_up) >= MOST_STUCK:
            return [TimeoutError(f"not called: {len(self._given_up)} calls before it have not returned")] * len(calls)
        results: list[T | Exception] = [TimeoutError(f"no reply within {self.timeout_s:g} s")] * len(calls)

        def work(i: int) -> None:
            try:
                results[i] = calls[i]()
            except Exception as error:  # whatever it is: the caller says what becomes of it
                results[i] = error

        threads = [Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
        end = time.monotonic() + self.timeout_s
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        found = list(results)  # what comes later changes nothing
        self._given_up += [thread for thread in threads if thread.is_alive()]
        return found
