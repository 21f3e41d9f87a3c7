"""Which module of a tree an operation belongs to, in forward and in backward.

In forward it is the innermost module that is running. In backward, autograd says which node runs; nodes are numbered in the order
in which the forward made them, and at each border of a module that number is written down. So nothing enters the graph, and what
a module did is found again whatever its inputs were. A forward that runs again in backward (activation checkpointing) counts as
backward.
"""

from __future__ import annotations

import functools
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

PHASES = ("forward", "backward")


class ModuleSpans:
    """Follows every module below `root` by hooks of its own while entered. What runs outside them belongs to nobody."""

    def __init__(self, root: nn.Module, ignored: tuple[type[nn.Module], ...] = ()) -> None:
        """ignored: classes whose modules, with all below them, are nobody's either."""
        self._modules = dict(root.named_modules())
        under = [name for name, module in self._modules.items() if isinstance(module, ignored)]
        self._ignored = {name for name in self._modules if any(_is_below(name, other) for other in under)}
        self.seconds: dict[str, float] = defaultdict(float)  # of each module's forwards, its parts included
        self._synchronize = _synchronizer(root)
        self._running: list[tuple[str, float]] = []
        self._numbers: list[int] = []  # rising; from _numbers[i] on, nodes are those of _owners[i]
        self._owners: list[str | None] = []
        self._thread = threading.get_ident()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> ModuleSpans:
        for name, module in self._modules.items():
            self._handles.append(module.register_forward_pre_hook(functools.partial(self._enter, name)))
            # also after an exception, such as the one by which a recomputation stops early
            self._handles.append(module.register_forward_hook(functools.partial(self._leave, name), always_call=True))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()

    @property
    def parents(self) -> tuple[str, ...]:
        """`PHASE:NAME` of the operation that runs now, or nothing. Under this name torch's counter asks for it."""
        owner, phase = self._owner()
        return () if owner is None or owner in self._ignored else (f"{phase}:{owner}",)

    def _owner(self) -> tuple[str | None, str]:
        phase = PHASES[torch._C._current_graph_task_id() != -1]
        if self._running:
            return self._running[-1][0], phase
        node = torch._C._current_autograd_node()
        if node is None:
            return None, phase
        place = bisect_right(self._numbers, node._sequence_nr()) - 1
        return (None if place < 0 else self._owners[place]), phase

    def _enter(self, name: str, *_: Any) -> None:
        self._synchronize()
        self._running.append((name, time.perf_counter()))
        self._note(name)

    def _leave(self, name: str, *_: Any) -> None:
        names = [running for running, _ in self._running]
        if name not in names:  # another hook raised before ours had noted the entry
            return
        self._synchronize()
        place = len(names) - 1 - names[::-1].index(name)
        if torch._C._current_graph_task_id() == -1:
            self.seconds[name] += time.perf_counter() - self._running[place][1]
        del self._running[place:]
        self._note(self._running[-1][0] if self._running else None)

    def _note(self, owner: str | None) -> None:
        if threading.get_ident() == self._thread:  # each thread numbers its own nodes; on CUDA, backward has another
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._owners.append(owner)


def _is_below(name: str, other: str) -> bool:
    return name == other or other == "" or name.startswith(f"{other}.")


def _synchronizer(root: nn.Module) -> Callable[[], None]:
    """On CUDA a launch is no time: each border waits for the device."""
    devices = {p.device for p in root.parameters() if p.device.type == "cuda"}
    if not devices:
        return lambda: None
    return functools.partial(torch.cuda.synchronize, devices.pop())
