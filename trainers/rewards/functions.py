"""`module:function`: a user's (completion text, Prompt) -> float, called with a deadline."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from trainers.rewards.builtin import TextReward
from trainers.types import Prompt, Rollout

MOST_STUCK = 8  # calls that have not returned; a component that has so many gets no further ones


def load(name: str) -> TextReward:
    """Raises ValueError where `module:function` cannot be imported, or does not take (completion, prompt)."""
    module_name, _, function = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module: whatever it raises
        raise ValueError(
            f"reward {name}: cannot import {module_name!r}: {type(error).__name__}: {error}; its folder must be on PYTHONPATH"
        ) from error
    reward = getattr(module, function, None)
    if not callable(reward):
        raise ValueError(f"reward {name}: {module_name} has no function {function!r}")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some functions of C modules have none
        return reward
    try:
        signature.bind("completion", "prompt")
    except TypeError as error:
        raise ValueError(f"reward {name}: it takes {signature} ({error}); allowed: (completion, prompt)") from None
    return reward


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
        """What the call returns; the exception, returned, where it raised one, took too long (TimeoutError) or was not made."""
        if len(self._given_up) >= MOST_STUCK:
            return TimeoutError(f"not called: {MOST_STUCK} calls before it took longer than timeout_s={self.timeout_s:g}")
        if self._thread is None:
            self._thread = _Thread()
        try:
            return self._thread.call(function, args, self.timeout_s)
        except Empty:
            self._given_up.append(self._thread)
            self._thread.leave()
            self._thread = None
            return TimeoutError(f"it took longer than timeout_s={self.timeout_s:g}")

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
        self.start()

    def run(self) -> None:
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


class Function:
    """A component that is a user's function. It runs in another thread than the trainer's: `signal` does not work there."""

    def __init__(self, reward: TextReward, timeout_s: float) -> None:
        self._reward, self._deadline = reward, Deadline(timeout_s)

    def check(self, prompts: Sequence[Prompt]) -> None:
        pass

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        self._deadline.begin()
        return [self._deadline.call(self._reward, r.text, r.prompt) for r in rollouts]

    def close(self) -> None:
        self._deadline.close()
