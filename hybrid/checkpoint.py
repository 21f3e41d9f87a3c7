"""Sharded checkpoints: each rank writes its own shards as safetensors, the rest is JSON; nothing is ever pickled.

step_N/
    state.json                  format, world size, weight version, the caller's JSON, the list of files with their sizes
    shards/*.safetensors        model.NAME, optim.STATE.NAME, ema.NAME (torch.distributed.checkpoint's safetensors storage),
                                and of another trained model, a critic say, critic.model.NAME, critic.optim.STATE.NAME
    rng/rank_00000.safetensors  generators of each rank
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hybrid import rng
from hybrid.folders import recover, recover_all, remove_folder, sweep_all, write_folder
from hybrid.mesh import describe, first_error, get_rank, get_world_size
from hybrid.optim import state as optim_state

FORMAT = 1
SHARD_FILE_BYTES = 32 * 2**20  # the storage serialises one file at a time in memory: this bounds what saving adds to the shards
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp", ".metadata")
PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))

log = logging.getLogger(__name__)


class _Header(BaseModel):
    """What `state.json` holds."""

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    world_size: int
    weight_version: int
    optimizer: dict[str, str | list[str]]  # see optim_state.header
    others: dict[str, dict[str, str | list[str]]] = {}  # the same of each other trained model
    scalars: list[str]
    state: dict[str, Any]
    files: dict[str, int]


@dataclass(frozen=True)
class Trained:
    """A model that is trained beside the policy: its named tensors and its optimizer."""

    model: Mapping[str, Tensor]
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_checkpoint` returns beside the tensors it filled in place."""

    state: dict[str, Any]  # the caller's JSON, as it was given to save_checkpoint
    weight_version: int
    world_size: int  # of the run that saved
    rng_restored: bool  # False: the rank count differs, so the generators were seeded anew


