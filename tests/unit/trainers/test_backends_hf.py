"""Rollouts by transformers' generate: the same as the engine's, token by token, greedy and sampled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from hybrid_cases import cross_entropy, full_weights, hf_greedy, hf_module, make_engine, pack, ragged_sequences
from tiny import save_tiny

from hybrid.engine import HybridEngine
from inference_v2.types import Completion, SamplingParams
from trainers.backends import hf
from trainers.backends.config import BackendConfig
from trainers.backends.generators import ClosableGenerator, open_generator
from trainers.backends.requests import BackendError

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12], [4], [13, 14, 15, 16]]
KEYS = [3, 9, 2**40, 1, 0]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)


def open_both(path: Path, family: str = "qwen3", **config: object) -> tuple[HybridEngine, ClosableGenerator]:
    """The generation config on disk would make sampling greedy; llama's head is tied."""
    if not (path / "config.json").is_file():
        save_tiny(path, family, tie_word_embeddings=family == "llama")
        (path / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 0.01, "eos_token_id": [1, 5]}))
    engine = make_engine(str(path), **config)
    return engine, open_generator(BackendConfig(backend="hf"), engine)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    engine, generator = open_both(tmp_path_factory.mktemp("model"))
    yield engine, generator
    generator.close()
    engine.close()


def flat(found: dict[int, list[Completion]]) -> list[Completion]:
    return [completion for samples in found.values() for completion in samples]


def assert_same(given: dict[int, list[Completion]], expected: dict[int, list[Completion]]) -> None:
    assert given.keys() == expected.keys()
    for got, want in zip(flat(given), flat(expected), strict=True):
        assert (got.token_ids, got.sample_index, got.prompt_ids) == (want.token_ids, want.sample_index, want.prompt_ids)
        assert (got.finish_reason, got.text, got.error) == (want.finish_reason, want.text, want.error)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
        assert got.logprobs_raw == pytest.approx(want.logprobs_raw, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "exaone4"])
def test_greedy_and_sampled_tokens_follow_the_weights(tmp_path, family):
    engine, generator = open_both(tmp_path, family)
    sampled = SamplingParams(max_new_tokens=16, num_samples=2, temperature=0.7, top_k=20, top_p=0.9, seed=3)
    first = None
    for _ in range(2):
        found = generator.generate_together(PROMPTS, GREEDY)
        assert_same(found, engine.generate_together(PROMPTS, GREEDY))
        assert_same(generator.generate_together(PROMPTS, sampled, KEYS), engine.generate_together(PROMPTS, sampled, KEYS))
        assert first != (first := [c.token_ids for c in flat(found)])
        engine.forward_backward([pack(ragged_sequences())], cross_entropy)
        engine.optim_step()
    module = hf_module(str(tmp_path), full_weights(engine))
    for completion in flat(
        generator.generate_together(PROMPTS, SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True))
    ):
        assert completion.token_ids == hf_greedy(module, completion.prompt_ids, 6)
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.3, "ignore_eos": True},
        {"temperature": 0.5, "top_p": 0.4},
        {"top_k": 3, "min_new_tokens": 7, "stop_token_ids": (20, 21, 22, 23, 24)},
        {"temperature": 0.0, "num_samples": 3},
        {"max_new_tokens": 0},
        {"max_new_tokens": 255},
    ],
    ids=str,
)
def test_every_setting_means_what_it_means_to_the_engine(both, changes):
    """Ends, refusals (no room for 255 more tokens; an empty prompt; an unknown id) and samples included."""
    engine, generator = both
    sampling = SamplingParams(**{"max_new_tokens": 20, "num_samples": 4, "seed": 7} | changes)
    prompts = [*PROMPTS, [], [96]]
    found = generator.generate_together(prompts, sampling, [*KEYS, 5, 6])
    assert_same(found, engine.generate_together(prompts, sampling, [*KEYS, 5, 6]))
    assert {c.finish_reason for i in (5, 6) for c in found[i]} == {"abort"}


