"""The engine on a decoder whose logits are a hash of what it finds in the paged cache (fake_decoder.py)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from fake_decoder import VOCAB, FakeWeights, fake_engine, greedy, greedy_oracle, logits_of

from inference_v2 import Request, SamplingParams

PROMPT = [(7 * i + i * i) % VOCAB for i in range(100)]
WINDOWS = [(None,), (6,), (None, 6), (None, 5, 24)]


def run(engine, *requests):
    """Completions by (request id, sample index)."""
    for request in requests:
        engine.add(request)
    done = {}
    while engine.has_work:
        for completion in engine.step():
            done[completion.request_id, completion.sample_index] = completion
    return done


def outcome(completion):
    return completion.token_ids, completion.logprobs, completion.logprobs_raw, completion.finish_reason


# -- counting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", WINDOWS)
def test_four_samples_of_a_prompt_prefill_it_once(windows):
    engine = fake_engine(windows, max_step_tokens=64)
    (samples,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=8, num_samples=4))
    stats = engine.stats()
    assert stats.prompt_tokens_prefilled == 100
    assert stats.blocks_copied == 3
    assert stats.max_step_tokens == 64
    assert stats.forwards == 2 + 7
    assert stats.tokens_generated == 32
    assert stats.output_tokens_computed == 4 * 7
    assert stats.blocks_free == stats.blocks_total
    assert (stats.running, stats.waiting, stats.preemptions, stats.tokens_hit) == (0, 0, 0, 0)
    assert len({sample.token_ids for sample in samples}) == 4


def test_the_second_time_a_prompt_is_found_in_the_cache():
    engine = fake_engine()
    first = engine.generate([PROMPT], greedy(8))
    again = engine.generate([PROMPT], greedy(8))
    assert engine.stats().tokens_hit == 96
    assert engine.stats().prompt_tokens_prefilled == 104
    assert outcome(first[0][0]) == outcome(again[0][0])


def test_a_late_request_joins_the_running_batch():
    engine = fake_engine()
    engine.add(Request(tuple(PROMPT[:20]), greedy(30), id=1))
    for _ in range(5):
        engine.step()
    engine.add(Request(tuple(PROMPT[:9]), greedy(3), id=2))
    engine.step()
    assert engine.decoder.batches[-1].num_tokens == 1 + 9
    assert engine.stats().running == 2
    finished = [c.request_id for _ in range(40) for c in engine.step()]
    assert finished == [2, 1]


def test_no_step_exceeds_the_token_budget_or_max_running():
    engine = fake_engine((None, 6), max_step_tokens=7, max_running=3)
    prompts = [PROMPT[i : i + 5 + 3 * i] for i in range(8)]
    engine.generate(prompts, SamplingParams(max_new_tokens=6, num_samples=2))
    assert max(batch.num_tokens for batch in engine.decoder.batches) == 7 == engine.stats().max_step_tokens
    assert max(batch.num_requests for batch in engine.decoder.batches) <= 3


# -- the same tokens, whatever happens -------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("chunk", [3, 16, 2048])
def test_greedy_equals_the_oracle_for_any_chunking(windows, chunk):
    engine = fake_engine(windows, block_size=4, max_step_tokens=chunk)
    for prompt in (PROMPT[:1], PROMPT[:33], PROMPT):
        (out,) = engine.generate([prompt], greedy(12))
        assert out[0].token_ids == greedy_oracle(prompt, 12, windows)


def test_preempted_samples_resume_with_the_tokens_of_a_big_cache():
    prompts = [PROMPT[i : i + 7] for i in range(4)]
    small = fake_engine(blocks=10, block_size=4)
    sampling = SamplingParams(max_new_tokens=24, num_samples=2)
    tight = small.generate(prompts, sampling)
    assert small.stats().preemptions > 0
    roomy = fake_engine(block_size=4).generate(prompts, sampling)
    for a, b in zip(tight, roomy):
        assert [outcome(c) for c in a] == [outcome(c) for c in b]


def test_a_seeded_request_draws_the_same_alone_in_a_batch_shuffled_chunked_and_preempted():
    sampling = SamplingParams(max_new_tokens=15, temperature=1.2, top_p=0.95, seed=11)
    requests = [Request(tuple(PROMPT[i : i + 9 + i]), sampling, key=100 + i, id=i) for i in range(7)]
    alone = {i: outcome(run(fake_engine(), request)[i, 0]) for i, request in enumerate(requests)}
    shuffled = random.Random(0).sample(requests, 7)
    for engine, order in (
        (fake_engine(), requests),
        (fake_engine(), shuffled),
        (fake_engine(max_step_tokens=3, block_size=4), shuffled),
        (fake_engine(blocks=9, block_size=4), shuffled),
        (fake_engine(prefix_caching=False, max_running=2), requests),
    ):
        together = run(engine, *order)
        for i in range(7):
            assert together[i, 0].token_ids == alone[i][0]
            assert together[i, 0].logprobs == pytest.approx(alone[i][1], abs=1e-6)


def test_each_of_n_samples_equals_the_single_run_with_its_index():
    sampling = SamplingParams(max_new_tokens=10, seed=5, num_samples=4)
    together = run(fake_engine(), Request(tuple(PROMPT), sampling, key=9, id=0))
    assert len({together[0, i].token_ids for i in range(4)}) == 4
    single = SamplingParams(max_new_tokens=10, seed=5)
    for i in range(4):
        alone = run(fake_engine(), Request(tuple(PROMPT), single, key=9, id=0, first_sample=i))
        assert outcome(alone[0, i]) == outcome(together[0, i])


def test_samples_go_on_when_the_first_one_ends_at_its_first_token():
    (free,) = fake_engine().generate([PROMPT], SamplingParams(max_new_tokens=8, num_samples=4))
    first = free[0].token_ids[0]
    engine = fake_engine()
    (samples,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=8, num_samples=4, stop_token_ids=(first,)))
    assert samples[0].token_ids == (first,)
    for a, b in zip(samples, free):
        assert a.token_ids == b.token_ids[: len(a.token_ids)]
    assert max(len(sample.token_ids) for sample in samples) > 1
    assert engine.stats().prompt_tokens_prefilled == 100


def test_samples_beyond_max_running_wait_and_draw_the_same():
    sampling = SamplingParams(max_new_tokens=6, num_samples=5)
    wide = fake_engine().generate([PROMPT], sampling)
    narrow = fake_engine(max_running=2).generate([PROMPT], sampling)
    assert [outcome(c) for c in narrow[0]] == [outcome(c) for c in wide[0]]


def test_random_adds_aborts_and_weight_changes_leave_every_block_free_and_every_greedy_answer_right():
    rng = random.Random(3)
    weights = FakeWeights()
    engine = fake_engine((None, 6), block_size=4, cache_bytes=1600, max_running=5, max_step_tokens=13, weights=weights)
    asked, mixed, alive, done = {}, set(), {}, {}  # alive: id -> samples to come
    for i in range(800):
        kind = rng.random()
        if kind < 0.3 and len(alive) < 12:
            prompt = PROMPT[: rng.choice((0, 4, 8))] + [rng.randrange(3) for _ in range(rng.randint(1, 12))]
            asked[i] = (prompt, rng.randint(1, 12))
            alive[i] = rng.randint(1, 3)
            engine.add(Request(tuple(prompt), greedy(asked[i][1], num_samples=alive[i]), id=i))
        elif kind < 0.36 and alive:
            engine.abort(rng.choice(sorted(alive)))
        elif kind < 0.365:
            weights = FakeWeights(weights.version + 1, salt=100 * (weights.version + 1))
            engine.set_weights(weights)
            mixed |= alive.keys()
        for completion in engine.step():
            done[completion.request_id, completion.sample_index] = completion
            alive[completion.request_id] -= 1
            if not alive[completion.request_id]:
                del alive[completion.request_id]
    done |= run(engine)
    assert engine.stats().blocks_free == engine.stats().blocks_total
    checked = 0
    for (i, _), completion in done.items():
        if i not in mixed and completion.finish_reason == "length":
            assert completion.token_ids == greedy_oracle(*asked[i], (None, 6), salt=100 * completion.weight_version)
            checked += 1
    assert checked > 30
    assert min(engine.stats().preemptions, engine.stats().tokens_hit, engine.stats().blocks_copied) > 0


# -- weights ---------------------------------------------------------------------------------------------------------------


def test_new_weights_never_see_the_old_cache():
    engine = fake_engine(weights=FakeWeights(0, salt=0))
    engine.generate([PROMPT], greedy(6))
    engine.set_weights(FakeWeights(1, salt=50))
    (out,) = engine.generate([PROMPT], greedy(6))
    assert out[0].token_ids == greedy_oracle(PROMPT, 6, salt=50)
    assert out[0].weight_version == 1
    assert engine.stats().tokens_hit == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_a_running_request_goes_on_under_new_weights_without_a_stale_key(in_place):
    weights = FakeWeights(0, salt=0)
    engine = fake_engine(weights=weights)
    engine.add(Request(tuple(PROMPT), greedy(10), id=0))
    for _ in range(4):
        engine.step()
    if in_place:  # refreshed where they are, and nobody said so
        weights.version, weights.salt = 1, 50
    else:
        engine.set_weights(FakeWeights(1, salt=50))
    (completion,) = run(engine).values()
    before = greedy_oracle(PROMPT, 4)
    assert completion.token_ids == before + greedy_oracle([*PROMPT, *before], 6, salt=50)
    assert completion.weight_version == 0  # of its first token


def test_release_drops_the_pool_and_what_runs_is_recomputed():
    engine = fake_engine()
    engine.add(Request(tuple(PROMPT), greedy(10), id=0))
    engine.step()
    engine.release()
    (completion,) = run(engine).values()
    assert completion.token_ids == greedy_oracle(PROMPT, 10)
    assert engine.stats().tokens_hit == 0


def test_an_idle_step_runs_a_forward_without_tokens():
    engine = fake_engine((None, 6))
    engine.idle_step()
    assert engine.decoder.batches[-1].num_tokens == 0
    assert engine.stats().forwards == 1


def test_a_step_that_fails_can_be_repeated(monkeypatch):
    engine = fake_engine()
    engine.add(Request(tuple(PROMPT), SamplingParams(max_new_tokens=5, temperature=0.0, num_samples=2), id=0))
    engine.step()
    forward = engine.decoder.forward
    monkeypatch.setattr(engine.decoder, "forward", lambda *args: (forward(*args), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.undo()
    done = run(engine)
    assert [c.token_ids for c in done.values()] == [greedy_oracle(PROMPT, 5)] * 2


# -- the door and the ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "empty prompt"),
        ([1, VOCAB], {}, f"prompt id {VOCAB}; allowed: 0 to {VOCAB - 1}"),
        ([1, -1], {}, "prompt id -1"),
        (PROMPT, {"max_new_tokens": 413}, "100 prompt tokens + max_new_tokens=413; allowed: 512"),
        ([1], {"stop": ("x",)}, "without a tokenizer"),
        ([1], {"bad_token_ids": (-1,)}, "bad_token_ids holds -1"),
        ([1], {"allowed_token_ids": (3,), "bad_token_ids": (3,)}, "no token to draw"),
        ([1], {"allowed_token_ids": (2,), "min_new_tokens": 1}, "no token to draw"),
    ],
)
def test_a_bad_request_fails_alone(prompt, settings, message):
    engine = fake_engine(eos_token_ids=(2,))
    sampling = SamplingParams(**{"max_new_tokens": 4, **settings})
    bad, good = Request(tuple(prompt), sampling, id=0), Request((5, 6), greedy(4, ignore_eos=True), id=1)
    done = run(engine, bad, good)
    assert message in done[0, 0].error
    assert "\n" not in done[0, 0].error
    assert (done[0, 0].finish_reason, done[0, 0].token_ids) == ("abort", ())
    assert done[1, 0].token_ids == greedy_oracle([5, 6], 4)
    assert done[1, 0].error is None


def test_a_prompt_larger_than_the_cache_is_refused_with_the_numbers_and_others_finish():
    engine = fake_engine(blocks=4, block_size=4)
    done = run(
        engine, Request(tuple(PROMPT[:20]), greedy(1), id=0), *(Request(tuple(PROMPT[:9]), greedy(2), id=i) for i in (1, 2))
    )
    assert "5 KV blocks of 4" in done[0, 0].error
    assert "the pool has 4" in done[0, 0].error
    assert done[1, 0].token_ids == done[2, 0].token_ids == greedy_oracle(PROMPT[:9], 2)


def test_no_new_tokens_is_an_empty_completion_of_reason_length():
    engine = fake_engine()
    (samples,) = engine.generate([PROMPT], SamplingParams(max_new_tokens=0, num_samples=2))
    assert [(c.token_ids, c.finish_reason, c.error) for c in samples] == [((), "length", None)] * 2
    assert engine.stats().forwards == 0


def test_each_of_several_eos_ids_stops_and_is_kept():
    for eos in (3, 9):
        engine = fake_engine(logits=np.eye(VOCAB, dtype=np.float32)[eos], eos_token_ids=(3, 9))
        (out,) = engine.generate([[5]], greedy(20))
        assert (out[0].token_ids, out[0].finish_reason) == ((eos,), "stop")
        (out,) = engine.generate([[5]], greedy(20, ignore_eos=True))
        assert (out[0].token_ids, out[0].finish_reason) == ((eos,) * 20, "length")
        (out,) = engine.generate([[5]], greedy(20, ignore_eos=True, stop_token_ids=(eos,)))
        assert (out[0].token_ids, out[0].finish_reason) == ((eos,), "stop")


def test_min_new_tokens_counts_output_and_rules_out_every_stop_id():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[[0, 3, 9]] = 50.0, 40.0, 30.0
    logits[VOCAB - 1] = 20.0
    engine = fake_engine(logits=logits, eos_token_ids=(0, 3))  # 0 is an id like any other
    (out,) = engine.generate([PROMPT], greedy(20, min_new_tokens=5, stop_token_ids=(9,)))
    assert out[0].token_ids == (VOCAB - 1,) * 5 + (0,)
    assert all(np.isfinite(out[0].logprobs_raw))
    assert out[0].logprobs_raw[0] == pytest.approx(-30.0, abs=1e-3)


def test_rows_beyond_the_tokenizer_are_never_drawn_nor_in_the_sum():
    logits = np.zeros(VOCAB, dtype=np.float32)
    logits[20:] = 90.0
    engine = fake_engine(logits=logits, weights=FakeWeights(vocab_limit=20), vocab_limit=20)
    (greedily,) = engine.generate([[5]], greedy(3))
    (drawn,) = engine.generate([[5]], SamplingParams(max_new_tokens=30))
    assert greedily[0].token_ids == (0, 0, 0)
    assert max(drawn[0].token_ids) < 20
    assert drawn[0].logprobs == pytest.approx([-np.log(20)] * 30, abs=1e-6)
    (refused,) = engine.generate([[5]], SamplingParams(allowed_token_ids=(20, 21)))
    assert "no token to draw" in refused[0].error


def test_the_last_token_may_be_an_eos():
    engine = fake_engine(logits=np.eye(VOCAB, dtype=np.float32)[3], eos_token_ids=(3,))
    (out,) = engine.generate([[5]], greedy(1))
    assert out[0].finish_reason == "stop"


class Letters:
    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(chr(ord("A") + token) for token in token_ids)


def test_a_stop_string_across_tokens_cuts_the_text_and_keeps_the_ids():
    expected = greedy_oracle(PROMPT, 12)
    text = Letters().decode(expected, skip_special_tokens=True)
    engine = fake_engine(tokenizer=Letters())
    (out,) = engine.generate([PROMPT], greedy(12, stop=(text[3:6],)))
    end = text.find(text[3:6]) + 3
    assert out[0].token_ids == expected[:end]
    assert (out[0].text, out[0].finish_reason) == (text[: end - 3], "stop")
    (out,) = engine.generate([PROMPT], greedy(12))
    assert (out[0].text, out[0].finish_reason) == (text, "length")


def test_abort_returns_what_every_sample_has():
    engine = fake_engine()
    engine.add(Request(tuple(PROMPT), greedy(10, num_samples=2), id=4))
    engine.add(Request(tuple(PROMPT[:5]), greedy(3), id=5))
    for _ in range(3):
        engine.step()
    assert engine.abort(4)
    assert not engine.abort(4)
    done = run(engine)
    assert [done[4, i].token_ids for i in (0, 1)] == [greedy_oracle(PROMPT, 3)] * 2
    assert [done[4, i].finish_reason for i in (0, 1)] == ["abort"] * 2
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_abort_before_the_first_step_covers_all_samples():
    engine = fake_engine()
    engine.add(Request((1, 2), greedy(10, num_samples=3), id=4))
    engine.abort(4)
    assert [c.finish_reason for c in engine.step()] == ["abort"] * 3
    assert not engine.has_work


def test_an_id_in_use_is_refused():
    engine = fake_engine()
    engine.add(Request((1,), greedy(4), id=0))
    with pytest.raises(ValueError, match="id=0 is in use"):
        engine.add(Request((1,), greedy(4), id=0))
    assert engine.add(Request((1,), greedy(4))) == 1


def test_logits_that_are_not_finite_end_that_sample_with_an_error():
    engine = fake_engine(logits=np.full(VOCAB, np.nan, dtype=np.float32))
    (out,) = engine.generate([PROMPT], SamplingParams(num_samples=2))
    for completion in out:
        assert completion.finish_reason == "abort"
        assert "position 100 are not finite" in completion.error
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_generate_keeps_the_completions_of_other_requests():
    engine = fake_engine()
    engine.add(Request((1, 2), greedy(2), id=7))
    (out,) = engine.generate([PROMPT], greedy(5))
    assert out[0].token_ids == greedy_oracle(PROMPT, 5)
    assert [c.request_id for c in engine.step()] == [7]


def test_generate_that_fails_leaves_nothing_behind(monkeypatch):
    engine = fake_engine()
    monkeypatch.setattr(engine.decoder, "forward", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.generate([PROMPT], greedy(5))
    assert not engine.has_work
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_keys_name_the_streams():
    engine, sampling = fake_engine(), SamplingParams(max_new_tokens=8)
    a, b = engine.generate([PROMPT, PROMPT], sampling)
    assert a[0].token_ids != b[0].token_ids
    (again,) = engine.generate([PROMPT], sampling, keys=[1])
    assert again[0].token_ids == b[0].token_ids
    with pytest.raises(ValueError, match="2 keys for 1 prompts"):
        engine.generate([PROMPT], sampling, keys=[1, 2])


# -- scoring ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", WINDOWS)
def test_scores_are_the_log_softmax_of_each_position(windows):
    engine = fake_engine(windows, block_size=4, max_step_tokens=9)
    sequences, starts = [PROMPT[:31], PROMPT[:2], PROMPT[:40]], [1, 2, 17]
    engine.generate([PROMPT[:30]], greedy(2))  # a prefix that must not be skipped where it is scored
    scored = engine.score(sequences, starts=starts, temperature=0.7, hidden=True)
    for tokens, start, result in zip(sequences, starts, scored):
        rows = [logits_of(tokens[:i], windows, 0) for i in range(start, len(tokens))]
        z = torch.tensor(np.array(rows, dtype=np.float32).reshape(-1, VOCAB))
        expected = (z / 0.7).log_softmax(-1).gather(-1, torch.tensor(tokens[start:])[:, None]).squeeze(-1)
        assert result.logprobs.dtype == torch.float32
        torch.testing.assert_close(result.logprobs, expected, atol=1e-5, rtol=0)
        if len(expected):
            torch.testing.assert_close(result.hidden, z)
    assert engine.stats().tokens_hit > 0  # before the start of the third
    assert not engine.has_work


def test_scoring_among_running_requests_changes_nothing():
    engine = fake_engine(blocks=9, block_size=4)
    engine.add(Request(tuple(PROMPT[:10]), greedy(12), id=0))
    engine.step()
    (scored,) = engine.score([PROMPT[:30]])
    assert len(scored.logprobs) == 29
    (completion,) = run(engine).values()
    assert completion.token_ids == greedy_oracle(PROMPT[:10], 12)


@pytest.mark.parametrize(
    ("ids", "start", "message"),
    [([], 1, "empty prompt"), ([1, 2], 0, "start=0"), ([1, 2], 3, "start=3"), ([99], 1, "prompt id 99")],
)
def test_what_cannot_be_scored_is_refused(ids, start, message):
    with pytest.raises(ValueError, match=message):
        fake_engine().score([ids], starts=[start])


def test_logits_are_formed_a_few_rows_at_a_time(monkeypatch):
    from inference_v2 import runner
    from inference_v2.head import Head

    seen = []
    logits = Head.logits
    monkeypatch.setattr(runner, "LOGIT_BYTES", 8 * 4 * VOCAB)
    monkeypatch.setattr(Head, "logits", lambda self, hidden, into=None: seen.append(len(hidden)) or logits(self, hidden))
    engine = fake_engine()
    (scored,) = engine.score([PROMPT])
    assert max(seen) == 8
    assert len(scored.logprobs) == 99
    engine.generate([PROMPT], SamplingParams(max_new_tokens=2, num_samples=20))
    assert max(seen) == 8


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_a_score_under_a_senseless_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match=r"temperature=.*allowed: finite and >= 0"):
        fake_engine().score([[1, 2, 3]], temperature=temperature)


def test_scoring_no_token_of_a_sequence_gives_no_rows_of_either_kind():
    (scored,) = fake_engine().score([[1, 2, 3]], starts=[3], hidden=True)
    assert (scored.logprobs.shape, scored.hidden.shape) == ((0,), (0, VOCAB))


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("blocks", [None, 12])
@pytest.mark.parametrize("max_running", [2, 256])
def test_samples_of_a_prompt_share_its_prefill_when_they_are_scored(windows, prefix_caching, blocks, max_running):
    """Also where not all of them fit or may run at once, and next to sequences of other prompts and none at all."""
    blocks = None if blocks is None or windows != (None,) else blocks
    engine = fake_engine(windows, blocks=blocks, block_size=4, max_step_tokens=9, prefix_caching=prefix_caching,
                         max_running=max_running)  # fmt: skip
    ends = [(1, 2, 3), (4,), (1, 2, 5, 6, 7), ()]
    sequences = [*([*PROMPT[:30], *end] for end in ends), PROMPT[5:17], [9, 8, 7], [9, 6]]
    starts = [30, 30, 30, 30, 3, 1, 1]
    for tokens, start, result in zip(
        sequences, starts, engine.score(sequences, starts=starts, logprobs=False, hidden=True), strict=True
    ):
        rows = [logits_of(tokens[:i], windows, 0) for i in range(start, len(tokens))]
        assert len(result.logprobs) == 0
        assert torch.equal(result.hidden, torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, VOCAB)))
    stats = engine.stats()
    if blocks is None and max_running == 256:
        assert stats.prompt_tokens_prefilled == 29 + 3 + 1 + 5 + 11 + 2 + 1
    assert stats.blocks_free == stats.blocks_total
    assert not engine.has_work


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_score_job_that_is_aborted_at_any_moment_leaves_the_others_alone(which, steps):
    """Jobs with a common prefix wait for it; the first of them is not its owner."""
    sequences = [[*PROMPT[:20], 5 + i, 6, 7, 8] for i in range(3)]
    want = fake_engine().score(sequences, starts=[21] * 3)
    engine = fake_engine(max_step_tokens=6)
    jobs = engine.add_scores(sequences, starts=[21] * 3)
    for _ in range(steps):
        engine.step()
    alive = jobs[which].request_id in engine._jobs
    assert engine.abort(jobs[which].request_id) == alive
    while engine.has_work:
        engine.step()
    for i, (job, expected) in enumerate(zip(jobs, want)):
        if i != which or not alive:
            assert torch.equal(job.scored.logprobs, expected.logprobs)
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total
    assert not engine._jobs


def test_a_score_that_fails_leaves_nothing_behind(monkeypatch):
    engine = fake_engine(block_size=4, max_step_tokens=9)
    sequences = [[*PROMPT[:30], end] for end in (1, 2)]
    step = engine.step
    calls = []

    def fails():
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("boom")
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", fails)
        with pytest.raises(ArithmeticError):
            engine.score(sequences, starts=[30, 30])
    assert not engine.has_work
    assert engine.stats().blocks_free == engine.stats().blocks_total
    assert len(engine.score(sequences, starts=[30, 30])) == 2


def test_hidden_states_alone_form_no_logits(monkeypatch):
    from inference_v2.head import Head

    monkeypatch.setattr(Head, "logits", lambda self, hidden: pytest.fail("logits were formed"))
    (scored,) = fake_engine().score([PROMPT[:9]], logprobs=False, hidden=True)
    assert (scored.logprobs.shape, scored.hidden.shape) == ((0,), (8, VOCAB))


# -- edges -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (1,), (3,), (None, 1, 2)])
@pytest.mark.parametrize("block_size", [1, 2, 512])
def test_any_block_size_and_windows_smaller_than_a_block(windows, block_size):
    engine = fake_engine(windows, block_size=block_size, max_step_tokens=5)
    outs = engine.generate([PROMPT[:20], PROMPT[:20], PROMPT[3:4]], greedy(9, num_samples=2))
    for prompt, samples in zip((PROMPT[:20], PROMPT[:20], PROMPT[3:4]), outs):
        assert [c.token_ids for c in samples] == [greedy_oracle(prompt, 9, windows)] * 2
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_a_cache_of_one_block_serves_one_request_after_the_other():
    outs = fake_engine(blocks=1, block_size=4).generate([[1, 2], [3], [1, 2]], greedy(3, num_samples=2))
    assert [c.token_ids for samples in outs for c in samples] == [
        greedy_oracle(prompt, 3) for prompt in ([1, 2], [3], [1, 2]) for _ in range(2)
    ]


def test_a_cache_that_holds_no_block_is_refused():
    with pytest.raises(ValueError, match="cache_bytes=1; allowed: >= 128"):
        fake_engine(cache_bytes=1)


@pytest.mark.parametrize(("prompt", "new", "served"), [(7, 1, True), (8, 0, True), (1, 7, True), (8, 1, False), (9, 0, False)])
def test_max_model_len_is_reached_and_not_passed(prompt, new, served):
    (out,) = fake_engine(max_model_len=8).generate([PROMPT[:prompt]], greedy(new))
    assert out[0].token_ids == (greedy_oracle(PROMPT[:prompt], new) if served else ())
    assert (out[0].error is None) == served


def test_a_version_that_comes_back_does_not_bring_its_old_cache():
    engine = fake_engine(weights=FakeWeights(0, salt=0))
    engine.generate([PROMPT], greedy(4))
    for weights in (FakeWeights(1, salt=50), FakeWeights(0, salt=70)):
        engine.set_weights(weights)
        (out,) = engine.generate([PROMPT], greedy(4))
        assert out[0].token_ids == greedy_oracle(PROMPT, 4, salt=weights.salt)


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_at_any_moment_of_a_fork_frees_everything_and_disturbs_nobody(steps):
    engine = fake_engine(blocks=24, block_size=4, max_running=4, max_step_tokens=8)
    engine.add(Request(tuple(PROMPT[:14]), SamplingParams(max_new_tokens=9, num_samples=6), id=0))
    engine.add(Request(tuple(PROMPT[:14]), greedy(9, num_samples=2), id=1))
    done = [completion for _ in range(steps) for completion in engine.step()]
    engine.abort(0)
    while engine.has_work:
        done += engine.step()
    assert sorted((c.request_id, c.sample_index) for c in done) == [(0, i) for i in range(6)] + [(1, 0), (1, 1)]
    assert [c.token_ids for c in done if c.request_id == 1] == [greedy_oracle(PROMPT[:14], 9)] * 2
    assert engine.stats().blocks_free == engine.stats().blocks_total


def test_a_log_of_steps_can_be_replayed():
    """Every decision is a function of the calls: a second engine given the same ones computes the same batches."""

    def play(log):
        engine = fake_engine((None, 6), blocks=None, cache_bytes=2000, block_size=4, max_running=5, max_step_tokens=13)
        done = []
        for call, *args in log:
            result = getattr(engine, call)(*args)
            done += result if call == "step" else []
        while engine.has_work:
            done += engine.step()
        assert engine.stats().preemptions > 0
        batches = [
            (b.token_ids.tolist(), b.positions.tolist(), [g.block_tables.tolist() for g in b.groups])
            for b in engine.decoder.batches
        ]
        return batches, done, engine.stats()

    rng = random.Random(8)
    sampling = SamplingParams(max_new_tokens=10, num_samples=2)
    log = [("add", Request(tuple(PROMPT[: rng.randint(1, 14)]), sampling, key=i, id=i)) for i in range(12)]
    log += [("abort", rng.randrange(12)) for _ in range(3)] + [("step",)] * 40
    rng.shuffle(log)
    assert play(log) == play(log)
