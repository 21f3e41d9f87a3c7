"""Which models are there, who is the same as whom, and dropout."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid.models import SCALAR_HEAD, check_weights
from recipes.doctor.case import Case, Role
from recipes.doctor.finding import Finding, Level
from recipes.doctor.memory import ModelShape, read_headers, sizes
from recipes.preflight import check_files
from trainers.config import OPSDConfig, RewardRecipe, SelfTeacher, SFTConfig

PIECES, PIECE_BYTES = 64, 64 * 1024  # of each weight file, read to tell files of one size apart
UNUSED_DROPOUT = ("summary_", "classifier_")  # of heads that a language model has not


def files(case: Case) -> Iterator[Finding]:
    """What `hybrid train` looks for before anything is opened."""
    check_files(case.config)
    yield Finding("files", f"data and model folders are there; the run is written to {case.config.output_dir}")
    for folder in case.parts:
        if not Path(folder, "model", "config.json").is_file():
            yield Finding("files", f"{folder}/model is trained first; what it starts from stands for it below")


def models(case: Case) -> Iterator[Finding]:
    """Each model opened."""
    for names, role in case.shared():
        try:
            loaded, shape = case.load(role), case.shape(role)
        except (ValueError, OSError) as error:
            yield Finding("models", f"{names} ({role.key}): {' '.join(str(error).split())}", "FAIL")
            continue
        if role is case.policy and loaded.tokenizer is None:
            yield Finding("models", f"{role}: no tokenizer, which training data needs", "FAIL", "set model.tokenizer")
        found = f"{names}: {loaded.hf_config.model_type} of {role} ({role.key})"
        given = read_headers(loaded.path)
        try:
            check_weights(loaded, case.settings(role), scalar=role.scalar)
        except ValueError as error:
            yield Finding("models", f"{found}: {error}", "FAIL", "fetch config.json and weights from one place")
            continue
        if misfits := _misfits(role, shape, given):
            remedy = "config.json and the weights are of two models: fetch both from one place"
            if role.name.startswith("reward") and SCALAR_HEAD in misfits[0]:
                remedy = "allowed: a reward model, one label; recipe: reward makes one"
            yield Finding("models", f"{found}: {'; '.join(misfits[:3])}", "FAIL", remedy)
            continue
        dtypes = ", ".join(sorted({dtype for dtype, _ in given.values()}))
        yield Finding("models", f"{found}, {sizes(shape.parameters) / 1e6:.3g}M parameters, stored in {dtypes}")


def _misfits(role: Role, shape: ModelShape, given: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Weights that the files have in another shape than config.json says, and the head of a reward model that is to judge; any
    other scalar model's starts at 0. A base model's files lack the first part of its names."""
    found = []
    for parameter in shape.parameters:
        name = parameter.name
        _, stored = given.get(name) or given.get(name.partition(".")[2]) or ("", None)
        if stored is None:
            if name == SCALAR_HEAD and role.name.startswith("reward") and role.stands_for is None:
                found.append(f"{name} is missing")
        elif stored != parameter.shape:
            found.append(f"{name} is {list(stored)} in the files, {list(parameter.shape)} by config.json")
    return found


def same_weights(case: Case) -> Iterator[Finding]:
    """A teacher that is the student, or a reward model that is the policy, teaches nothing."""
    policy, teacher = case.policy, case.role("teacher")
    if teacher is not None:
        yield from _teacher(case, policy, teacher)
    for role in case.roles:
        if role.name.startswith("reward"):
            same = _same(case, policy, role)
            remedy = "a reward model judges the policy and is no copy of it: train one with recipe: reward"
            found = f"{role.name}: {'the same weights as the policy' if same else 'other weights than the policy'} ({role})"
            yield Finding("weights", found, "FAIL" if same else "ok", remedy if same else "")
        elif role.name == "reference":
            same = _same(case, policy, role)
            yield Finding("weights", f"reference: {'what the policy starts from' if same else 'other weights'} ({role})")


def _teacher(case: Case, policy: Role, teacher: Role) -> Iterator[Finding]:
    prompts = case.prompts.prompts
    privileged = sum(p.privileged_ids not in (None, p.ids) for p in prompts)
    context = f"{privileged} of {len(prompts)} rows have a privileged prompt"
    same, config = _same(case, policy, teacher), getattr(case.config, "teacher", None)
    live = isinstance(config, SelfTeacher) and config.weights == "live"
    found = f"teacher: {'the same weights as the student' if same else 'other weights than the student'}; {context}"
    remedy = "give it more to see (data.privileged_column, data.privileged_template), or another teacher"
    if not same or privileged == len(prompts):
        yield Finding("weights", found)
    elif privileged == 0 and (live or isinstance(case.config, OPSDConfig)):
        yield Finding("weights", f"{found}: it says what the student says, so that there is nothing to learn", "FAIL", remedy)
    elif privileged == 0:
        yield Finding("weights", f"{found}: it only pulls the policy back to its start, as a reference does", "warn", remedy)
    else:
        level: Level = "FAIL" if isinstance(config, SelfTeacher) and isinstance(case.config, OPSDConfig) else "warn"
        yield Finding("weights", f"{found}: the other {len(prompts) - privileged} teach nothing", level, remedy)


def _same(case: Case, a: Role, b: Role) -> bool:
    """By folder, or by the files' sizes and pieces of their bytes. What is still to be trained is itself only."""
    if a.starts_as(b):
        return True
    if a.stands_for or b.stands_for:
        return False
    paths = case.model(a).path, case.model(b).path
    return paths[0].samefile(paths[1]) or fingerprint(paths[0]) == fingerprint(paths[1])


def fingerprint(folder: Path) -> list[tuple[int, str]]:
    """Of each weight file its size and a hash of PIECES pieces, spread over it."""
    found = []
    for file in sorted(folder.glob("*.safetensors")):
        size, digest = file.stat().st_size, hashlib.sha256()
        with file.open("rb") as stream:
            for i in range(PIECES):
                stream.seek(i * max(size - PIECE_BYTES, 0) // (PIECES - 1))
                digest.update(stream.read(PIECE_BYTES))
        found.append((size, digest.hexdigest()))
    return found


def dropout(case: Case) -> Iterator[Finding]:
    """The checkpoint's dropout, and whether training keeps it."""
    keeps, config = case.config.engine.dropout, case.config
    given_only = isinstance(config, SFTConfig | RewardRecipe)
    for role, loaded in case.models():
        if role.name not in ("policy", "critic"):
            continue
        rates = dropout_rates(loaded.hf_config.get_text_config())
        has = ", ".join(f"{key}={rate:g}" for key, rate in rates.items()) or "none in config.json"
        found = f"{role.name}: {has}; engine.dropout={str(keeps).lower()}"
        if not rates:
            yield Finding("dropout", f"{found}: nothing to keep" if keeps else found)
        elif keeps and given_only:
            yield Finding("dropout", f"{found}: kept in training, off in evaluations")
        elif keeps:
            stops = config.certificate.action == "stop"
            what = "rollouts have none, so log-probs of training differ from theirs"
            yield Finding("dropout", f"{found}: {what}{' and the certificate stops the run' if stops else ''}",
                          "FAIL" if stops else "warn", "set engine.dropout=false")  # fmt: skip
        else:
            yield Finding("dropout", f"{found}: it is off in every forward")


def dropout_rates(text_config: Any) -> dict[str, float]:
    """Every rate above 0."""
    settings = text_config.to_dict()
    return {
        key: float(value)
        for key, value in settings.items()
        if "drop" in key
        and not key.startswith(UNUSED_DROPOUT)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and value > 0
    }
