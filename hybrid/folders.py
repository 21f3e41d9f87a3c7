"""Folders that are there whole or not at all: written beside their place, agreed on by all ranks, synced, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hybrid.mesh import first_error, get_rank

PARTIAL = ".hybrid-partial"  # being written; left behind by a kill
REPLACED = ".hybrid-replaced"  # the old folder of the same name, until the new one stands
DELETED = ".hybrid-deleted"  # on its way out


class FolderError(OSError):
    """A folder could not be written; raised on every rank, with the same message. What stood there before still stands."""


def others(path: Path, *, marker: str, owns: Callable[[Path], bool]) -> list[str]:
    """Names below `path` by which it is not a folder that may be replaced: entries that are not ours, or all of them where the
    file `marker` is not among them. A path that is new or empty has none."""
    if not path.exists():
        return []
    entries = sorted(path.iterdir()) if path.is_dir() else [path]
    foreign = [entry.name for entry in entries if not owns(entry)]
    names = [entry.name for entry in entries]
    return foreign or ([] if marker in names else names)


def write_folder(
    path: str | os.PathLike[str],
    write: Callable[[Path], None],
    *,
    finish: Callable[[Path], None] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Collective: makes the folder `path` out of what `write(temporary folder)` writes on every rank.

    `finish(temporary folder)` runs on rank 0 after all ranks have written. Then the folder is synced and renamed; one that
    stands at `path` is replaced. Collectives inside `write` must be entered by every rank or fail on every rank.
    Raises FolderError on every rank when any of them fails; the temporary folder is gone then, and `path` is as before.
    """
    path = Path(path).absolute()
    partial = path.with_name(f".{path.name}{PARTIAL}")

    def prepare() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path)
        partial.mkdir()

    def publish() -> None:
        if finish is not None:
            finish(partial)
        sync_tree(partial)
        _swap_in(partial, path)

    steps = ((prepare, True), (lambda: write(partial), False), (publish, True))
    for step, only_rank_0 in steps:
        error: BaseException | None = None
        if not only_rank_0 or get_rank(group) == 0:
            try:
                step()
            except (Exception, CheckpointException) as caught:  # whatever it is: the other ranks must hear of it
                error = caught
        if (line := first_error(error, group)) is not None:
            if get_rank(group) == 0:
                shutil.rmtree(partial, ignore_errors=True)
                recover(path)
            raise FolderError(f"could not write {path}: {line}") from error


def _swap_in(partial: Path, path: Path) -> None:
    replaced = path.with_name(f".{path.name}{REPLACED}")
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _sync_folder(path.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def recover(path: str | os.PathLike[str]) -> None:
    """Puts an old folder back whose replacement was cut off by a kill between two renames."""
    path = Path(path).absolute()
    replaced = path.with_name(f".{path.name}{REPLACED}")
    if replaced.exists() and not path.exists():
        replaced.rename(path)


def recover_all(parent: Path) -> None:
    for left in parent.glob(f".*{REPLACED}"):
        recover(parent / left.name[1 : -len(REPLACED)])


def sweep(path: Path) -> None:
    """Removes what a kill left of the folder `path`, half-written and half-deleted."""
    recover(path)
    for suffix in (PARTIAL, REPLACED, DELETED):
        if (left := path.with_name(f".{path.name}{suffix}")).exists():
            shutil.rmtree(left)


def sweep_all(parent: Path) -> None:
    """The same for every folder in `parent`. Only for the run that owns `parent`: another may be writing there."""
    for suffix in (PARTIAL, REPLACED, DELETED):
        for left in parent.glob(f".*{suffix}"):
            sweep(parent / left.name[1 : -len(suffix)])


def remove_folder(path: Path) -> None:
    """Deletes a folder so that no half of it is ever seen under its name."""
    deleted = path.with_name(f".{path.name}{DELETED}")
    path.rename(deleted)
    shutil.rmtree(deleted)


def replace_text(path: Path, text: str) -> None:
    """A small file, with the old text or the new one at any moment, and on the disk when this returns."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    partial.write_text(text, encoding="utf-8")
    replace_file(partial, path)


def replace_file(partial: Path, path: Path) -> None:
    """A file written beside its place takes it, at once and on the disk."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Everything below `folder` is on the disk when this returns."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(os.path.join(root, name), "rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
