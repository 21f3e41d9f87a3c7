"""What needs a GPU: `make test-gpu`. Skipped where there is none. recipes/bench/gpu_check.py runs the same checks and times."""

from __future__ import annotations

import argparse
import contextvars
import gc

import pytest
import torch
from tiny import save_tiny

from hybrid import checkpointing
from inference_v2 import InferenceEngine, SamplingParams
from inference_v2.config import EngineConfig
from inference_v2.kernels import get_kernels
from recipes.bench import gpu_check
from recipes.bench.kernel_checks import CASES, Setting, compare

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_kernels_agree_with_the_reference(case: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    found = compare(case, Setting(get_kernels("triton", device, dtype), device, dtype))
    assert found["ok"], found


def test_auto_takes_triton() -> None:
    assert get_kernels("auto", "cuda", torch.bfloat16).name == "triton"


def test_greedy_tokens_are_transformers_and_graphs_change_nothing() -> None:
    found = gpu_check.tokens(argparse.Namespace(dry_run=False))
    assert found["ok"], found


def test_graphs_follow_moved_and_refreshed_weights(tmp_path) -> None:
    save_tiny(tmp_path / "a", "llama", tokenizer=None)
    save_tiny(tmp_path / "b", "llama", tokenizer=None, seed=1)
    from inference_v2.loading import load_model

    sampling, prompts = SamplingParams(temperature=0.0, max_new_tokens=20), [[3, 4, 5], [6] * 20]
    want, engine = [], None
    for name in ("a", "b"):
        engine = InferenceEngine.from_pretrained(tmp_path / name, config=EngineConfig(cuda_graphs=False), device="cuda")
        want.append([c[0].token_ids for c in engine.generate(prompts, sampling)])
    engine = InferenceEngine.from_pretrained(tmp_path / "a", config=EngineConfig(cache_bytes=2**24), device="cuda")
    weights = engine._weights
    for version, move in enumerate((None, None, weights.offload, weights.free), start=1):
        assert [c[0].token_ids for c in engine.generate(prompts, sampling)] == want[(version - 1) % 2]
        if move is not None:
            move()
        weights.refresh(load_model(tmp_path / "ab"[version % 2]).source, version=version)


def test_inputs_of_a_checkpointed_part_wait_in_pinned_host_memory() -> None:
    def check() -> None:
        checkpointing.configure(checkpoint_in_cpu=True)
        part = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).cuda()
        x = torch.randn(7, 64, device="cuda", requires_grad=True)
        torch.manual_seed(1)
        (expected,) = torch.autograd.grad(part(x * 2).square().sum(), x)
        torch.manual_seed(1)
        out = checkpointing.checkpoint(part, x * 2)
        gc.collect()
        waits = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == x.shape and t.device.type == "cpu"]
        assert [t.is_pinned() for t in waits] == [True]
        assert torch.equal(*torch.autograd.grad(out.square().sum(), x), expected)

    contextvars.copy_context().run(check)
