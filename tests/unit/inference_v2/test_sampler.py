"""The sampler against hand-computed distributions. u is set from outside where a test walks the CDF."""

from __future__ import annotations

import math
import sys
from functools import partial

import numpy as np
import pytest
import torch

from inference_v2 import sampler
from inference_v2.kernels import REFERENCE, cpu_kernels
from inference_v2.kernels import sampling as reference_sampler
from inference_v2.kernels.cpu import BuildError
from inference_v2.sampler import Draw, Drawn, uniforms
from inference_v2.types import SamplingParams

GRID = (np.arange(2000) + 0.5) / 2000


def draw(logits: torch.Tensor, draws: list[Draw]) -> Drawn:
    raise AssertionError("set by the fixture `backend`")


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def backend(request, monkeypatch):
    """Every test runs with every backend's sampler."""
    try:
        sample = cpu_kernels().sample if request.param == "cpu" else REFERENCE.sample
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(sys.modules[__name__], "draw", partial(sampler.draw, sample=sample))


def row(sampling: SamplingParams, *, key=0, sample_index=0, tokens=(0,), num_prompt=1, suppressed=()) -> Draw:
    return Draw(sampling, key, sample_index, list(tokens), num_prompt, suppressed)


@pytest.fixture
def set_uniforms(monkeypatch):
    """Feed these u, in the order of the rows."""

    def feed(values):
        given = iter(np.asarray(values, dtype=np.float64))
        monkeypatch.setattr(sampler, "uniforms", lambda draws: np.array([next(given) for _ in draws]))

    return feed


def distribution(set_uniforms, logits: list[float], sampling: SamplingParams, **context):
    """(share of the CDF grid per token, {token: (logprob, raw)})."""
    set_uniforms(GRID)
    z = torch.tensor([logits]).expand(len(GRID), -1)
    out = draw(z, [row(sampling, **context)] * len(GRID))
    shares = np.bincount(out.token_ids, minlength=len(logits)) / len(GRID)
    return shares, dict(zip(out.token_ids, zip(out.logprobs, out.logprobs_raw)))


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_plain_temperature_sampling_follows_the_softmax(set_uniforms):
    shares, found = distribution(set_uniforms, logs(0.5, 0.3, 0.2), SamplingParams(temperature=0.7))
    z = torch.tensor(logs(0.5, 0.3, 0.2), dtype=torch.float64) / 0.7
    assert shares == pytest.approx(z.softmax(-1).numpy(), abs=1e-3)
    for token, (logprob, raw) in found.items():
        assert logprob == raw == pytest.approx(z.log_softmax(-1)[token].item(), abs=1e-6)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (SamplingParams(top_k=2), [0.3, 0.4]),
        (SamplingParams(top_k=1), [0.4]),
        (SamplingParams(top_p=0.65), [0.3, 0.4]),
        (SamplingParams(top_p=0.75), [0.3, 0.2, 0.4]),
        (SamplingParams(top_p=0.3), [0.4]),
        (SamplingParams(top_p=1e-9), [0.4]),
        (SamplingParams(min_p=0.6), [0.3, 0.4]),
        (SamplingParams(min_p=1.0), [0.4]),
        (SamplingParams(top_k=3, top_p=0.7), [0.3, 0.4]),  # of the mass that top-k leaves: 0.7 / 0.9
        (SamplingParams(top_k=3, top_p=0.8), [0.3, 0.2, 0.4]),
        (SamplingParams(top_k=3, min_p=0.6), [0.3, 0.4]),
        (SamplingParams(top_k=4), [0.3, 0.1, 0.2, 0.4]),
        (SamplingParams(top_k=9), [0.3, 0.1, 0.2, 0.4]),
    ],
)
def test_truncation_keeps_the_right_set_and_both_logprobs_say_so(set_uniforms, sampling, kept):
    probabilities = [0.3, 0.1, 0.2, 0.4]
    shares, found = distribution(set_uniforms, logs(*probabilities), sampling)
    expected = np.array([p if p in kept else 0.0 for p in probabilities]) / sum(kept)
    assert shares == pytest.approx(expected, abs=1e-3)
    for token, (logprob, raw) in found.items():
        assert logprob == pytest.approx(math.log(expected[token]), abs=1e-6)
        assert raw == pytest.approx(math.log(probabilities[token]), abs=1e-6)