def save_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    ema: Mapping[str, Tensor] | None = None,
    others: Mapping[str, Trained] = MappingProxyType({}),
    state: Mapping[str, Any] | None = None,
    weight_version: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective: writes the folder `path` (`RUN_DIR/checkpoints/step_N`) whole or not at all.

    `model` and `ema` are named tensors, DTensors as their local shards; parameters of `optimizer` must be among `model`'s (the
    same objects). `others` are more such models, by name. Hyper-parameters of an optimizer are not stored: they are the config's;
    `state` (JSON) holds the schedule, data position and what else the caller needs. Raises FolderError on every rank if any
    cannot write (a full disk, say): nothing of the new one is left then and older ones are untouched. Raises ValueError for
    a state that is not JSON.
    """
    tensors = _named("model", model) | _named("ema", ema or {})
    if optimizer is not None:
        tensors |= _named("optim", optim_state.tensors(optimizer, model))
    for name, other in others.items():
        tensors |= _named(f"{name}.model", other.model)
        tensors |= _named(f"{name}.optim", optim_state.tensors(other.optimizer, other.model))
    header = {
        "format": FORMAT,
        "world_size": get_world_size(group),
        "weight_version": weight_version,
        "optimizer": optim_state.header(optimizer, model) if optimizer is not None else {},
        "others": {name: optim_state.header(other.optimizer, other.model) for name, other in others.items()},
        # stored with shape [1]: the storage cannot slice a tensor of no dimension
        "scalars": [name for name, tensor in tensors.items() if tensor.ndim == 0],
        "state": dict(state or {}),
    }
    try:
        json.dumps(header, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the state of a checkpoint must be JSON without NaN: {error}") from error

    def write(folder: Path) -> None:
        writer = HuggingFaceStorageWriter(str(folder / "shards"), _file_of_each(tensors), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(_with_dimension(tensors), storage_writer=writer, process_group=group)
        rng.save(folder / "rng" / f"rank_{get_rank(group):05d}.safetensors")

    def finish(folder: Path) -> None:
        (folder / "state.json").write_text(json.dumps(header | {"files": _files(folder)}, indent=1), encoding="utf-8")

    write_folder(path, write, finish=finish, group=group)


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    ema: Mapping[str, Tensor] | None = None,
    others: Mapping[str, Trained] = MappingProxyType({}),
    state_keys: Collection[str] = (),
    check_state: Callable[[dict[str, Any]], None] = lambda state: None,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Collective: fills the given tensors in place, at any rank count; a group that is not given (None) is not read.

    At the rank count of the save every generator is restored; at another, they are seeded from (seed, weight version, rank),
    which is said once. Raises ValueError, the same on every rank and before any tensor changes, for a folder that is not a
    whole checkpoint, holds a pickle, whose state lacks one of `state_keys` or is refused by `check_state` (with a ValueError), or
    whose names, shapes or dtypes do not fit.
    """
    path = Path(path)
    if get_rank(group) == 0:
        recover(path)
    first_error(None, group)  # a barrier: no rank looks before that
    try:
        header = read_header(path)
        if lacking := sorted(set(state_keys) - header["state"].keys()):
            raise ValueError(f"{path}: its state lacks {lacking}; it was saved by something else")
        check_state(header["state"])
        saved = _saved_tensors(path, header)
        slots = {} if optimizer is None else optim_state.slots(optimizer, model, saved, header["scalars"], header["optimizer"])
        tensors = _named("model", model) | _named("optim", slots) | _named("ema", ema or {})
        if lacking := sorted(others.keys() - header.get("others", {}).keys()):
            raise ValueError(f"{path} holds no {', '.join(lacking)} beside the policy; resume with the recipe that saved it")
        slots_of = {name: _slots_of(name, other, saved, header) for name, other in others.items()}
        for name, other in others.items():
            tensors |= _named(f"{name}.model", other.model) | _named(f"{name}.optim", slots_of[name])
        _check_fit(path, tensors, saved, header["scalars"])
    except Exception as error:
        first_error(error, group)  # the other ranks wait there
        raise
    if (line := first_error(None, group)) is not None:
        raise ValueError(line)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(str(path / "shards"))
            dcp.load(_with_dimension(tensors), storage_reader=reader, process_group=group)
    except CheckpointException as error:
        raise ValueError(f"{path}: {describe(error)}; use an older checkpoint") from error
    if optimizer is not None:
        optim_state.fill(optimizer, model, slots)
    for name, other in others.items():
        optim_state.fill(other.optimizer, other.model, slots_of[name])
    same_ranks = header["world_size"] == get_world_size(group)
    if same_ranks:
        rng.load(path / "rng" / f"rank_{get_rank(group):05d}.safetensors")
    else:
        rng.seed_all(seed, header["weight_version"], get_rank(group))
        if get_rank(group) == 0:
            log.warning(
                "%s was saved by %d ranks and is read by %d: random generators start anew from seed %d",
                *(path, header["world_size"], get_world_size(group), seed),
            )
    return LoadedCheckpoint(header["state"], header["weight_version"], header["world_size"], same_ranks)


def last_checkpoint(run_dir: str | os.PathLike[str]) -> Path | None:
    """The whole checkpoint of the highest step below `run_dir/checkpoints`, or None."""
    return max(_checkpoints(Path(run_dir)).items(), default=(0, None))[1]


def prune(run_dir: str | os.PathLike[str], keep: int) -> None:
    """Deletes all but the last `keep` checkpoints, and what a kill left half-written. Call it on rank 0, after a save."""
    found = _checkpoints(Path(run_dir))
    for step in sorted(found)[:-keep]:
        remove_folder(found[step])
    sweep_all(Path(run_dir) / "checkpoints")


def _checkpoints(run_dir: Path) -> dict[int, Path]:
    folder = run_dir / "checkpoints"
    recover_all(folder)
    named = {int(match[1]): path for path in folder.glob("step_*") if (match := re.fullmatch(r"step_(\d+)", path.name))}
    return {step: path for step, path in named.items() if (path / "state.json").is_file()}


