"""The engine over real (tiny, random) Hugging Face models: greedy ids equal `generate`, log-probs equal the forward's."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Exaone4Config, LlamaConfig, Qwen3Config

from inference_v2 import InferenceEngine, SamplingParams
from inference_v2.config import EngineConfig

SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,  # pad may equal eos
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "exaone4": Exaone4Config(
        **SIZES, sliding_window=10, layer_types=["sliding_attention"] * 3 + ["full_attention"], tie_word_embeddings=False
    ),
}
SMALL = EngineConfig(block_size=4, max_model_len=160, debug_poison=True, cache_bytes=2**21)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    """(Hugging Face module, its folder)."""
    torch.manual_seed(11)
    module = AutoModelForCausalLM.from_config(CONFIGS[request.param], dtype=torch.float32).eval()
    folder = tmp_path_factory.mktemp(request.param)
    module.save_pretrained(folder)
    return module, folder


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 4, 9, 10, 11, 16, 40)
    return [torch.randint(2, 101, (n,), generator=generator).tolist() for n in lengths]


def open_engine(folder, **settings) -> InferenceEngine:
    return InferenceEngine.from_pretrained(folder, config=SMALL.model_copy(update=settings))


@torch.no_grad()
def hf_greedy(module, prompt, count):
    ids = torch.tensor([prompt])
    return module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)[
        0, len(prompt) :
    ].tolist()


@torch.no_grad()
def hf_logprobs(module, tokens, start, temperature=1.0):
    z = module(torch.tensor([tokens])).logits[0].float() / temperature
    return z.log_softmax(-1)[start - 1 : -1].gather(-1, torch.tensor(tokens[start:])[:, None]).squeeze(-1)


def assert_logprobs(module, completion, temperature=1.0):
    expected = hf_logprobs(module, [*completion.prompt_ids, *completion.token_ids], len(completion.prompt_ids), temperature)
    torch.testing.assert_close(torch.tensor(completion.logprobs_raw), expected, atol=1e-5, rtol=0)


WAYS = {
    "plain": {},
    "chunked": {"max_step_tokens": 5},
    "one token a step": {"max_step_tokens": 1},
    "preempted": {"cache_bytes": 70_000},
    "no prefix cache": {"prefix_caching": False},
    "two at a time": {"max_running": 2},
    "batch invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_ids_equal_hf_generate_and_logprobs_its_forward(model, prompts, way):
    module, folder = model
    engine = open_engine(folder, **WAYS[way])
    outs = engine.generate(prompts, SamplingParams(max_new_tokens=20, temperature=0.0))
    for prompt, (completion,) in zip(prompts, outs):
        assert list(completion.token_ids) == hf_greedy(module, prompt, 20)
        assert_logprobs(module, completion)
    assert (engine.stats().preemptions > 0) == (way == "preempted")


def test_sampled_tokens_do_not_depend_on_batch_chunks_hits_forks_or_preemption(model, prompts):
    module, folder = model
    sampling = SamplingParams(max_new_tokens=16, temperature=0.7, top_p=0.9, seed=3, num_samples=2)
    keys = [50 + i for i in range(len(prompts))]
    together = open_engine(folder).generate(prompts, sampling, keys=keys)
    variants = [open_engine(folder, **WAYS[way]) for way in ("chunked", "preempted", "two at a time")]
    variants.append(variants[0])  # again: its cache holds the prompts now
    for engine in variants:
        for ours, theirs in zip(engine.generate(prompts, sampling, keys=keys), together):
            for a, b in zip(ours, theirs):
                assert a.token_ids == b.token_ids
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
                assert a.logprobs_raw == pytest.approx(b.logprobs_raw, abs=1e-5)
    assert variants[-1].stats().tokens_hit > 0
    alone = open_engine(folder).generate([prompts[4]], sampling, keys=[keys[4]])
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in together[4]]
    for samples in together:
        for completion in samples:
            assert_logprobs(module, completion, temperature=0.7)
            assert all(a >= b - 1e-6 for a, b in zip(completion.logprobs, completion.logprobs_raw))  # renormalised over fewer


def test_scores_equal_the_forward(model, prompts):
    module, folder = model
    for settings in ({}, {"max_step_tokens": 7}):
        scored = open_engine(folder, **settings).score(prompts[1:], temperature=0.7, hidden=True)
        for tokens, result in zip(prompts[1:], scored):
            expected = hf_logprobs(module, tokens, 1, 0.7)
            torch.testing.assert_close(result.logprobs, expected, atol=1e-5, rtol=0)
            assert result.hidden.shape == (len(tokens) - 1, 48)


def test_refreshed_weights_answer_like_a_fresh_engine_and_like_hf(model, prompts):
    module, folder = model
    engine = open_engine(folder)
    weights = engine._weights
    engine.generate(prompts, SamplingParams(max_new_tokens=4, temperature=0.0))

    from inference_v2.loading import FolderSource

    class Shifted(FolderSource):
        def get(self, name, rows=None):
            found = super().get(name, rows)
            return found * 1.5 if name.endswith(("k_proj.weight", "v_proj.weight", "down_proj.weight")) else found

    weights.refresh(Shifted(folder), version=1)
    fresh = open_engine(folder)
    fresh._weights.refresh(Shifted(folder), version=5)
    ours = engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0.0))
    theirs = fresh.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0.0))
    assert [a.token_ids for (a,) in ours] == [b.token_ids for (b,) in theirs]
    assert ours[0][0].weight_version == 1
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("k_proj.weight", "v_proj.weight", "down_proj.weight")):
                parameter.mul_(1.5)
        try:
            for (completion,) in ours:
                assert_logprobs(module, completion)
        finally:
            module.load_state_dict(type(module).from_pretrained(folder).state_dict())
