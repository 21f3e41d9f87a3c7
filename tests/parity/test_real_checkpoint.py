"""A real checkpoint against its Hugging Face forward, where one is at hand: `REAL_CHECKPOINT=DIR pytest tests/parity`.

Any small registered model will do, for example the folder that `hybrid fetch-smollm2 DIR` writes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inference_v2 import Completion, InferenceEngine, SamplingParams
from inference_v2.cache import block_bytes
from inference_v2.config import EngineConfig
from inference_v2.loading import load_model

FOLDER = os.environ.get("REAL_CHECKPOINT")
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Question: Ada has 17 apples and gives away 5. How many are left?\nAnswer:",
    "Paged attention keeps the keys and values of a sequence in blocks of equal size, which need not lie side by side. " * 3,
)
WAYS = {"plain": {}, "chunked": {"max_step_tokens": 7}, "two at a time": {"max_running": 2}}

SHORT = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)

pytestmark = pytest.mark.skipif(FOLDER is None, reason="REAL_CHECKPOINT names no folder")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(Path(FOLDER))
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def sequences(prompts: list[list[int]]) -> list[list[int]]:
    """Each text and what the model itself goes on with."""
    engine = InferenceEngine.from_pretrained(FOLDER, config=EngineConfig(max_model_len=256))
    outs = engine.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0.0))
    return [[*prompt, *out.token_ids] for prompt, (out,) in zip(prompts, outs)]


def hf_logits(dtype: torch.dtype, sequences: list[list[int]]) -> list[torch.Tensor]:
    """The head's product in fp32, as on our side."""
    module = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()
    weight = module.get_output_embeddings().weight.float()
    with torch.no_grad():
        hidden = [module.get_decoder()(torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in sequences]
        return [h.float() @ weight.T for h in hidden]


def ours(dtype: str, sequences: list[list[int]], **settings: object) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per sequence (logits, log-probs of its tokens)."""
    config = EngineConfig(max_model_len=256, debug_poison=True, **settings)
    engine = InferenceEngine.from_pretrained(FOLDER, dtype=dtype, config=config)
    with engine._weights.final() as final, torch.no_grad():
        return [(final.head.logits(scored.hidden), scored.logprobs) for scored in engine.score(sequences, hidden=True)]


@pytest.mark.parametrize("way", WAYS)
def test_fp32_logits_and_logprobs(sequences: list[list[int]], way: str) -> None:
    exact = hf_logits(torch.float32, sequences)
    for ids, (got, logprobs), want in zip(sequences, ours("float32", sequences, **WAYS[way]), exact):
        want = want[:-1, : got.shape[1]]
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()
        assert torch.equal(got.argmax(-1), want.argmax(-1))
        chosen = want.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
        assert (logprobs - chosen).abs().max() <= 1e-4


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]]) -> list[Completion]:
    """Each text's first 12 greedy tokens, from an engine that has only this one to serve."""
    engine = InferenceEngine.from_pretrained(FOLDER, config=EngineConfig(max_model_len=256, prefix_caching=False))
    return [engine.generate([ids], SHORT)[0][0] for ids in prompts]


@pytest.mark.parametrize("way", [*WAYS, "preempted"])
def test_fp32_completions_do_not_depend_on_batch_chunks_forks_hits_or_preemption(
    prompts: list[list[int]], alone: list[Completion], way: str
) -> None:
    settings = WAYS.get(way) or {}
    if way == "preempted":  # the longest text and its samples fit, and little else
        settings = {"cache_bytes": 9 * sum(block_bytes(load_model(FOLDER).spec, 16, torch.float32))}
    engine = InferenceEngine.from_pretrained(FOLDER, config=EngineConfig(max_model_len=256, **settings))
    for _ in range(2):  # the second time from the cache
        for one, samples in zip(alone, engine.generate(prompts, replace(SHORT, num_samples=2))):
            for sample in samples:
                assert sample.token_ids == one.token_ids
                assert sample.logprobs_raw == pytest.approx(one.logprobs_raw, abs=1e-4, rel=0)
    stats = engine.stats()
    assert stats.tokens_hit > 0
    assert (stats.blocks_copied > 0) == (way != "two at a time")  # there the second sample waits for a place
    assert (stats.preemptions > 0) == (way == "preempted")


def test_bf16_logits_are_no_further_from_fp32_than_the_modules_own(sequences: list[list[int]]) -> None:
    exact, module = hf_logits(torch.float32, sequences), hf_logits(torch.bfloat16, sequences)
    for (got, _), theirs, want in zip(ours("bfloat16", sequences), module, exact):
        want, theirs = want[:-1, : got.shape[1]], theirs[:-1, : got.shape[1]]
        assert (got - theirs).abs().max() <= 6e-2 * want.abs().max()
        assert (got - want).norm() <= 1.2 * (theirs - want).norm()