def _named(kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{kind}.{name}": tensor.detach() for name, tensor in tensors.items()}


def _slots_of(
    name: str, other: Trained, saved: Mapping[str, TensorStorageMetadata], header: Mapping[str, Any]
) -> dict[str, Tensor]:
    """`optim_state.slots` of another trained model."""
    start = f"{name}."
    own = {full.removeprefix(start): stored for full, stored in saved.items() if full.startswith(start)}
    scalars = [full.removeprefix(start) for full in header["scalars"] if full.startswith(start)]
    return optim_state.slots(other.optimizer, other.model, own, scalars, header["others"][name])


def _with_dimension(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.reshape(1) if tensor.ndim == 0 else tensor for name, tensor in tensors.items()}


def _file_of_each(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which numbered file of a rank each name goes to: the same on every rank, about SHARD_FILE_BYTES a file."""
    files, index, filled = {}, 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if isinstance(tensor, DTensor):
            size //= math.prod(tensor.device_mesh.size(i) for i, place in enumerate(tensor.placements) if place.is_shard())
        if filled and filled + size > SHARD_FILE_BYTES:
            index, filled = index + 1, 0
        files[name] = index
        filled += size
    return files


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """`state.json` of a checkpoint whose files are all there, whole, and no pickle. Raises ValueError with one line."""
    path = Path(path)
    refuse_pickles(path)
    try:
        header = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} is not a whole checkpoint: state.json: {error.strerror}; use another step") from error
    except ValueError as error:
        raise ValueError(f"{path}/state.json is not JSON: {error}; use another step") from error
    try:
        _Header.model_validate(header)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise ValueError(f"{path}/state.json is not of checkpoint format {FORMAT}, which this version reads ({what})") from None
    found = _files(path)
    for name, size in header["files"].items():
        if found.get(name) != size:
            what = "missing" if name not in found else f"truncated: {found[name]} of {size} bytes"
            raise ValueError(f"{path}: {name} is {what}; use an older checkpoint")
    if strange := sorted(name for name in found.keys() - header["files"].keys() if name.endswith(".safetensors")):
        raise ValueError(f"{path} holds files that it was not saved with: {strange}; remove them")
    return header


def _files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def refuse_pickles(path: str | os.PathLike[str]) -> None:
    """Raises ValueError naming the first file below `path` that is or may be a pickle. Opens none of them as one."""
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file() and p.suffix != ".safetensors"):
        with file.open("rb") as stream:
            start = stream.read(4)
        if file.suffix in PICKLE_SUFFIXES or file.name in PICKLE_SUFFIXES or start.startswith(PICKLE_STARTS):
            raise ValueError(f"{file} is a pickle, which can run code when read; only safetensors and JSON are allowed there")


def _saved_tensors(path: Path, header: Mapping[str, Any]) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every stored tensor."""
    for name in header["files"]:
        if name.endswith(".safetensors"):
            try:
                with safe_open(path / name, framework="pt"):
                    pass
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path}: {name} cannot be read: {describe(error)}; use an older checkpoint") from error
    saved = HuggingFaceStorageReader(str(path / "shards")).read_metadata().state_dict_metadata
    return cast(dict[str, TensorStorageMetadata], saved)


def _check_fit(
    path: Path, wanted: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata], scalars: Collection[str]
) -> None:
    """One ValueError with both lists when names, shapes or dtypes differ."""
    kinds = {name.partition(".")[0] for name in wanted}
    offered = {name for name in saved if name.partition(".")[0] in kinds}
    missing, surplus = sorted(wanted.keys() - offered), sorted(offered - wanted.keys())
    if missing or surplus:
        raise ValueError(
            f"{path} does not fit: missing in it: {missing}; only in it: {surplus}; resume with the settings it was saved with"
        )
    differing = []
    for name, tensor in wanted.items():
        given = (() if name in scalars else tuple(saved[name].size), saved[name].properties.dtype)
        if given != (tuple(tensor.shape), tensor.dtype):
            differing.append(f"{name}: {_shape(*given)} in it, {_shape(tuple(tensor.shape), tensor.dtype)} here")
    if differing:
        raise ValueError(f"{path} does not fit: {'; '.join(differing)}; resume with the settings it was saved with")


def _shape(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
