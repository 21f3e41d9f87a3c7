"""Activation checkpointing under DeepSpeed's names: of a part of a forward only the inputs are kept; backward runs it again.

`import hybrid as deepspeed; deepspeed.checkpointing.checkpoint(function, *args, **kwargs)`. How the inputs wait is said by the
section `activation_checkpointing` of the engine whose forward is running, else by `configure` in this context, else they wait
as they are. (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from hybrid.config import describe_errors
from hybrid.training.config.load import ConfigSource
from hybrid.training.config.sections import ActivationCheckpointingConfig
from hybrid.training.config.top import resolve_training

R = TypeVar("R")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ALIGNED = 64  # bytes: any dtype may start there


def checkpoint(function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """function(*args, **kwargs), which backward runs again with the same inputs and the same random numbers, so that gradients
    are those of a plain call. Tensors may stand anywhere inside args and kwargs. A part inside a part waits as torch has it.

    Raises ValueError where more parts wait than `number_checkpoints` made room for.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, form = tree_flatten((args, kwargs))
    waiting = None if _INSIDE.get() else _FOLLOWED.get() or _CONFIGURED.get()
    kept = leaves if waiting is None else waiting.keep(leaves)
    count = len(kept)
    fresh = [leaves]  # the first run takes what it was given

    def run(*stored: Any) -> R:
        given = fresh.pop() if fresh else [x.restored() if isinstance(x, _Kept) else x for x in stored[:count]]
        inner_args, inner_kwargs = tree_unflatten(given, form)
        del given
        token = _INSIDE.set(True)
        try:
            return function(*inner_args, **inner_kwargs)
        finally:
            _INSIDE.reset(token)

    # torch saves the random states of the devices that it sees in its arguments
    devices = [torch.empty(0, device=device) for device in dict.fromkeys(x.device for x in kept if isinstance(x, _Kept))]
    del leaves, args, kwargs
    return torch_checkpoint.checkpoint(run, *kept, *devices, use_reentrant=False)  # type: ignore[no-any-return]


non_reentrant_checkpoint = checkpoint  # the only kind there is here


def configure(
    mpu_: Any = None,
    deepspeed_config: ConfigSource | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """How `checkpoint` keeps inputs in this context (of contextvars: other threads have theirs), where no engine's config says.
    What is given wins over the config's section. synchronize and profile change nothing here.

    Raises ValueError for what does not fit, and leaves what was configured before as it was.
    """
    if mpu_ is not None and mpu_.get_model_parallel_world_size() > 1:
        raise ValueError("mpu_ has more than one model-parallel rank; allowed: none, since a model is trained whole on each rank")
    section = {} if deepspeed_config is None else _section(deepspeed_config)
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
    }
    section |= {name: value for name, value in given.items() if value is not None}
    try:
        settings = ActivationCheckpointingConfig.model_validate(section)
    except ValidationError as error:
        line = "; ".join(describe_errors(error, ActivationCheckpointingConfig))
        for name, argument in _ARGUMENTS.items():
            line = line.replace(name, argument)
        raise ValueError(f"checkpointing.configure: {line}") from None
    _CONFIGURED.set(_Waiting(settings))


_ARGUMENTS = {
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
}


def _section(source: ConfigSource) -> dict[str, Any]:
    return resolve_training(source)[0].activation_checkpointing.model_dump(exclude_unset=True)


def is_configured() -> bool:
    """Whether `configure` was called in this context."""
    return _CONFIGURED.get() is not None


def reset() -> None:
    """Fresh buffers for `configure`'s contiguous_checkpointing, after forwards without a backward; the configuration stays."""
    if (waiting := _CONFIGURED.get()) is not None:
        _CONFIGURED.set(_Waiting(waiting.settings))


@contextmanager
def following(settings: ActivationCheckpointingConfig) -> Iterator[None]:
    """For one forward: parts are kept as `settings` says, with buffers of its own."""
    token = _FOLLOWED.set(_Waiting(settings))
    try:
        yield
    finally:
        _FOLLOWED.reset(token)


def recompute_in_backward(layer: nn.Module) -> None:
    """Let a layer's own forward be a checkpointed part. Works in train and eval mode alike, and renames no parameter."""
    plain = layer.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(plain, *args, **kwargs)

    layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


