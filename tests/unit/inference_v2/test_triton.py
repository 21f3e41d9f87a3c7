"""Where the Triton kernels run, and what is said where they cannot."""

from __future__ import annotations

import sys

import pytest
import torch

from inference_v2.kernels import REFERENCE, get_kernels, triton_kernels
from inference_v2.kernels import triton as backend_package


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
    with pytest.raises(ValueError, match=r"kernels=triton: triton is not installed .*; pip install 'hybrid-rlhf\[triton\]'"):
        get_kernels("triton", "cuda")
    assert get_kernels("auto", "cuda") is REFERENCE
    assert get_kernels("auto", "cuda") is REFERENCE
    assert len([r for r in caplog.records if "Triton kernels cannot run" in r.message]) == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_interpreter_takes_the_cpu_and_nothing_else(device: str, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if device == "cuda" else "0")
    with pytest.raises(backend_package.TritonMissing, match="allowed: device"):
        triton_kernels(device)
