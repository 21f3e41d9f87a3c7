"""Compiles the C++ kernels on first use and keeps the library in the user's cache.

The sources need no header of torch, so a build takes seconds and any torch can load it. Their threads are their own (team.h);
how many there may be they ask of OpenMP, whose runtime torch brings under the same name: `torch.set_num_threads` holds for both.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)
HERE = Path(__file__).parent
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-Wno-psabi")


class BuildError(RuntimeError):
    """Why there is no library; one line."""


@functools.cache
def library(march: str = "native") -> ctypes.CDLL:
    """The compiled kernels for this CPU, or for another `march`, as gcc names it. Raises BuildError."""
    try:
        return _library(march)
    except OSError as error:  # a cache that cannot be locked or run from, a full disk
        raise BuildError(f"no library of compiled kernels: {error}; set XDG_CACHE_HOME to a folder of yours") from None


def _library(march: str) -> ctypes.CDLL:
    compiler = shlex.split(os.environ.get("CXX") or shutil.which("g++") or "")
    if not compiler:
        raise BuildError("no g++ was found; install one (apt-get install g++), or set CXX")
    flags = (*FLAGS, *(f"-m{part}" if part.startswith("no-") else f"-march={part}" for part in march.split(",")))
    sources = sorted(HERE.glob("*.cpp"))
    path = _cache() / f"{_key([*sources, *sorted(HERE.glob('*.h'))], compiler, flags)}.so"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks start together, and one of them builds
        if not path.exists():
            _compile(compiler, flags, sources, path)
    _require_ours(path)
    return ctypes.CDLL(str(path))


def _compile(compiler: Sequence[str], flags: Sequence[str], sources: Sequence[Path], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [*compiler, *flags, "-o", str(built), *map(str, sources)]
        done = _run(command)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise BuildError(f"{compiler[0]} failed: {first}")
        log.info("built the CPU kernels into %s", path)
        built.chmod(0o700)  # whatever the umask: what others can write is not loaded
        os.replace(built, path)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from None


def _key(files: Sequence[Path], compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Of everything that the machine code depends on."""
    version = _run([*compiler, "--version"]).stdout.partition("\n")[0]
    digest = hashlib.sha256()
    for part in (
        *(file.read_bytes() for file in files),
        version.encode(),
        repr((flags, platform.libc_ver())).encode(),
        _cpu().encode(),
    ):
        digest.update(hashlib.sha256(part).digest())
    return f"kernels-{digest.hexdigest()[:24]}"


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("flags", "Features", "model name", "model\t", "cpu family")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


def _cache() -> Path:
    """A folder that is only ours to write: code is loaded from it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(base) / "hybrid"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_ours(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except OSError as error:
        raise BuildError(f"no cache for compiled kernels: {error}; set XDG_CACHE_HOME to a folder of yours") from None
    return folder


def _require_ours(path: Path) -> None:
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BuildError(f"{path} belongs to, or can be written by, somebody else; remove it")
