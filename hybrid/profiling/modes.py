"""Dispatch modes that may end in any order: two engines in one process each start and stop their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _get_current_dispatch_mode_stack


@contextmanager
def on_top(mode: TorchDispatchMode) -> Iterator[None]:
    """Lifts off what was entered after `mode`, for as long as this lasts, so that `mode` may be left.

    Raises ValueError where `mode` is not entered on this thread: dispatch modes belong to threads.
    """
    if all(entered is not mode for entered in _get_current_dispatch_mode_stack()):
        raise ValueError("stop() on another thread than start(); dispatch modes belong to threads: stop where it was started")
    above: list[TorchDispatchMode] = []
    while (top := _get_current_dispatch_mode()) is not mode:
        assert top is not None, "looked for above"
        TorchDispatchMode.__exit__(top, None, None, None)
        above.append(top)
    try:
        yield
    finally:
        for lifted in reversed(above):
            TorchDispatchMode.__enter__(lifted)
