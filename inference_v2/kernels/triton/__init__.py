"""The kernels in Triton, for GPUs: elementwise, attention, sample, and `numbers`, the arithmetic that they share. The contract is
that of reference.py and sampling.py. Triton itself is imported with `load_kernels`, never with this package.

Under TRITON_INTERPRET=1, set before triton is imported anywhere in the process, they run on CPU tensors (slowly, for tests).
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from inference_v2.kernels.triton.backend import TritonKernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INSTALL = "pip install triton"


class TritonMissing(Exception):
    """Why the Triton kernels cannot run here."""


def load_kernels(device: torch.device, dtype: torch.dtype) -> TritonKernels:
    """Raises TritonMissing."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != ("cpu" if interpreted else "cuda"):
        where = "device cpu (TRITON_INTERPRET=1 is set)" if interpreted else "device cuda, or cpu under TRITON_INTERPRET=1"
        raise TritonMissing(f"device={device.type}; allowed: {where}")
    if dtype not in DTYPES:
        raise TritonMissing(f"dtype={str(dtype).removeprefix('torch.')}; allowed: float32, bfloat16, float16")
    return _load(device)


@functools.cache
def _load(device: torch.device) -> TritonKernels:
    try:
        from inference_v2.kernels.triton.backend import TritonKernels
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        raise TritonMissing(f"triton is not installed ({error}); {INSTALL}") from None
    return TritonKernels(device)
