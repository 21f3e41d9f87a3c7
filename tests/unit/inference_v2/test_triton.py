"""The Triton kernels where there is no GPU: through the interpreter, compiled for GPUs that are not here, and
what is said where they cannot run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference_v2.kernels import REFERENCE, get_kernels, triton_kernels
from inference_v2.kernels import triton as backend_package

TESTS = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: pip install triton",
)


def run_python(code: str, *arguments: str) -> str:
    """In a process of its own: whether triton interprets or compiles is settled at its import."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"} | {"PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=TESTS.parent, env=environment, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@needs_triton
@pytest.mark.timeout(900)
def test_the_interpreted_kernels_pass_the_tests_of_every_backend() -> None:
    code = "import sys, triton_interpreter, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    output = run_python(code, "-p", "no:cacheprovider", "--timeout=900", "tests/unit/inference_v2/test_kernels.py")
    assert " passed" in output


COMPILE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from inference_v2.kernels.triton import backend

class Offline:
    get_current_target = lambda self: GPUTarget("cuda", int(sys.argv[1]), 32)
    get_current_device = get_current_stream = lambda self, *device: 0

def compile_only(kernel, grid, *arguments, **constants):
    found = kernel.run(*arguments, grid=grid, warmup=True, **constants)
    assert found.asm["cubin"] and found.metadata.shared <= 96 * 1024, (kernel, found.metadata)
    names.append(found.metadata.name)

names = []
driver.set_active(Offline())
backend._launch = compile_only
kernels = backend.TritonKernels(torch.device("cpu"))
counts = lambda n: torch.zeros(n, dtype=torch.int32)
for dtype, heads, kv_heads, dim in ((torch.bfloat16, 9, 3, 64), (torch.float32, 14, 2, 80)):
    x, norm, longs = torch.ones(4, 576, dtype=dtype), torch.ones(dim, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    kernels.rms_norm(x, x[0], 1e-5), kernels.add_rms_norm(x, x, x[0], 1e-5), kernels.silu_and_mul(x)
    pool, qkv = torch.zeros(2, 9, 16, kv_heads, dim, dtype=dtype), torch.zeros(4, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    table = (torch.zeros(9, dim // 2, dtype=dtype),) * 2
    for extra in ((), (table,), (table, norm, norm, 1e-5)):
        kernels.enter_attention(q, k, v, *pool, longs, longs, *extra)
    for requests, width, features in (
        (4, 512, {}), (1, 512, {}), (2, 64, {}), (4, 9, {"window": 9, "softcap": 2.0, "sinks": torch.zeros(heads)})
    ):
        lens = (counts(requests + 1), counts(requests), torch.zeros(requests, width, dtype=torch.int32))
        kernels.paged_attention(q[: 1 if requests == 1 else 4], *pool, *lens, 1.0, **features)
logits, wide = torch.zeros(4, 49152), torch.zeros(4, dtype=torch.float64)
kernels.sample(logits, logits + 1, torch.ones(4), wide, wide.long(), wide, wide)
print(*sorted(set(names)))
"""


@needs_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_every_kernel_compiles_to_machine_code_that_fits(architecture: str) -> None:
    names = run_python(COMPILE, architecture).split()
    assert names == ["attend", "draw", "draw_truncated", "enter_attention", "masses", "merge", "rms_norm", "silu_and_mul"]


def test_triton_asked_for_by_name_says_why_it_cannot_run(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"kernels=triton: device=cpu; allowed: device cuda, or cpu under TRITON_INTERPRET=1"):
        get_kernels("triton", "cpu")
    with pytest.raises(ValueError, match=r"dtype=float64; allowed: float32, bfloat16, float16"):
        get_kernels("triton", "cuda", torch.float64)


def test_without_triton_a_gpu_gets_the_reference_and_is_told_once(monkeypatch, caplog) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)  # an import of it fails
    monkeypatch.delitem(sys.modules, "inference_v2.kernels.triton.backend", raising=False)
    backend_package._load.cache_clear()
    with pytest.raises(ValueError, match=r"kernels=triton: triton is not installed .*; pip install triton"):
        get_kernels("triton", "cuda")
    assert get_kernels("auto", "cuda") is REFERENCE
    assert get_kernels("auto", "cuda") is REFERENCE
    assert len([r for r in caplog.records if "Triton kernels cannot run" in r.message]) == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_interpreter_takes_the_cpu_and_nothing_else(device: str, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if device == "cuda" else "0")
    with pytest.raises(backend_package.TritonMissing, match="allowed: device"):
        triton_kernels(device)