def test_adapters_are_part_of_the_weights(tmp_path):
    engine, generator = open_both(tmp_path, lora={"r": 4})
    before = generator.generate_together(PROMPTS, GREEDY)
    for _ in range(3):
        engine.forward_backward([pack(ragged_sequences())], cross_entropy)
        engine.optim_step()
    after = generator.generate_together(PROMPTS, GREEDY)
    assert_same(after, engine.generate_together(PROMPTS, GREEDY))
    assert [c.logprobs_raw for c in flat(after)] != [c.logprobs_raw for c in flat(before)]
    engine.close()


def test_completions_carry_the_version_of_their_weights(both):
    engine, generator = both
    before = engine.weight_version
    assert {c.weight_version for c in flat(generator.generate_together(PROMPTS, GREEDY))} == {before + 1}
    assert engine.weight_version == before + 1


def test_samples_have_the_distribution_of_the_logits(both):
    """4000 first tokens against softmax(z / 1.5): each frequency within 5 standard errors. Chi-square would say no more."""
    engine, generator = both
    count, temperature = 4000, 1.5
    sampling = SamplingParams(max_new_tokens=1, num_samples=count, temperature=temperature)
    (samples,) = generator.generate_together([[5, 6]], sampling).values()
    with torch.no_grad():
        z = hf_module(engine.model.path, full_weights(engine))(torch.tensor([[5, 6]])).logits[0, -1, :79]
    p = (z / temperature).softmax(-1)
    counts = Counter(c.token_ids[0] for c in samples)
    frequencies = torch.tensor([counts[i] / count for i in range(79)])
    assert ((frequencies - p).abs() <= 5 * (p * (1 - p) / count).sqrt() + 1 / count).all()
    assert len(counts) > 30


def test_it_leaves_the_trained_module_and_the_random_states_alone(both, monkeypatch):
    engine, generator = both
    module = engine.model.module
    module.train()
    expected = engine.generate_together(PROMPTS, GREEDY)

    def state() -> tuple[object, ...]:
        return ([m.training for m in module.modules()], [p.requires_grad for p in module.parameters()])

    before, random = state(), torch.get_rng_state()
    generator.generate_together(PROMPTS, SamplingParams(max_new_tokens=3))

    def fail(*_: object) -> None:
        raise ZeroDivisionError("in a layer")

    monkeypatch.setattr(hf._Sampler, "__call__", fail)
    with pytest.raises(BackendError, match="ZeroDivisionError: in a layer"):
        generator.generate_together(PROMPTS, GREEDY)
    monkeypatch.undo()
    assert state() == before
    assert torch.equal(torch.get_rng_state(), random)
    assert_same(generator.generate_together(PROMPTS, GREEDY), expected)
    module.eval()


def test_logits_that_are_not_finite_end_a_sample_with_the_reason(tmp_path):
    engine, generator = open_both(tmp_path)
    with torch.no_grad():
        engine.model.local_shards()["model.norm.weight"].fill_(float("nan"))
    (completion,) = flat(generator.generate_together([[5, 6]], SamplingParams(max_new_tokens=4)))
    assert (completion.finish_reason, completion.token_ids) == ("abort", ())
    assert "the logits of position 2 are not finite (weight version 1)" in completion.error
    engine.close()


def _on_two_ranks(path: str) -> dict[str, object]:
    engine, generator = open_both(Path(path), zero_stage=3)
    sampling = SamplingParams(max_new_tokens=10, num_samples=2, seed=2)
    found = generator.generate_together(PROMPTS, sampling, KEYS)
    assert_same(found, engine.generate_together(PROMPTS, sampling, KEYS))
    if engine.rank == 1:
        hf._generate = None  # not callable
    try:
        generator.generate_together(PROMPTS, sampling)
    except BackendError as error:
        message = str(error)
    finally:
        engine.close()
    return {"ids": {i: [c.token_ids for c in samples] for i, samples in found.items()}, "message": message}


def test_two_ranks_share_the_prompts_and_their_errors(pool2, both, tmp_path):
    open_both(tmp_path)[0].close()
    first, second = pool2.run(_on_two_ranks, str(tmp_path))
    alone = both[1].generate_together(PROMPTS, SamplingParams(max_new_tokens=10, num_samples=2, seed=2), KEYS)
    assert first["ids"] | second["ids"] == {i: [c.token_ids for c in samples] for i, samples in alone.items()}
    assert first["ids"]
    assert second["ids"]
    assert first["message"] == second["message"] == "rank 1: TypeError: 'NoneType' object is not callable"
