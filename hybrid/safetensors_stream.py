"""Safetensors files written tensor by tensor: the header first, since shapes are known, then the bytes as they come.

The format: 8 bytes of header length (little endian), a JSON header {name: {dtype, shape, data_offsets}}, then the tensors'
bytes without gaps (https://huggingface.co/docs/safetensors/index#format). The library's own writer wants all of a file's
tensors in memory at once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ALIGNMENT = 8  # of the first tensor's bytes


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(path: str | os.PathLike[str], infos: Sequence[TensorInfo], tensors: Iterator[Tensor]) -> None:
    """One file at `path` of the next `len(infos)` tensors, at most one of which is alive at a time.

    Order the infos by falling item size, then each tensor is aligned to its own.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for info in infos:
        start, end = end, end + info.nbytes
        header[info.name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": list(info.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for info in infos:
            tensor = next(tensors)
            assert (tensor.dtype, tuple(tensor.shape)) == (info.dtype, info.shape), (info, tensor.dtype, tensor.shape)
            if tensor.numel():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
