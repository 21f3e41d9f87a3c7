"""The checkpoint verbs of TrainingEngine: DeepSpeed's meaning, on this project's folders.

SAVE_DIR/
    latest          the tag of the last save, written when its folder is whole
    TAG/            a checkpoint as in hybrid.checkpoint: safetensors and JSON, at any rank count and ZeRO stage
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from hybrid import checkpoint
from hybrid.folders import FolderError, others, recover, replace_text
from hybrid.mesh import describe, first_error, gather_texts, get_rank, raise_together
from hybrid.training import engine_state, hf_folder, universal
from hybrid.training.json_values import decode, encode

if TYPE_CHECKING:
    from hybrid.training.engine import TrainingEngine

LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
Directory = str | os.PathLike[str] | None

log = logging.getLogger(__name__)


def save_checkpoint(
    engine: TrainingEngine,
    save_dir: Directory,
    tag: str | int | None,
    client_state: Mapping[str, Any] | None,
    save_latest: bool,
    exclude_frozen_parameters: bool,
) -> bool:
    """See TrainingEngine.save_checkpoint."""
    error: ValueError | None = None
    try:
        name = _tag(f"global_step{engine.global_steps}" if tag is None else tag)
        folder = _directory(save_dir, "save_dir") / name
        if foreign := others(folder, marker="state.json", owns=lambda entry: True):
            raise ValueError(f"{folder} exists and is no checkpoint ({', '.join(foreign[:3])}); give another tag")
        _check_no_gradients(engine)
    except ValueError as caught:
        error = caught
    except OSError as caught:  # the folder cannot be looked into
        error = ValueError(describe(caught))
    raise_together(error)
    engine.stored_weights()
    try:
        state = {
            "engine": engine_state.capture(engine, without_frozen=exclude_frozen_parameters),
            "client": encode(_mapping(client_state), "client_state"),
        }
        contents = checkpoint.gather_contents(
            model=engine_state.named_tensors(engine, exclude_frozen=exclude_frozen_parameters),
            optimizer=engine.optimizer,
            state=state,
            weight_version=engine.global_steps,
        )
    except ValueError as caught:
        error = caught
    raise_together(error)
    name = _same_tag(engine, folder)
    folder = folder.parent / name
    engine.wait_for_checkpoint()

    def write(group: dist.ProcessGroup | None) -> None:
        checkpoint.write_checkpoint(folder, contents, group=group)
        if save_latest:
            _point_to(folder, group)

    if engine.config.checkpoint.async_save:
        contents = contents.on_host()
        engine._background.start(write, f"saving {folder}")
    else:
        write(None)
    return True


def load_checkpoint(
    engine: TrainingEngine,
    load_dir: Directory,
    tag: str | int | None,
    load_module_strict: bool,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
) -> tuple[str | None, dict[str, Any]]:
    """See TrainingEngine.load_checkpoint."""
    error: ValueError | None = None
    try:
        folder = _directory(load_dir, "load_dir") / ("" if tag is None else _tag(tag))
    except ValueError as caught:
        error = caught
    raise_together(error)
    if tag is not None:
        folder = folder.parent / _same_tag(engine, folder)
    engine.wait_for_checkpoint()
    found = _find(engine, folder, tagged=tag is not None)
    if found is None:
        return None, {}
    engine.free_gathered()
    engine._update.take()  # what is not in the checkpoint stays as the caller has made it
    with_optimizer = load_optimizer_states and not load_module_only and engine.optimizer is not None
    client: dict[str, Any] = {}
    with engine_state.unchanged_on_error(engine):
        if engine.config.checkpoint.load_universal:
            universal.load(engine, found, strict=load_module_strict, optimizer=with_optimizer)
        elif hf_folder.is_one(found):
            hf_folder.load(engine, found, strict=load_module_strict)
        else:
            schedule = load_lr_scheduler_states and not load_module_only
            client = _load(engine, found, load_module_strict, with_optimizer, schedule, load_module_only)
    engine.weights_were_loaded()
    return str(found), client


def _load(
    engine: TrainingEngine, folder: Path, strict: bool, optimizer: bool, schedule: bool, module_only: bool
) -> dict[str, Any]:
    """One of ours; the client's state."""

    def restore(state: dict[str, Any]) -> None:
        if not module_only:
            engine_state.restore(engine, state["engine"], optimizer=optimizer, schedule=schedule)

    loaded = checkpoint.load_checkpoint(
        folder,
        model=engine_state.named_tensors(engine),
        optimizer=engine.optimizer if optimizer else None,
        state_keys=("engine", "client"),
        check_state=restore,
        may_lack=lambda state: engine_state.frozen(engine) if state["engine"]["without_frozen"] else (),
        strict=strict,
        restore_generators=not module_only,
        seed=engine.config.seed,
    )
    if not module_only:
        engine_state.finish(engine, loaded.state["engine"], optimizer=optimizer)
    client = decode(loaded.state["client"])
    assert isinstance(client, dict)
    return client


