"""Host memory in large pages. What a step reads once, weights and keys, is larger than what the processor can translate addresses
for: with pages of 4 kB a fifth of the memory's bandwidth goes into walking page tables."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

PAGE, MADV_HUGEPAGE = 4096, 14
CHUNK = 64 * 2**20


def advised(tensor: Tensor) -> Tensor:
    """The same tensor; its untouched memory will come in large pages where the system has them. Only a hint."""
    if tensor.device.type == "cpu" and sys.platform == "linux":
        start, end = tensor.data_ptr() // PAGE * PAGE + PAGE, (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE
        if start < end:  # whole pages: what lies beside the tensor is not ours
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_HUGEPAGE)
    return tensor


class Arena:
    """Tensors side by side in chunks of CHUNK bytes: small ones share large pages. A chunk lives as long as any of them."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Let go of the last chunk: it lives as long as the tensors in it."""
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size], not initialised, 64-byte aligned."""
        num_bytes = size * dtype.itemsize
        if self._used + num_bytes > self._chunk.numel():
            self._chunk = advised(torch.empty(max(CHUNK, num_bytes), dtype=torch.uint8))
            self._used = 0
        part = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // 64) * 64
        return part.view(dtype)
