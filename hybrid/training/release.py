"""Gathered weights freed at their last use in a backward, where FSDP2 would hold them until its end.

FSDP2 frees a unit when the gradient of its input is there. A unit whose input needs none (the first layer over a frozen
embedding, a branch over the data) and one that a recomputation runs on the way to another would stay whole meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves


def release_at_last_use(units: Iterable[nn.Module]) -> None:
    """To be called after sharding, for units that are freed after their backward."""
    for unit in units:
        release = _Release(unit)
        unit.register_forward_pre_hook(release.enter, prepend=True)
        unit.register_forward_hook(release.leave, with_kwargs=True)


class _Release:
    """The hooks of one unit."""

    def __init__(self, unit: nn.Module) -> None:
        inside = {*unit.modules()}
        states = dict.fromkeys(m._get_fsdp_state() for m in inside if isinstance(m, FSDPModule))
        self._states = [state for state in states if inside.issuperset(state._modules)]
        self._task = -1  # the backward that `_waiting` is of
        self._waiting: set[Node] = set()

    def enter(self, module: nn.Module, args: Any) -> None:
        """Run again on the way to a later unit, whose backward has sent for the one before it: that one is not next."""
        if _in_backward() and all(state._training_state.name == "IDLE" for state in self._states):
            others = [s for s in self._states[0]._state_ctx.all_states if s not in self._states]
            for group in (group for state in others for group in state._fsdp_param_groups):
                if group._all_gather_result is not None:
                    group.wait_for_unshard()
                    group.reshard()

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _in_backward():
            self._after_recomputation()
        elif torch.is_grad_enabled() and not any(_has_graph(x) for x in tree_leaves((args, kwargs))):
            self._watch([x for x in tree_leaves(output) if _has_graph(x) and x.grad_fn is not None])

    def _after_recomputation(self) -> None:
        """The unit's own backward, if there is one, gathers again."""
        for state in self._states:
            if state._training_state.name == "IDLE":  # else its backward is under way
                for group in state._fsdp_param_groups:
                    if group.reshard_after_backward:  # else all is held for a while (sharding.held)
                        group.reshard()

    def _watch(self, outputs: list[Tensor]) -> None:
        """Since no gradient leaves through the inputs, all of this call's graph ends in parameters: when they have theirs, no
        weight is used any more."""
        leaves = _leaves(outputs)
        seen = [-1]

        def start(gradient: Tensor) -> None:
            task = torch._C._current_graph_task_id()
            if seen[0] == task or not any(g.reshard_after_backward for state in self._states for g in state._fsdp_param_groups):
                return  # in the latter case all is held for a while (sharding.held)
            seen[0] = task
            if self._task != task:
                self._task, self._waiting = task, set()
            for leaf in leaves:
                if leaf not in self._waiting and torch._C._will_engine_execute_node(leaf):
                    self._waiting.add(leaf)
                    self._wait(leaf)

        for output in outputs:
            output.register_hook(start)

    def _wait(self, leaf: Node) -> None:
        def done(*_: Any) -> None:
            handle.remove()
            self._waiting.discard(leaf)
            if not self._waiting and self._task == torch._C._current_graph_task_id():
                self._release()

        handle = leaf.register_hook(done)

    @torch.no_grad()
    def _release(self) -> None:
        for state in self._states:
            for group in reversed(state._fsdp_param_groups):
                group.post_backward()


def _in_backward() -> bool:
    """Whether a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _has_graph(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _leaves(outputs: list[Tensor]) -> list[Node]:
    """Where the graph of `outputs` ends."""
    seen: set[Node] = set()
    waiting = [x.grad_fn for x in outputs]
    found = []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [each for each, _ in node.next_functions if each is not None]
        waiting += below
        if not below:
            found.append(node)
    return found