def _directory(given: Directory, what: str) -> Path:
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ValueError(f"{what}={given!r}; allowed: the path of a folder")
    return Path(given)


def _mapping(client_state: Mapping[str, Any] | None) -> dict[str, Any]:
    if client_state is not None and not isinstance(client_state, Mapping):
        raise ValueError(f"client_state is a {type(client_state).__name__}; allowed: a dict")
    return dict(client_state or {})


def _tag(given: str | int) -> str:
    tag = str(given)
    if isinstance(given, bool) or not isinstance(given, str | int) or not tag or tag.startswith(".") or {*tag} & {*"/\\\n\0"}:
        raise ValueError(f"tag={given!r}; allowed: one folder's name that does not start with a dot")
    if tag in (LATEST, LATEST_UNIVERSAL):
        raise ValueError(f"tag={given!r} is the file that names the last tag; give another")
    return tag


def _check_no_gradients(engine: TrainingEngine) -> None:
    if engine._waiting:
        raise ValueError(
            "gradients wait for the rest of their step, and no checkpoint holds gradients; save after the step() that uses them, "
            "or drop them with discard_gradients()"
        )


def _same_tag(engine: TrainingEngine, folder: Path) -> str:
    """Collective: the tag that all ranks use, rank 0's. Raises ValueError on all where the directories differ, or the tags and
    `checkpoint.tag_validation` is Fail."""
    given: list[tuple[str, str]] = [tuple(json.loads(t)) for t in gather_texts(json.dumps([str(folder.parent), folder.name]))]
    if len(directories := sorted({directory for directory, _ in given})) > 1:
        raise ValueError(f"ranks give different directories: {', '.join(directories)}; allowed: one that all ranks see")
    tags = [tag for _, tag in given]
    if len({*tags}) > 1:
        how = engine.config.checkpoint.tag_validation
        if how == "fail":
            raise ValueError(f"ranks give different tags: {', '.join(sorted({*tags}))}; give the same on all")
        if how == "warn" and engine.mesh.rank == 0:
            engine._log.warning("ranks give different tags (%s); rank 0's is used: %s", ", ".join(sorted({*tags})), tags[0])
    return tags[0]


def _point_to(folder: Path, group: dist.ProcessGroup | None) -> None:
    """Collective: `latest` names the folder."""
    error: OSError | None = None
    if get_rank(group) == 0:
        try:
            replace_text(folder.parent / LATEST, folder.name)
        except OSError as caught:
            error = caught
    if (line := first_error(error, group)) is not None:
        raise FolderError(f"could not write {folder.parent / LATEST}: {line}") from error


def _find(engine: TrainingEngine, folder: Path, *, tagged: bool) -> Path | None:
    """Collective: the folder to load, as rank 0 sees it; None, with a warning, where no `latest` names one."""
    universal_asked = engine.config.checkpoint.load_universal
    error: ValueError | None = None
    found = ""
    if engine.mesh.rank == 0:
        latest = folder / (LATEST_UNIVERSAL if universal_asked else LATEST)
        try:
            if tagged:
                found = str(folder)
            elif latest.is_file():
                found = str(folder / _tag(latest.read_text(encoding="utf-8").strip()))
            elif hf_folder.is_one(folder):
                found = str(folder)
            if found:
                recover(found)
        except (OSError, ValueError) as caught:
            error = ValueError(f"{latest}: {caught}; give a tag")
    raise_together(error)
    found = gather_texts(found)[0]
    if not found and engine.mesh.rank == 0:
        engine._log.warning(
            "%s has no file `%s`: nothing is loaded; give the folder that was saved to, or a tag",
            *(folder, LATEST_UNIVERSAL if universal_asked else LATEST),
        )
    return Path(found) if found else None
