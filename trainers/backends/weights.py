"""The policy's weights for a backend that holds a copy of its own: gathered layer by layer, in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from hybrid.models import ShardedModel
from hybrid.sharding import reshard
from trainers.backends.requests import raise_on_all

Use = Callable[[Mapping[str, Tensor]], None]


def for_each_layer(model: ShardedModel, use: Use) -> None:
    """Calls `use` with the whole tensors of each layer by HF name, last with those outside the layers and persistent buffers;
    they are good until it returns. A tied weight comes once. Towers that text never runs are left out.

    Collective, also if `use` does nothing on some ranks. What it raises on one rank is raised as BackendError on all, after the
    last gather.
    """
    reshard(model.module)
    source = model.source()
    left = set(source.names())
    buffers = _persistent_buffers(model)  # before a scope is open: to look at a state dict frees what is gathered
    error: Exception | None = None
    for prefix in (*source.prefixes, ""):
        with source.scope(prefix):
            names = sorted(name for name in left if name.startswith(f"{prefix}." if prefix else ""))
            left.difference_update(names)
            if error is None:
                try:
                    use({name: source.get(name) for name in names} | ({} if prefix else buffers))
                except Exception as caught:  # whatever it is: the other ranks expect this one in the next gather
                    error = caught
    raise_on_all(error)


def _persistent_buffers(model: ShardedModel) -> dict[str, Tensor]:
    hf = model.module.hf
    saved = hf.state_dict().keys()
    return {name: buffer for name, buffer in hf.named_buffers() if name in saved and not name.startswith(model.towers)}
