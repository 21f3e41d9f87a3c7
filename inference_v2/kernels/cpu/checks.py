"""Tensors as C++ takes them."""

from __future__ import annotations

import torch
from torch import Tensor


def pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def require(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """Raises ValueError for what C++ would read as something else."""
    for x in tensors:
        if x is not None and not (x.dtype == dtype and x.device.type == "cpu" and x.is_contiguous()):
            given = f"{x.dtype} on {x.device}, strides {x.stride()}"
            raise ValueError(f"CPU kernel: {given}; allowed: {dtype} on the CPU, contiguous")