class _Slot:
    """Room for one part; given back when nothing of the part waits any more."""


@dataclass(frozen=True)
class _Kept:
    """An input as it waits, and what it was."""

    stored: Tensor
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    slot: _Slot | None

    def restored(self) -> Tensor:
        with torch.no_grad():
            whole = self.stored.to(self.device, self.dtype, non_blocking=self.stored.is_pinned(), copy=True)
        return whole.requires_grad_(self.requires_grad)


class _Waiting:
    """Keeps inputs of parts until their backward. The graph owns what is kept; this knows only where there is room."""

    def __init__(self, settings: ActivationCheckpointingConfig) -> None:
        self.settings = settings
        self._dtype = None if settings.boundary_dtype is None else _DTYPES[settings.boundary_dtype]
        self._parts: weakref.WeakSet[_Slot] = weakref.WeakSet()
        self._free: dict[tuple[torch.device, int], list[Tensor]] = {}  # rows of buffers, by place and bytes
        self._seen = WeakTensorKeyDictionary()  # an input of several parts (a mask) waits once

    def keep(self, leaves: Sequence[Any]) -> list[Any]:
        """`leaves`, those that are to wait elsewhere or in another dtype as _Kept."""
        found: dict[int, _Kept | None] = {i: self._known(x) for i, x in enumerate(leaves) if self._moves(x)}
        new = [i for i, kept in found.items() if kept is None]
        places = self._places([leaves[i] for i in new])
        for i, (place, slot) in zip(new, places, strict=True):
            x = leaves[i]
            with torch.no_grad():
                place.copy_(x, non_blocking=place.is_pinned())
            found[i] = kept = _Kept(place, x.dtype, x.device, x.requires_grad, slot)
            self._seen[x] = (x._version, weakref.ref(kept))
        return [found.get(i, x) for i, x in enumerate(leaves)]

    def _moves(self, x: Any) -> bool:
        """Floats, but neither weights, which stay anyway, nor tensors of other layouts; fp64 is somebody's wish."""
        if type(x) is not Tensor or x.dtype not in _DTYPES.values() or x.layout is not torch.strided or not x.numel():
            return False
        settings = self.settings
        return settings.contiguous_memory_optimization or x.dtype != self._stored_dtype(x) or x.device != self._device(x)

    def _known(self, x: Tensor) -> _Kept | None:
        version, kept = self._seen.get(x, (None, None))
        return kept() if kept is not None and version == x._version else None

    def _stored_dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype if self._dtype is None else self._dtype

    def _device(self, x: Tensor) -> torch.device:
        return torch.device("cpu") if self.settings.cpu_checkpointing else x.device

    def _places(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, _Slot | None]]:
        """Where they are to wait: each by itself, or side by side in a row of a buffer."""
        if not tensors:
            return []
        if not self.settings.contiguous_memory_optimization:
            return [(self._empty(x, x.shape, self._stored_dtype(x)), None) for x in tensors]
        sizes = [x.numel() * self._stored_dtype(x).itemsize for x in tensors]
        rounded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        row, slot = self._row(tensors[0], sum(rounded))
        cut = [part[:size] for part, size in zip(row.split(rounded), sizes, strict=True)]
        return [(part.view(self._stored_dtype(x)).view(x.shape), slot) for part, x in zip(cut, tensors, strict=True)]

    def _row(self, like: Tensor, size: int) -> tuple[Tensor, _Slot]:
        room = self.settings.number_checkpoints
        assert room is not None
        if len(self._parts) >= room:
            raise ValueError(
                f"number_checkpoints={room}, but a further part's inputs are to wait; give the number of all checkpointed parts "
                "of one forward"
            )
        free = self._free.setdefault((self._device(like), size), [])
        if not free:
            free += self._empty(like, (room - len(self._parts), size), torch.uint8)
        row, slot = free.pop(), _Slot()
        self._parts.add(slot)
        weakref.finalize(slot, free.append, row).atexit = False
        return row, slot

    def _empty(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        device = self._device(like)
        return torch.empty(shape, dtype=dtype, device=device, pin_memory=device.type == "cpu" and like.is_cuda)


_FOLLOWED: ContextVar[_Waiting | None] = ContextVar("followed", default=None)
_CONFIGURED: ContextVar[_Waiting | None] = ContextVar("configured", default=None)
_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)
