"""Which backend, its settings, and what of the sampling each of them knows."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from inference_v2.types import SamplingParams
from trainers.backends.config import BackendConfig, check_sampling


def test_the_engine_generates_unless_something_else_is_named():
    assert BackendConfig().backend == "hybrid"
    config = BackendConfig.model_validate({"backend": "vllm", "vllm": {"python": "venv/bin/python"}})
    assert config.vllm.push == "safetensors"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "vllm"}, "needs the section vllm, at least vllm.python"),
        ({"backend": "hf", "vllm": {"python": "p"}}, "section vllm with backend=hf"),
        ({"backend": "trt"}, "Input should be 'hybrid', 'hf' or 'vllm'"),
        ({"backend": "vllm", "vllm": {"python": ""}}, "at least 1 character"),
        ({"backend": "vllm", "vllm": {"python": "p", "push": "nccl"}}, "'safetensors' or 'shared_memory'"),
        ({"backend": "vllm", "vllm": {"python": "p", "env": {"VLLM_USE_V2_MODEL_RUNNER": "1"}}}, "set by the worker itself"),
        ({"backend": "vllm", "vllm": {"python": "p", "gpu_memory_utilization": 1.5}}, "less than or equal to 1"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(ValidationError, match=message):
        BackendConfig.model_validate(given)


def test_sampling_that_a_backend_does_not_know_is_refused_by_name():
    for name, value in {"min_p": 0.1, "repetition_penalty": 1.1, "stop": ("x",), "allowed_token_ids": (1,)}.items():
        with pytest.raises(ValueError, match=f"sampling: {name}=.* with rollout.backend=hf; allowed: "):
            check_sampling("hf", SamplingParams(**{name: value}))
    for name, value in {"stop": ("x",), "bad_token_ids": (1,), "temperature": 3.0}.items():
        with pytest.raises(ValueError, match=f"sampling: {name}=.* with rollout.backend=vllm; allowed: "):
            check_sampling("vllm", SamplingParams(**{name: value}))
    everything = SamplingParams(
        temperature=0.7, top_k=3, top_p=0.9, min_new_tokens=2, num_samples=3, stop_token_ids=(4,), seed=5, ignore_eos=True
    )
    check_sampling("hf", everything)
    check_sampling("vllm", everything)
    check_sampling("vllm", SamplingParams(temperature=0.0, min_p=0.1, repetition_penalty=1.1, allowed_token_ids=(1,)))


def test_config_and_factory_import_no_torch():
    code = "import sys; import trainers.backends.config, trainers.backends.generators; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
