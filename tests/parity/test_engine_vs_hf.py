"""The engine over real (tiny, random) Hugging Face models: greedy ids equal `generate`, log-probs equal the forward's."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, save_tiny

from inference_v2 import InferenceEngine, SamplingParams
from inference_v2.cache import block_bytes
from inference_v2.config import EngineConfig
from inference_v2.loading import FolderSource, load_model

OVERRIDES = {  # windows that end inside a block, tied and untied heads
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1, "tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 10},
    "exaone4": {"sliding_window": 10},
    "exaone4_5": {"sliding_window": 10, "tie_word_embeddings": True},
}
SMALL = EngineConfig(block_size=4, max_model_len=160, debug_poison=True, cache_bytes=2**22)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """(Hugging Face module, its folder)."""
    folder = tmp_path_factory.mktemp(request.param)
    return save_tiny(folder, request.param, tokenizer=None, **OVERRIDES[request.param]), folder


@pytest.fixture(scope="module", params=FAMILIES)
def bf16_model(request, tmp_path_factory):
    """The same in bf16, its weights small: Hugging Face's own noise grows with them."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = {"tokenizer": None, "initializer_range": 0.06, "dtype": torch.bfloat16, **OVERRIDES[request.param]}
    return save_tiny(folder, request.param, **settings), folder


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 4, 9, 10, 11, 16, 40)
    return [torch.randint(2, 79, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def hf_answers(model, prompts):
    """What `generate` of the module appends to each prompt."""
    return [hf_greedy(model[0], prompt, 20) for prompt in prompts]


def open_engine(folder, dtype="float32", *, blocks: int | None = None, **settings) -> InferenceEngine:
    """`blocks`: a pool of about so many in every cache group."""
    if blocks is not None:
        settings["cache_bytes"] = blocks * sum(block_bytes(load_model(folder).spec, SMALL.block_size, getattr(torch, dtype)))
    return InferenceEngine.from_pretrained(folder, dtype=dtype, config=SMALL.model_copy(update=settings))


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
    "preempted": {"blocks": 16},
    "no prefix cache": {"prefix_caching": False},
    "two at a time": {"max_running": 2},
    "batch invariant": {"batch_invariant": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_greedy_ids_equal_hf_generate_and_logprobs_its_forward(model, prompts, hf_answers, way):
    module, folder = model
    engine = open_engine(folder, **WAYS[way])
    outs = engine.generate(prompts, SamplingParams(max_new_tokens=20, temperature=0.0))
    for answer, (completion,) in zip(hf_answers, outs):
        assert list(completion.token_ids) == answer
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
            assert result.hidden.shape == (len(tokens) - 1, 64)


SHIFTED = ("k_proj.weight", "v_proj.weight", "down_proj.weight", "embed_tokens.weight")  # a tied head must follow


def test_refreshed_weights_answer_like_a_fresh_engine_and_like_hf(model, prompts):
    module, folder = model
    engine = open_engine(folder)
    weights = engine._weights
    engine.generate(prompts, SamplingParams(max_new_tokens=4, temperature=0.0))

    class Shifted(FolderSource):
        def get(self, name, rows=None):
            found = super().get(name, rows)
            return found * 1.5 if name.endswith(SHIFTED) else found

    weights.refresh(Shifted(folder), version=1)
    fresh = open_engine(folder)
    fresh._weights.refresh(Shifted(folder), version=5)
    ours = engine.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0.0))
    theirs = fresh.generate(prompts, SamplingParams(max_new_tokens=12, temperature=0.0))
    assert [a.token_ids for (a,) in ours] == [b.token_ids for (b,) in theirs]
    assert ours[0][0].weight_version == 1
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(SHIFTED):
                parameter.mul_(1.5)
        try:
            for (completion,) in ours:
                assert_logprobs(module, completion)
        finally:
            module.load_state_dict(type(module).from_pretrained(folder).state_dict())


@pytest.mark.parametrize("way", ["plain", "chunked", "preempted"])
def test_bf16_agrees_with_the_forward_within_its_noise(bf16_model, prompts, way):
    module, folder = bf16_model
    """Samples of one prompt share its blocks; the second time the prompts are found in the cache."""
    engine = open_engine(folder, "bfloat16", **WAYS[way])
    sampling = SamplingParams(max_new_tokens=12, temperature=0.0, num_samples=2)
    outs = [*engine.generate(prompts, sampling), *engine.generate(prompts, sampling)]
    assert min(engine.stats().tokens_hit, engine.stats().blocks_copied) > 0
    for completion in (c for samples in outs for c in samples):
        tokens, start = [*completion.prompt_ids, *completion.token_ids], len(completion.prompt_ids)
        with torch.no_grad():
            z = module(torch.tensor([tokens])).logits[0, start - 1 : -1].float()
        allowed = 3e-2 * z.abs().max()
        expected = z.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None]).squeeze(-1)
        assert (torch.tensor(completion.logprobs_raw) - expected).abs().max() <= allowed
        top = z.topk(2, dim=-1)
        clear = top.values[:, 0] - top.values[:, 1] > allowed
        assert torch.equal(torch.tensor(completion.token_ids)[clear], top.indices[clear, 0])
    assert (engine.stats().preemptions > 0) == (way == "preempted")


def test_batch_invariant_samples_are_bit_equal_in_bf16(bf16_model, prompts):
    """Chunked, preempted, forked, from the prefix cache, two at a time or alone: the same tokens and the same log-probs."""
    _, folder = bf16_model
    sampling = SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.9, seed=3, num_samples=2, ignore_eos=True)

    def engine(**settings):
        return open_engine(folder, "bfloat16", batch_invariant=True, **settings)

    def outcomes(engine, which):
        outs = engine.generate([prompts[i] for i in which], sampling, keys=which)
        return [[(c.token_ids, c.logprobs, c.logprobs_raw) for c in samples] for samples in outs]

    everything = list(range(len(prompts)))
    want = outcomes(engine(), everything)
    for way in ("chunked", "preempted", "two at a time"):
        other = engine(**WAYS[way])
        assert outcomes(other, everything) == want
        assert (other.stats().preemptions > 0) == (way == "preempted")
    assert outcomes(other, everything) == want  # its cache holds the prompts now
    assert other.stats().tokens_hit > 0
    alone = engine(prefix_caching=False)
    assert [outcomes(alone, [i])[0] for i in everything] == want
