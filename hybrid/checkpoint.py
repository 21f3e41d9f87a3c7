"""Sharded checkpoints: each rank writes its own shards as safetensors, the rest is JSON; nothing is ever pickled.

step_N/
    state.json                  format, world size, weight version, the caller's JSON, sizes and checksums of all files
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
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from hybrid import rng
from hybrid.checkpoint_files import FORMAT, check_files, read_header, write_checksums, write_header
from hybrid.folders import recover, recover_all, remove_folder, sweep_all, write_folder
from hybrid.mesh import describe, first_error, get_rank, get_world_size
from hybrid.optim import state as optim_state

SHARD_FILE_BYTES = 32 * 2**20  # the storage serialises one file at a time in memory: this bounds what saving adds to the shards

log = logging.getLogger(__name__)


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
    rng_restored: bool  # False: the rank count differs, so the generators were seeded anew, or they were not asked for


@dataclass(frozen=True)
class Contents:
    """What one rank has to write: its tensors (its shards of DTensors), the header, its random generators."""

    tensors: dict[str, Tensor]
    header: dict[str, Any]
    generators: dict[str, Tensor]

    def on_host(self) -> Contents:
        """The same, in memory that nobody else writes to: training may go on meanwhile."""
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}
        return Contents(copies, self.header, self.generators)


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
    gathered = gather_contents(
        model=model, optimizer=optimizer, ema=ema, others=others, state=state, weight_version=weight_version, group=group
    )
    write_checkpoint(path, gathered, group=group)


def gather_contents(
    *,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    ema: Mapping[str, Tensor] | None = None,
    others: Mapping[str, Trained] = MappingProxyType({}),
    state: Mapping[str, Any] | None = None,
    weight_version: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Contents:
    """The first half of `save_checkpoint`: no collective, nothing is written, no tensor is copied."""
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
    return Contents(tensors, header, rng.capture())


def write_checkpoint(path: str | os.PathLike[str], contents: Contents, *, group: dist.ProcessGroup | None = None) -> None:
    """The other half. Collective over `group` only."""
    tensors, rank = contents.tensors, get_rank(group)

    def write(folder: Path) -> None:
        writer = _NotingWriter(str(folder / "shards"), _file_of_each(tensors), save_distributed=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(_with_dimension(tensors), storage_writer=writer, process_group=group)
        rng.save(folder / _generators_of(rank), contents.generators)
        write_checksums(folder, [_generators_of(rank), *(f"shards/{name}" for name in writer.written)], rank)

    write_folder(path, write, finish=lambda folder: write_header(folder, contents.header), group=group)


class _NotingWriter(HuggingFaceStorageWriter):
    """Knows which files this rank wrote."""

    written: tuple[str, ...] = ()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done = super().write_data(plan, planner)
        self.written = tuple(sorted({result.storage_data.relative_path for result in done.wait()}))
        return done


def _generators_of(rank: int) -> str:
    return f"rng/rank_{rank:05d}.safetensors"


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    model: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    ema: Mapping[str, Tensor] | None = None,
    others: Mapping[str, Trained] = MappingProxyType({}),
    state_keys: Collection[str] = (),
    check_state: Callable[[dict[str, Any]], None] = lambda state: None,
    may_lack: Callable[[dict[str, Any]], Collection[str]] = lambda state: (),
    strict: bool = True,
    restore_generators: bool = True,
    seed: int = 0,
    group: dist.ProcessGroup | None = None,
) -> LoadedCheckpoint:
    """Collective: fills the given tensors in place, at any rank count; a group that is not given (None) is not read.

    At the rank count of the save every generator is restored; at another, they are seeded from (seed, weight version, rank),
    which is said once; with restore_generators=False neither. Of `model`, names that `may_lack` gives for the checkpoint's state
    need not be in it, and with strict=False no name needs to be on both sides: what is there is read, the rest is said.

    Raises ValueError, the same on every rank and before any tensor changes, for a folder that is not a whole checkpoint, has a
    byte that differs from what was saved, holds a pickle, whose state lacks one of `state_keys` or is refused by `check_state`
    (with a ValueError), or whose names, shapes or dtypes do not fit.
    """
    path = Path(path)
    if get_rank(group) == 0:
        recover(path)
    first_error(None, group)  # a barrier: no rank looks before that
    with _agreed(group):
        header = read_header(path)
        check_files(path, header, rank=get_rank(group), ranks=get_world_size(group))
    with _agreed(group):
        if lacking := sorted(set(state_keys) - header["state"].keys()):
            raise ValueError(f"{path}: its state lacks {lacking}; it was saved by something else")
        check_state(header["state"])
        saved = _saved_tensors(path, header)
        model_there = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
        optional = model.keys() if not strict else may_lack(header["state"])
        slots = {} if optimizer is None else optim_state.slots(optimizer, model, saved, header["scalars"], header["optimizer"])
        wanted = {name: tensor for name, tensor in model.items() if name in model_there or name not in optional}
        tensors = _named("model", wanted) | _named("optim", slots) | _named("ema", ema or {})
        if lacking := sorted(others.keys() - header.get("others", {}).keys()):
            raise ValueError(f"{path} holds no {', '.join(lacking)} beside the policy; resume with the recipe that saved it")
        slots_of = {name: _slots_of(name, other, saved, header) for name, other in others.items()}
        for name, other in others.items():
            tensors |= _named(f"{name}.model", other.model) | _named(f"{name}.optim", slots_of[name])
        surplus = set() if strict else {f"model.{name}" for name in model_there - model.keys()}
        _check_fit(path, tensors, {name: held for name, held in saved.items() if name not in surplus}, header["scalars"])
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
    if not strict and (surplus or wanted.keys() != model.keys()) and get_rank(group) == 0:
        log.warning("%s: not in it, and kept: %s; only in it: %s", path, sorted(model.keys() - wanted.keys()), sorted(surplus))
    same_ranks = restore_generators and header["world_size"] == get_world_size(group)
    if same_ranks:
        rng.load(path / _generators_of(get_rank(group)))
    elif restore_generators:
        rng.seed_all(seed, header["weight_version"], get_rank(group))
        if get_rank(group) == 0:
            log.warning(
                "%s was saved by %d ranks and is read by %d: random generators start anew from seed %d",
                *(path, header["world_size"], get_world_size(group), seed),
            )
    return LoadedCheckpoint(header["state"], header["weight_version"], header["world_size"], same_ranks)


@contextmanager
def _agreed(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Collective at the end: an exception inside on any rank is one on every rank."""
    try:
        yield
    except Exception as error:
        first_error(error, group)  # the other ranks wait there
        raise
    if (line := first_error(None, group)) is not None:
        raise ValueError(line)


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
