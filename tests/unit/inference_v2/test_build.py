"""The compiled kernels: built once, never loaded from what others can write, and a clear word where they cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference_v2 import kernels
from inference_v2.kernels import REFERENCE, get_kernels
from inference_v2.kernels.cpu import BuildError, build

FOUR = 'extern "C" int four() { return 4; }\n'


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A small library in the place of the kernels, an empty cache, and a compiler that keeps a record of its builds."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "four.cpp").write_text(FOUR)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo build >> {tmp_path}/builds\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "HERE", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    return folder


def num_builds(sources: Path) -> int:
    record = sources.parent / "builds"
    return len(record.read_text().splitlines()) if record.exists() else 0


def load(march: str = "native"):
    return build.library.__wrapped__(march)


def test_a_library_is_built_once_and_again_when_a_source_changes(sources):
    assert load().four() == load().four() == 4
    assert num_builds(sources) == 1
    (sources / "four.cpp").write_text(FOUR.replace("4", "5"))
    assert load().four() == 5
    assert num_builds(sources) == 2


def test_processes_that_start_together_build_once(sources):
    code = (
        "import pathlib, sys\nfrom inference_v2.kernels.cpu import build\n"
        "build.HERE = pathlib.Path(sys.argv[1])\nprint(build.library().four())"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(sources)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in started] == ["4"] * 3
    assert num_builds(sources) == 1


def test_a_library_built_under_an_open_umask_is_ours_alone(sources):
    before = os.umask(0o002)
    try:
        assert load().four() == load().four() == 4
    finally:
        os.umask(before)


def test_a_cache_that_cannot_be_used_is_a_build_error(sources, monkeypatch):
    monkeypatch.setattr(build.ctypes, "CDLL", lambda path: (_ for _ in ()).throw(OSError("failed to map segment")))
    with pytest.raises(BuildError, match="failed to map segment; set XDG_CACHE_HOME"):
        load()


def test_what_others_can_write_is_not_loaded(sources):
    load()
    (library,) = (sources.parent / "cache").glob("hybrid/*.so")
    library.chmod(0o777)
    with pytest.raises(BuildError, match="can be written by, somebody else"):
        load()
    library.chmod(0o755)
    library.parent.chmod(0o777)
    with pytest.raises(BuildError, match="can be written by, somebody else"):
        load()


@pytest.mark.parametrize(
    ("compiler", "says"), [(None, r"no g\+\+ was found"), ("/bin/false", "/bin/false failed"), ("/nothing/g++", "No such file")]
)
def test_without_a_compiler_the_reference_runs_and_the_reason_is_said(sources, monkeypatch, caplog, compiler, says):
    if compiler is None:
        monkeypatch.delenv("CXX")
        monkeypatch.setenv("PATH", os.devnull)
    else:
        monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildError, match=says):
        load()
    monkeypatch.setattr(kernels, "cpu_kernels", lambda **_: load())
    kernels._say_once.cache_clear()
    assert get_kernels("auto", "cpu", torch.bfloat16) is REFERENCE
    assert get_kernels("auto", "cpu", torch.bfloat16) is REFERENCE
    assert sum("slow reference kernels" in record.message for record in caplog.records) == 1
    with pytest.raises(ValueError, match=f"kernels=cpu: .*{says}.*or use kernels=reference"):
        get_kernels("cpu")


def test_sources_that_do_not_compile_are_one_line_and_leave_nothing(sources):
    (sources / "four.cpp").write_text("this is not C++\n")
    with pytest.raises(BuildError) as error:
        load()
    assert len(str(error.value).splitlines()) == 1
    assert "error" in str(error.value)
    assert not list((sources.parent / "cache").glob("hybrid/*.so"))
