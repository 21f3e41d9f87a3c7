"""A model as a Hugging Face folder, written tensor by tensor: no rank ever holds more than its shards and one tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def save_pretrained(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    config: Any,
    *,
    architecture: str | None = None,
    tokenizer: Any = None,
    source: str | os.PathLike[str] | None = None,
    copied: Callable[[str], bool] | None = None,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = 5_000_000_000,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective: writes `path` whole or not at all; AutoModelFor... and AutoTokenizer load it.

    tensors       named by module (`model.layers.0...`), DTensors or plain, the same order on every rank; a tensor that comes
                  under two names (tied weights) is written once, under the first
    config        the model's transformers config; `architecture` (a class name) fills in `architectures` where it has none
    source        the folder the model came from: generation_config.json, chat template, processor files are taken from it
    copied        which names of the source's safetensors are copied through, bit for bit, in the dtype they have there
    dtype         of floating-point `tensors`; None: as they are
    Raises FolderError on every rank if any fails; ValueError when `path` holds something else than an earlier export.
    """
    raise NotImplementedError
