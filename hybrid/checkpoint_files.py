"""What lies in a checkpoint's folder, checked: `state.json`, sizes and checksums of all files, and no pickle.

Format 2 has a checksum of every file (128 bits of XXH3, https://xxhash.com: a test against accidents, not against malice) and
one of `state.json` itself. Format 1 has sizes only, and still loads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

FORMAT = 2
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp", ".metadata")
PICKLE_STARTS = (b"PK\x03\x04", *(b"\x80" + bytes([protocol]) for protocol in range(2, 6)))
_READ_BYTES = 2**22  # at a time, by a checksum
_SUMS = "checksums-"  # each rank's, until rank 0 has put them into state.json


class _Header(BaseModel):
    """What `state.json` holds."""

    model_config = ConfigDict(strict=True)

    format: Literal[1, 2]
    world_size: int
    weight_version: int
    optimizer: dict[str, str | list[str]]  # see optim_state.header
    others: dict[str, dict[str, str | list[str]]] = {}  # the same of each other trained model
    scalars: list[str]
    state: dict[str, Any]
    files: dict[str, int]  # sizes
    checksums: dict[str, str] = {}  # of the same files
    checksum: str = ""  # of the rest of state.json


def checksum(path: str | os.PathLike[str]) -> str:
    """Of a file's bytes."""
    found = xxhash.xxh3_128()
    with Path(path).open("rb") as file:
        while piece := file.read(_READ_BYTES):
            found.update(piece)
    return found.hexdigest()


def write_checksums(folder: Path, names: list[str], rank: int) -> None:
    """Note the checksums of the files that this rank wrote, for `write_header`."""
    sums = {name: checksum(folder / name) for name in names}
    (folder / f"{_SUMS}{rank:05d}.json").write_text(json.dumps(sums), encoding="utf-8")


def write_header(folder: Path, header: Mapping[str, Any]) -> None:
    """`state.json`, once every rank has written its files and noted their checksums."""
    sums: dict[str, str] = {}
    for noted in sorted(folder.glob(f"{_SUMS}*.json")):
        sums |= json.loads(noted.read_text(encoding="utf-8"))
        noted.unlink()
    files = _files(folder)
    assert sums.keys() == files.keys(), sums.keys() ^ files.keys()
    whole = {**header, "files": files, "checksums": sums}
    text = json.dumps(whole | {"checksum": _own_checksum(whole)}, indent=1)
    (folder / "state.json").write_text(text, encoding="utf-8")


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """`state.json` of a checkpoint whose files are all there, of their sizes, and no pickle. Raises ValueError with one line."""
    path = Path(path)
    refuse_pickles(path)
    try:
        header = json.loads((path / "state.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} is not a whole checkpoint: state.json: {error.strerror}; use another step") from error
    except ValueError as error:
        raise ValueError(f"{path}/state.json is not JSON: {error}; use another step") from error
    try:
        checked = _Header.model_validate(header)
    except ValidationError as error:
        what = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3])
        raise ValueError(
            f"{path}/state.json is not of checkpoint format 1 or {FORMAT}, which this version reads ({what})"
        ) from None
    if checked.format > 1 and checked.checksum != _own_checksum(header):
        raise ValueError(f"{path}/state.json is damaged: its checksum differs; use an older checkpoint")
    found = _files(path)
    for name, size in checked.files.items():
        if found.get(name) != size:
            what = "missing" if name not in found else f"truncated: {found[name]} of {size} bytes"
            raise ValueError(f"{path}: {name} is {what}; use an older checkpoint")
    if strange := sorted(name for name in found.keys() - checked.files.keys() if name.endswith(".safetensors")):
        raise ValueError(f"{path} holds files that it was not saved with: {strange}; remove them")
    return header


def check_files(path: Path, header: Mapping[str, Any], *, rank: int, ranks: int) -> None:
    """Reads this rank's share of the files. Raises ValueError that names one whose bytes are not those that were saved."""
    sums = header.get("checksums", {})
    for name in sorted(sums)[rank::ranks]:
        try:
            same = checksum(path / name) == sums[name]
        except OSError as error:
            raise ValueError(f"{path}: {name} cannot be read: {error.strerror}; use an older checkpoint") from error
        if not same:
            raise ValueError(f"{path}: {name} is damaged: its checksum differs; use an older checkpoint")


def refuse_pickles(path: str | os.PathLike[str]) -> None:
    """Raises ValueError naming the first file below `path` that is or may be a pickle. Opens none of them as one."""
    for file in sorted(p for p in Path(path).rglob("*") if p.is_file() and p.suffix != ".safetensors"):
        with file.open("rb") as stream:
            start = stream.read(4)
        if file.suffix in PICKLE_SUFFIXES or file.name in PICKLE_SUFFIXES or start.startswith(PICKLE_STARTS):
            raise ValueError(f"{file} is a pickle, which can run code when read; only safetensors and JSON are allowed there")


def _own_checksum(header: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in header.items() if key != "checksum"}
    return xxhash.xxh3_128(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
