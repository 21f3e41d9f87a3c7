"""Calls of others' code, side by side, none of which can stop a run. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def side_by_side(calls: Sequence[Callable[[], T]], timeout_s: float) -> list[T | Exception]:
    """What each call gave, or raised; a TimeoutError where it takes longer than `timeout_s`. The calls run at the same time, a
    thread each; one that hangs is left behind, and does not keep the process from ending."""
    results: list[T | Exception] = [TimeoutError(f"no reply within {timeout_s:g} s")] * len(calls)

    def work(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:  # whatever it is: the caller says what becomes of it
            results[i] = error

    threads = [Thread(target=work, args=(i,), daemon=True) for i in range(len(calls))]
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(results)  # what comes later changes nothing
