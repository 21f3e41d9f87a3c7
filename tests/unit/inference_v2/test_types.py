"""What SamplingParams and Request accept: numbers of other libraries as Python's, nothing that would be misread later."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_decoder import fake_engine, greedy, greedy_oracle

from inference_v2 import Request, SamplingParams


def test_numbers_of_other_libraries_become_pythons():
    params = SamplingParams(
        max_new_tokens=np.int64(3),
        top_k=np.int32(2),
        seed=np.uint64(2**63 - 1),
        temperature=np.float32(0.5),
        num_samples=torch.tensor(2),
    )
    assert params == SamplingParams(max_new_tokens=3, top_k=2, seed=2**63 - 1, temperature=0.5, num_samples=2)
    assert {type(v) for v in (params.max_new_tokens, params.top_k, params.seed, params.num_samples)} == {int}
    lists = SamplingParams(allowed_token_ids=np.array([1, 2]), stop_token_ids=[3], stop=["x"])
    assert lists == SamplingParams(allowed_token_ids=(1, 2), stop_token_ids=(3,), stop=("x",))
    assert Request(torch.tensor([1, 2]), params, key=np.int64(-3)) == Request((1, 2), params, key=-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 2.5),
        ("max_new_tokens", -1),
        ("top_k", -1),
        ("top_k", "5"),
        ("temperature", None),
        ("temperature", "1"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1e-9),
        ("top_p", 0.0),
        ("top_p", float("nan")),
        ("min_p", 1.5),
        ("min_new_tokens", 300),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e300),
        ("presence_penalty", -1e300),
        ("frequency_penalty", float("nan")),
        ("seed", 2**63),
        ("seed", -1),
        ("num_samples", 0),
        ("stop", "END"),
        ("stop", 5),
        ("stop", ("",)),
        ("stop", (5,)),
        ("stop_token_ids", 5),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (1.5,)),
        ("bad_token_ids", "ab"),
    ],
)
def test_a_setting_of_another_type_or_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^sampling: {name}\W.*; allowed: ") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"prompt_ids": (1.5,)}, {"prompt_ids": "ab"}, {"prompt_ids": 5}, {"key": "a"}, {"key": 1.0}])
def test_a_request_that_is_not_of_integers_is_refused(changes):
    with pytest.raises(ValueError, match=r"^request: \w+\W.*; allowed: "):
        Request(**{"prompt_ids": (1,), "sampling": SamplingParams(), **changes})


@pytest.mark.parametrize("settings", [{"top_k": 2**70}, {"temperature": 1e300}, {"seed": np.int64(5)}, {"top_k": np.int32(3)}])
def test_extreme_settings_do_not_take_the_batch_with_them(settings):
    engine = fake_engine()
    engine.add(Request((5, 6), greedy(3), id=0))
    engine.add(Request((7,), SamplingParams(max_new_tokens=3, **settings), id=1))
    done = {completion.request_id: completion for _ in range(5) for completion in engine.step()}
    assert done[0].token_ids == greedy_oracle([5, 6], 3)
    assert (done[1].error, len(done[1].token_ids)) == (None, 3)


@pytest.mark.parametrize(
    "settings", [{"temperature": 1e-6}, {"temperature": 5e-324}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_k": 1}]
)
def test_the_narrowest_settings_are_greedy(settings):
    (out,) = fake_engine().generate([[5, 6]], SamplingParams(max_new_tokens=8, **settings))
    assert out[0].token_ids == greedy_oracle([5, 6], 8)
    assert all(np.isfinite([*out[0].logprobs, *out[0].logprobs_raw]))


def test_a_prompt_that_is_not_of_integers_leaves_no_other_prompt_behind():
    engine = fake_engine()
    with pytest.raises(ValueError, match="prompt_ids"):
        engine.generate([[1, 2], ["x"]], greedy(3))
    assert not engine.has_work