def test_top_p_is_the_smallest_set_that_reaches_the_mass(set_uniforms):
    at_boundary, _ = distribution(set_uniforms, logs(0.5, 0.25, 0.125, 0.125), SamplingParams(top_p=0.75))
    assert (at_boundary > 0).tolist() == [True, True, False, False]
    beyond, _ = distribution(set_uniforms, logs(0.5, 0.25, 0.125, 0.125), SamplingParams(top_p=0.7501))
    assert (beyond > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("sampling", [SamplingParams(top_k=3), SamplingParams(top_p=0.5)])
@pytest.mark.parametrize("size", [8, 5000])
def test_ties_at_the_cut_go_to_the_lowest_ids(set_uniforms, sampling, size):
    """8: all tokens are candidates at once. 5000: the tie reaches beyond the first candidates, so all must be sorted."""
    logits = torch.full((size,), 1.0)
    logits[-1] = 1.0 + math.log(3.0)
    shares, _ = distribution(set_uniforms, logits.tolist(), sampling)
    kept = np.flatnonzero(shares)
    assert kept[-1] == size - 1  # the top token
    count = 2 if sampling.top_k else (size + 2) // 2 - 3  # ids 0 to count - 1; the grid of u may step over the last ones
    assert max(count - 3, 1) <= kept[-2] < count


def test_the_fast_path_and_the_full_sort_agree(monkeypatch):
    z = torch.randn(16, 3000, generator=torch.Generator().manual_seed(0)) * 4
    kinds = [SamplingParams(top_k=40), SamplingParams(top_p=0.9), SamplingParams(min_p=0.02), SamplingParams(top_k=20, top_p=0.5)]
    draws = [row(kinds[i % 4], key=i) for i in range(16)]
    fast = draw(z, draws)
    monkeypatch.setattr(reference_sampler, "MIN_CANDIDATES", 3000)
    full = draw(z, draws)
    assert fast.token_ids == full.token_ids
    assert fast.logprobs == pytest.approx(full.logprobs, abs=1e-6)


@pytest.mark.parametrize("tail", [5, 19])  # 19: in a vector of 16, the same lane as 3
def test_a_tail_token_of_probability_1e_8_can_be_drawn(set_uniforms, tail):
    size = 1000
    logits = torch.full((size,), -60.0)
    logits[3], logits[tail] = 0.0, math.log(1e-8)  # same segment, so that an fp32 running sum would lose it
    set_uniforms([1 - 5e-9, 1 - 2e-8, 1 - 2.0**-53])
    out = draw(logits.expand(3, -1), [row(SamplingParams())] * 3)
    assert out.token_ids[:2] == [tail, 3]
    assert out.logprobs[0] == pytest.approx(math.log(1e-8), rel=1e-6)
    assert all(map(math.isfinite, out.logprobs))


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 1000])
def test_the_ends_of_the_unit_interval_draw_tokens_that_have_mass(set_uniforms, size):
    logits = torch.full((size,), -math.inf)
    logits[size // 2] = 0.0
    for sampling in (SamplingParams(), SamplingParams(top_p=0.5)):
        set_uniforms([0.0, 1 - 2.0**-53])
        out = draw(logits.expand(2, -1), [row(sampling)] * 2)
        assert out.token_ids == [size // 2] * 2
        assert out.logprobs == [0.0, 0.0]


def test_a_rest_that_rounding_made_negative_or_too_large_still_picks_a_token_with_mass():
    weights = torch.tensor([[0.0, 1.0, 2.0, 0.0]], dtype=torch.float64)
    for u, expected in ((-1e-17, 1), (0.0, 1), (1.0, 2), (3.0, 2), (3.1, 2)):
        assert reference_sampler._pick(weights, torch.tensor([u], dtype=torch.float64))[0].item() == expected


def test_greedy_takes_the_lowest_of_equal_logits_and_reports_the_raw_logprob():
    z = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    out = draw(z, [row(SamplingParams(temperature=0.0, top_k=3, top_p=0.1))])
    assert out.token_ids == [1]
    assert out.logprobs == [0.0]
    assert out.logprobs_raw[0] == pytest.approx(z[0].log_softmax(-1)[1].item(), abs=1e-6)


def test_a_tiny_temperature_is_greedy_and_finite():
    z = torch.tensor([[3.0, 50.0, -1e4, 49.9]])
    out = draw(z, [row(SamplingParams(temperature=1e-9))])
    assert (out.token_ids, out.logprobs, out.logprobs_raw) == ([1], [0.0], [0.0])


def test_allowed_bad_and_suppressed_ids(set_uniforms):
    logits = logs(0.1, 0.2, 0.3, 0.4)
    for sampling, suppressed, kept in (
        (SamplingParams(allowed_token_ids=(0, 2, 77)), (), {0, 2}),
        (SamplingParams(bad_token_ids=(3, 77)), (), {0, 1, 2}),
        (SamplingParams(allowed_token_ids=(0, 2, 3), bad_token_ids=(3,)), (0, -1), {2}),
    ):
        shares, found = distribution(set_uniforms, logits, sampling, suppressed=suppressed)
        assert set(np.flatnonzero(shares)) == kept
        for token, (_, raw) in found.items():
            assert raw == pytest.approx(logits[token], abs=1e-6)


def test_repetition_counts_prompt_and_output_the_others_the_output_only():
    z = torch.tensor([[2.0, -2.0, 1.5, 0.5, 0.0]])
    context = {"tokens": (0, 1, 2, 2, 3), "num_prompt": 2}
    edited = sampler._edit(z, [row(SamplingParams(repetition_penalty=2.0), **context)])
    assert edited.tolist() == [[1.0, -4.0, 0.75, 0.25, 0.0]]
    edited = sampler._edit(z, [row(SamplingParams(presence_penalty=0.5), **context)])
    assert edited.tolist() == [[2.0, -2.0, 1.0, 0.0, 0.0]]
    edited = sampler._edit(z, [row(SamplingParams(frequency_penalty=0.25), **context)])
    assert edited.tolist() == [[2.0, -2.0, 1.0, 0.25, 0.0]]
    assert z.tolist() == [[2.0, -2.0, 1.5, 0.5, 0.0]]


def test_penalties_come_before_the_temperature_and_leave_the_raw_logprob_alone():
    z = torch.tensor([[2.0, 1.9, 0.0]])
    out = draw(z, [row(SamplingParams(temperature=0.0, repetition_penalty=2.0), tokens=(0,))])
    assert out.token_ids == [1]
    assert out.logprobs_raw[0] == pytest.approx(z[0].log_softmax(-1)[1].item(), abs=1e-6)
    out = draw(z, [row(SamplingParams(temperature=0.5, repetition_penalty=2.0), tokens=(0,))])
    edited = torch.tensor([1.0, 1.9, 0.0]) / 0.5
    token = out.token_ids[0]
    assert out.logprobs[0] == pytest.approx(edited.log_softmax(-1)[token].item(), abs=1e-6)
    assert out.logprobs_raw[0] == pytest.approx((z[0] / 0.5).log_softmax(-1)[token].item(), abs=1e-6)


def test_rows_do_not_depend_on_each_other():
    z = torch.randn(40, 700, generator=torch.Generator().manual_seed(1)) * 3
    kinds = (
        SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(top_k=5), SamplingParams(top_p=0.8, temperature=0.6),
        SamplingParams(repetition_penalty=1.3), SamplingParams(min_p=0.1, bad_token_ids=(4,)), SamplingParams(top_k=300),
    )  # fmt: skip
    draws = [row(kinds[i % len(kinds)], key=i, tokens=range(1 + i)) for i in range(40)]
    together = draw(z, draws)
    for i in (0, 5, 6, 17, 39):
        alone = draw(z[i : i + 1], draws[i : i + 1])
        assert alone.token_ids == [together.token_ids[i]]
        assert alone.logprobs[0] == pytest.approx(together.logprobs[i], abs=1e-6)


def test_logits_that_are_not_finite_are_reported_row_by_row():
    z = torch.zeros(3, 10)
    z[1, 4] = math.nan
    z[2, 4] = math.inf
    for sampling in (
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3),
        SamplingParams(bad_token_ids=(1,)),
    ):
        out = draw(z, [row(sampling)] * 3)
        assert [math.isfinite(a) and math.isfinite(b) for a, b in zip(out.logprobs, out.logprobs_raw)] == [True, False, False]


def test_uniforms_are_a_function_of_seed_key_sample_and_position():
    base = row(SamplingParams(seed=3), key=5, sample_index=1, tokens=range(7))
    others = [
        row(SamplingParams(seed=4), key=5, sample_index=1, tokens=range(7)),
        row(SamplingParams(seed=3), key=6, sample_index=1, tokens=range(7)),
        row(SamplingParams(seed=3), key=5, sample_index=2, tokens=range(7)),
        row(SamplingParams(seed=3), key=5, sample_index=1, tokens=range(8)),
        row(SamplingParams(seed=5), key=3, sample_index=1, tokens=range(7)),
        row(SamplingParams(seed=3), key=5 - 2**64, sample_index=1, tokens=range(6)),
    ]
    together = uniforms([base, *others])
    assert len(set(together.tolist())) == 7
    assert uniforms([base])[0] == together[0]
    assert together[0] == 0.23568896886653257  # pinned: a run must stay repeatable across versions


def test_uniforms_are_uniform_with_53_bits():
    u = uniforms([row(SamplingParams(seed=s), key=k, tokens=range(1)) for s in range(2) for k in range(10000)])
    assert 0.0 <= u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1.0
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-square, 19 degrees of freedom, p = 7e-4
    scaled = u * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert (scaled % 2).mean() == pytest.approx(0.5, abs=0.02)  # the last bit is used
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
