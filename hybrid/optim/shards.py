"""How a parameter lies on ranks, for optimizers whose update needs more than a rank's own rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hybrid.sharding import local


def shard_group(tensor: Tensor) -> dist.ProcessGroup | None:
    """The ranks that together hold one copy of `tensor`, cut along dimension 0; None where each holds all of it (a plain tensor,
    or a mesh whose shard dimension is 1). Raises ValueError for any other layout."""
    if not isinstance(tensor, DTensor):
        return None
    # type, not isinstance: a strided shard (tensor parallelism below FSDP) is a subclass whose rows lie in another order
    cut = [i for i, place in enumerate(tensor.placements) if type(place) is Shard and place.dim == 0]
    if len(cut) > 1 or len(cut) + sum(place.is_replicate() for place in tensor.placements) < len(tensor.placements):
        raise ValueError(
            f"a parameter of shape {tuple(tensor.shape)} lies as {tensor.placements}; allowed: Shard(0) on at most one dimension "
            "of the mesh, Replicate on the others; use adamw, adam, sgd or lion, which work row by row"
        )
    if not cut or tensor.device_mesh.size(cut[0]) == 1:
        return None
    return tensor.device_mesh.get_group(cut[0])


def zeros_beside(parameter: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros that lie as `parameter` where both have as many rows (dimension 0), else whole on every rank."""
    held = local(parameter)
    if isinstance(parameter, DTensor) and parameter.ndim and len(shape) and shape[0] == parameter.shape[0]:
        rows = torch.zeros(held.shape[0], *shape[1:], dtype=dtype, device=held.device)
        stride = torch.empty(*shape, device="meta").stride()
        size = torch.Size(shape)
        return DTensor.from_local(rows, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=stride)
    return torch.zeros(*shape, dtype=dtype, device=held.device)
