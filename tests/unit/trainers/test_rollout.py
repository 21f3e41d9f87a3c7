"""Sampled rollouts: ids kept as drawn, both log-probs, every end, and nothing read from a generation_config."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from trainer_cases import tiny_folder

from hybrid.config import HybridConfig
from hybrid.engine import HybridEngine
from inference_v2.types import SamplingParams
from trainers.config import OPSDConfig
from trainers.data.batching import make_batches, pack
from trainers.data.order import DrawnPrompt, share
from trainers.opsd import OPSD
from trainers.rollout import given_rollouts, sample_rollouts
from trainers.types import Prompt

DRAWN = [DrawnPrompt(Prompt(index=i, ids=tuple(range(3, 4 + i)), text=str(i)), epoch=0) for i in range(5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_folder(path)
    return path


@pytest.fixture
def engine(folder):
    engine = HybridEngine.from_pretrained(str(folder), HybridConfig())
    yield engine
    engine.close()


def test_tokens_are_a_function_of_seed_and_key_alone(engine):
    """Neither of the share, nor of the order, nor of what else is in the batch."""
    sampling = SamplingParams(max_new_tokens=8, num_samples=2, seed=3)
    whole = {(r.prompt.index, r.sample_index): r.response_ids for r in sample_rollouts(engine, DRAWN, sampling)}
    parts = [r for rank in (1, 0) for r in sample_rollouts(engine, share(DRAWN, rank, 2)[::-1], sampling)]
    assert {(r.prompt.index, r.sample_index): r.response_ids for r in parts} == whole
    assert len(set(whole.values())) > 5
    other = [r.response_ids for r in sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=8, num_samples=2, seed=4))]
    assert other != list(whole.values())


def test_ids_reach_the_batch_as_they_were_drawn(engine):
    """No decoding and encoding on the way; spans cover exactly the response."""
    rollouts = sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=8))
    batch = pack(rollouts)
    assert batch.token_ids.tolist() == [i for r in rollouts for i in (*r.prompt.ids, *r.response_ids)]
    assert batch.targets.tolist() == [i for r in rollouts for i in r.response_ids]
    assert all([(s.start, s.stop, s.source) for s in r.spans] == [(r.num_prompt, len(r.ids), "policy")] for r in rollouts)


@pytest.mark.parametrize("sampling", [{}, {"top_k": 3}, {"top_p": 0.5}, {"repetition_penalty": 1.5}])
def test_the_raw_logprob_is_the_trainers_at_the_same_temperature(engine, sampling):
    """First ratio 1 at temperature 0.7, also where the sampler truncates or penalises."""
    rollouts = sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=8, num_samples=2, temperature=0.7, **sampling))
    batch = pack(rollouts)
    trained = engine.score(batch, temperature=0.7)
    torch.testing.assert_close(batch.rollout_logprobs_raw, trained, rtol=0, atol=1e-4)
    assert torch.isfinite(batch.rollout_logprobs).all()
    if sampling:
        assert not torch.allclose(batch.rollout_logprobs, batch.rollout_logprobs_raw, atol=1e-3)
    else:
        torch.testing.assert_close(batch.rollout_logprobs, batch.rollout_logprobs_raw, rtol=0, atol=1e-6)
    assert not torch.allclose(engine.score(batch, temperature=1.0), trained, atol=1e-3)


def test_a_row_scores_the_same_alone_and_among_longer_ones(engine):
    """Positions are explicit: padding shifts nothing."""
    rollouts = sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=8))
    together = engine.score(pack(rollouts)).split([len(r.response_ids) for r in rollouts])
    for rollout, row in zip(rollouts, together, strict=True):
        torch.testing.assert_close(engine.score(pack([rollout])), row, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [5, 0])
def test_every_end_of_sequence_id_ends_a_response_and_counts_once(folder, tmp_path, pad):
    """Ends 5 and 7 from the generation config, pad equal to one of them."""
    tiny_folder(tmp_path)
    config = {"eos_token_id": [5, 7], "pad_token_id": pad, "top_k": 1, "temperature": 0.1, "do_sample": False}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    engine = HybridEngine.from_pretrained(str(tmp_path), HybridConfig())
    assert {5, 7} <= engine.model.eos_token_ids
    rollouts = sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=30, num_samples=8))
    ended = [r for r in rollouts if r.finish_reason == "stop"]
    assert {r.response_ids[-1] for r in ended} >= {5, 7}
    ends = engine.model.eos_token_ids
    for rollout in rollouts:
        assert not ends & set(rollout.response_ids[:-1])
        assert (rollout.response_ids[-1] in ends) == (rollout.finish_reason == "stop")
    batch = pack(rollouts)
    assert batch.num_targets == sum(len(r.response_ids) for r in rollouts)
    engine.close()


def test_a_generation_config_never_leaks_into_sampling(folder, tmp_path):
    """top_k = 1 on disk: asking for temperature 1 still samples."""
    tiny_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 0.01, "eos_token_id": 1}))
    plain, leaky = (HybridEngine.from_pretrained(str(p), HybridConfig()) for p in (folder, tmp_path))
    sampling = SamplingParams(max_new_tokens=8, num_samples=4)
    assert [r.ids for r in sample_rollouts(plain, DRAWN, sampling)] == [r.ids for r in sample_rollouts(leaky, DRAWN, sampling)]


def test_a_prompt_that_the_engine_refuses_names_its_row(engine):
    with pytest.raises(ValueError, match=r"row 4: .*max_new_tokens=60"):
        sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=60))


def test_given_responses_become_rollouts_with_given_spans():
    drawn = DrawnPrompt(Prompt(index=3, ids=(4, 5), text="", response="x", response_ids=(6, 1)), epoch=0)
    (rollout,) = given_rollouts([drawn], weight_version=2)
    assert rollout.ids == (4, 5, 6, 1)
    assert rollout.text == "x"
    assert [(s.start, s.stop, s.source) for s in rollout.spans] == [(2, 4, "given")]
    assert not pack([rollout]).on_policy.any()
    with pytest.raises(ValueError, match="row 0 has no given response"):
        given_rollouts(DRAWN[:1], weight_version=2)


def test_opsd_draws_the_coin_by_step(engine):
    config = OPSDConfig.model_validate(
        {
            "recipe": "opsd", "output_dir": "x", "model": {"path": "m"}, "data": {"train": "d"}, "teacher": {"path": "t"},
            "rollout": {"given_fraction": 0.5, "sampling": {"max_new_tokens": 2}},
        }
    )  # fmt: skip
    prompt = Prompt(index=0, ids=(4, 5), text="", response="x", response_ids=(6, 1))
    algorithm = OPSD(config, engine, teacher=None)

    def sources() -> list[str]:
        steps = [algorithm.rollouts(step, lambda count: [DrawnPrompt(prompt, 0)]) for step in range(12)]
        return [rollouts[0].spans[0].source for rollouts, _ in steps]

    assert set(sources()) == {"given", "policy"}
    assert sources() == sources()
    assert make_batches([], 10) == []
