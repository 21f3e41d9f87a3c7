"""One piece of work at a time behind the training loop, with a process group of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch.distributed as dist

log = logging.getLogger(__name__)


class Background:
    """Runs collective work in a thread. Every rank starts and waits in the same order.

    The work gets a gloo group of its own: on the main group its collectives would mix with those of training. The thread is
    no daemon, so the interpreter waits for it at its end; call `wait` before the process group is destroyed.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._group: dist.ProcessGroup | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def start(self, work: Callable[[dist.ProcessGroup | None], None], what: str) -> None:
        """Collective: returns at once. The work before must have been waited for."""
        assert self._thread is None
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

        def run() -> None:
            try:
                work(self._group)
            except BaseException as error:  # whatever it is, the next verb raises it
                self._error = error
                log.error("%s failed: %s", what, error)  # there may be no next verb

        self._thread = threading.Thread(target=run, name=what)
        self._thread.start()

    def wait(self) -> None:
        """Until the work is done; nothing where there is none. Raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give the group back."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None
