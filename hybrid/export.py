"""A model as a Hugging Face folder, written tensor by tensor: no rank ever holds more than its shards and one tensor."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybrid.folders import PARTIAL, FolderError, others, replace_file, write_folder
from hybrid.mesh import first_error, get_rank
from hybrid.safetensors_stream import TensorInfo, write_safetensors

# Taken from the source folder as they are. The tokenizer writes its own files.
SIDE_FILES = (
    "generation_config.json", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
EXPORT_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model", ".py"}  # what an export may hold


@dataclass(frozen=True)
class _Entry:
    """A tensor to write: its form on disk and, called by every rank in the same order, its value (needed on rank 0)."""

    info: TensorInfo
    read: Callable[[], Tensor]


def save_pretrained(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    config: Any,
    *,
    architecture: str | None = None,
    tokenizer: Any = None,
    source: str | os.PathLike[str] | None = None,
    copied: Iterable[tuple[str, Tensor]] = (),
    dtype: torch.dtype | None = None,
    value: Callable[[str, Tensor], Tensor] | None = None,
    max_file_bytes: int = 5_000_000_000,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective: writes `path` whole or not at all; AutoModelFor... and AutoTokenizer load it.

    tensors       named by module (`model.layers.0...`), DTensors or plain, the same order on every rank; a tensor that comes
                  under two names (tied weights) is written once, under the first
    config        the model's transformers config; `architecture` (a class name) fills in `architectures` where it has none
    source        the folder the model came from: generation_config.json, chat template, processor files are taken from it
    copied        more tensors, which keep their dtype: they go through bit for bit
    dtype         of floating-point `tensors`; None: as they are
    value         name and tensor -> what is written for it, cut like it; every rank calls it in the same order. None: the tensor
    Raises FolderError on every rank if any fails; ValueError when `path` holds something else than an earlier export.
    """
    path, source = Path(path), None if source is None else Path(source)
    error = None
    try:
        _check_target(path, source)
    except ValueError as caught:
        error = caught
    if (line := first_error(error, group)) is not None:
        raise error or ValueError(line)
    entries = [*_given(tensors, lambda _: dtype, value), *_given(copied, lambda _: None)]
    files = _plan(entries, max_file_bytes)
    own_dtype = next((entry.info.dtype for entry in entries if entry.info.dtype.is_floating_point), torch.float32)
    saved_config = _config_for_disk(config, architecture, dtype or own_dtype)

    def write(folder: Path) -> None:
        reads = (entry.read() for entries in files.values() for entry in entries)
        try:
            if get_rank(group) == 0:
                for name, entries in files.items():
                    write_safetensors(folder / name, [entry.info for entry in entries], reads)
        finally:
            deque(reads, maxlen=0)  # ranks that do not write, and rank 0 after an error, take part in every gather

    def finish(folder: Path) -> None:
        if len(files) > 1:
            index = json.dumps(_index(files), indent=2)
            (folder / "model.safetensors.index.json").write_text(index + "\n", encoding="utf-8")
        saved_config.save_pretrained(folder)
        if source is not None:
            names = [*SIDE_FILES, *(p.name for p in source.glob("*.py") if getattr(config, "auto_map", None))]
            for name in names:
                if (source / name).is_file():
                    shutil.copyfile(source / name, folder / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    write_folder(path, write, finish=finish, group=group)


def save_weights(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective: one safetensors file, whole or not at all, of `tensors` as `save_pretrained` takes them, gathered one by one;
    in the dtype of their name, those without one as they are. Raises FolderError on every rank if it cannot be written."""
    path = Path(path)
    entries = sorted(_given(tensors, dtypes.get), key=lambda entry: -entry.info.dtype.itemsize)
    reads = (entry.read() for entry in entries)
    partial = path.with_name(f".{path.name}{PARTIAL}")
    error: Exception | None = None
    try:
        if get_rank(group) == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(partial, [entry.info for entry in entries], reads)
            replace_file(partial, path)
    except OSError as caught:
        error = caught
        partial.unlink(missing_ok=True)
    finally:
        deque(reads, maxlen=0)  # as above
    if (line := first_error(error, group)) is not None:
        raise FolderError(f"could not write {path}: {line}") from error


def _given(
    tensors: Iterable[tuple[str, Tensor]],
    dtype_of: Callable[[str], torch.dtype | None],
    value: Callable[[str, Tensor], Tensor] | None = None,
) -> Iterator[_Entry]:
    seen: set[int] = set()
    for name, tensor in tensors:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        saved = dtype_of(name) if tensor.is_floating_point() else None
        saved = saved or tensor.dtype
        yield _Entry(TensorInfo(name, saved, tuple(tensor.shape)), partial(_gather, name, tensor, saved, value))


@torch.no_grad()
def _gather(name: str, tensor: Tensor, dtype: torch.dtype, value: Callable[[str, Tensor], Tensor] | None) -> Tensor:
    tensor = (tensor.detach() if value is None else value(name, tensor)).to(
        dtype
    )  # the shard, so that what is gathered is not held in two dtypes
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plan(entries: list[_Entry], max_file_bytes: int) -> dict[str, list[_Entry]]:
    """Files in the order they are written; each has at most `max_file_bytes`, or one tensor."""
    groups: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if groups[-1] and filled + entry.info.nbytes > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(entry)
        filled += entry.info.nbytes
    aligned = [sorted(group, key=lambda entry: -entry.info.dtype.itemsize) for group in groups]
    if len(aligned) == 1:
        return {"model.safetensors": aligned[0]}
    return {f"model-{i:05d}-of-{len(aligned):05d}.safetensors": group for i, group in enumerate(aligned, start=1)}


def _index(files: dict[str, list[_Entry]]) -> dict[str, Any]:
    total = sum(entry.info.nbytes for entries in files.values() for entry in entries)
    where = {entry.info.name: name for name, entries in files.items() for entry in entries}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


def _config_for_disk(config: Any, architecture: str | None, dtype: torch.dtype) -> Any:
    saved = copy.deepcopy(config)
    if not saved.architectures and architecture is not None:
        saved.architectures = [architecture]
    saved.dtype = dtype
    text = saved.get_text_config()
    if text.dtype is not None:
        text.dtype = dtype
    return saved


def _check_target(path: Path, source: Path | None) -> None:
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise ValueError(f"{path} is the folder that the model came from; export to another one")
    if found := others(path, marker="config.json", owns=lambda entry: not entry.is_dir() and entry.suffix in EXPORT_SUFFIXES):
        raise ValueError(f"{path} exists and is not a model folder ({', '.join(found[:3])}); export to a new folder")
