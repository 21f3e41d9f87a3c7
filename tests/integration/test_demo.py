"""The demo as `make demo` runs it; `make test-slow` runs this."""

import subprocess
import sys

import pytest

from recipes.summary import evaluations


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_the_demo_brings_its_student_to_its_teacher(tmp_path, nproc):
    command = [sys.executable, "-m", "recipes.cli", "train", "recipes/opsd/demo.yaml", "--nproc", nproc, "output_dir=out"]
    subprocess.run(command, cwd=tmp_path, check=True)
    teacher = evaluations(tmp_path / "out" / "teacher")[-1]
    before, *_, after = evaluations(tmp_path / "out")
    assert teacher >= 0.95
    assert before < teacher / 2
    assert after >= teacher - 0.05
    for name in ("model/config.json", "teacher/model/config.json", "plots/eval.png"):
        assert (tmp_path / "out" / name).is_file()
