"""Decodes in static buffers, as a CUDA graph replays them, against the ordinary path: tokens, log-probs, padding, addresses."""

from __future__ import annotations

import pytest
import torch
from tiny import save_tiny

from inference_v2 import InferenceEngine, SamplingParams
from inference_v2.batch import Batch, GroupMeta
from inference_v2.config import EngineConfig
from inference_v2.graphs import LEAST_WIDTH, DecodeGraphs, StaticDecode
from inference_v2.types import Request

SMALL = EngineConfig(block_size=4, max_model_len=200, debug_poison=True, cache_bytes=2**22, kernels="reference")
PROMPTS = [[3 + i, *range(5, 5 + n)] for i, n in enumerate((0, 3, 7, 20, 33))]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_new_tokens=12),
    "sampled": SamplingParams(temperature=0.9, max_new_tokens=12, num_samples=3, seed=5),
    "truncated": SamplingParams(temperature=1.1, top_k=20, top_p=0.8, min_p=0.01, max_new_tokens=9),
    "edited": SamplingParams(temperature=1.0, repetition_penalty=1.3, min_new_tokens=4, max_new_tokens=9),
}


@pytest.fixture(scope="module", params=["llama", "exaone4"])  # one cache group, and two with a window
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_tiny(path, request.param, tokenizer=None)
    return path


def open_engine(folder, *, static: bool, **settings) -> InferenceEngine:
    engine = InferenceEngine.from_pretrained(folder, config=SMALL.model_copy(update=settings), device="cpu")
    engine._runner._static_decodes = static
    return engine


@pytest.fixture
def forwards(monkeypatch) -> list[tuple[int, int]]:
    """(rows of the bucket, width of its tables) of every decode that ran in static buffers."""
    seen: list[tuple[int, int]] = []
    forward = DecodeGraphs._forward

    def watched(self, buffers: StaticDecode):
        seen.append(tuple(buffers.batch.groups[0].block_tables.shape))
        return forward(self, buffers)

    monkeypatch.setattr(DecodeGraphs, "_forward", watched)
    return seen


def completions(engine: InferenceEngine, sampling: SamplingParams, prompts=PROMPTS) -> list:
    found = [c for group in engine.generate(prompts, sampling) for c in group]
    assert all(c.error is None for c in found)
    return [(c.token_ids, torch.tensor([*c.logprobs, *c.logprobs_raw])) for c in found]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_static_buffers_give_the_ordinary_tokens(folder, sampling: str, forwards) -> None:
    want = completions(open_engine(folder, static=False), SAMPLINGS[sampling])
    assert not forwards
    got = completions(open_engine(folder, static=True), SAMPLINGS[sampling])
    assert {rows for rows, _ in forwards} & {4, 8, 16}  # buckets with padding
    for (ids, numbers), (expected, expected_numbers) in zip(got, want, strict=True):
        assert ids == expected
        torch.testing.assert_close(numbers, expected_numbers, rtol=0, atol=1e-5)


def test_a_step_that_is_not_a_plain_decode_takes_the_ordinary_path(folder, forwards) -> None:
    engine = open_engine(folder, static=True)
    engine.score([PROMPTS[4]])
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=1))
    assert not forwards
    engine.generate([PROMPTS[4]], SamplingParams(max_new_tokens=3))
    assert forwards == [(1, LEAST_WIDTH)] * 2
    engine.generate([PROMPTS[4]], SamplingParams(max_new_tokens=2, num_samples=2))  # a prefix hit leaves the leader one token
    assert forwards[2:] == [(2, LEAST_WIDTH)]


def test_prefills_between_decodes_preemptions_and_longer_tables_change_nothing(folder, forwards, monkeypatch) -> None:
    monkeypatch.setattr("inference_v2.graphs.LEAST_WIDTH", 2)
    sampling = SamplingParams(temperature=0.8, max_new_tokens=30)
    tokens = []
    for static in (False, True):
        engine = open_engine(folder, static=static, cache_bytes=45 * 2 * 4 * 4 * 2 * 16 * 4, max_running=3)
        done = {}
        for i, prompt in enumerate(PROMPTS):
            engine.add(Request(tuple(prompt), sampling, key=i))
            done |= {c.request_id: c.token_ids for c in engine.step()}
        while engine.has_work:
            done |= {c.request_id: c.token_ids for c in engine.step()}
        tokens.append(done)
    assert tokens[0] == tokens[1]
    assert {width for _, width in forwards} == {2, 8, 32}


def test_buffers_are_used_again_until_something_has_moved(folder) -> None:
    engine, sampling = open_engine(folder, static=True), SAMPLINGS["greedy"]
    completions(engine, sampling)
    first = engine._runner._graphs
    addresses = {key: [t.data_ptr() for t in buffers._device] for key, (buffers, _) in first._steps.items()}
    completions(engine, sampling)
    assert engine._runner._graphs is first
    assert addresses.items() <= {k: [t.data_ptr() for t in b._device] for k, (b, _) in first._steps.items()}.items()
    engine._weights.placement += 1
    completions(engine, sampling)
    second = engine._runner._graphs
    assert second is not first
    engine.release()
    completions(engine, sampling)
    assert engine._runner._graphs not in (first, second)


def test_free_counts_as_a_move_and_a_refresh_in_place_does_not(folder) -> None:
    from inference_v2.loading import load_model

    engine, source = open_engine(folder, static=True), load_model(folder).source
    weights = engine._weights
    before = weights.placement
    weights.refresh(source, version=1)
    assert weights.placement == before
    weights.free()
    assert weights.placement == before + 1


def test_rows_after_the_steps_are_padding_whatever_was_there_before() -> None:
    buffers = StaticDecode(4, 3, [7, 9], 4, torch.device("cpu"))
    for n in (4, 1):
        tables = torch.full((n, 2), 5, dtype=torch.int32)
        group = GroupMeta(tables, torch.full((n,), 21))
        lens = torch.arange(n + 1, dtype=torch.int32)
        step = Batch(torch.full((n,), 11), torch.full((n,), 6), lens, lens[1:] * 0 + 7, (group, group), torch.arange(n))
        buffers.write(
            step, (torch.ones(n), torch.rand(n).double(), torch.ones(n).long(), torch.rand(n).double(), torch.rand(n).double())
        )
    batch = buffers.batch
    assert batch.token_ids.tolist() == [11, 0, 0, 0]
    assert batch.positions.tolist() == [6, 0, 0, 0]
    assert batch.context_lens.tolist() == [7, 1, 1, 1]
    assert batch.cu_query_lens.tolist() == [0, 1, 2, 3, 4]
    for group, scratch in zip(batch.groups, (7, 9)):
        assert group.slots.tolist() == [21] + [4 * scratch] * 3
        assert group.block_tables[0, :2].tolist() == [5, 5]
        assert group.block_tables[1:, 0].tolist() == [scratch] * 3
    temperature, _, top_k, top_p, min_p = buffers.settings
    assert temperature.tolist() == [1, 0, 0, 0]
    assert top_k.tolist() == [1, 0, 0, 0]
    assert top_p.tolist()[1:] == [1, 1, 1]
    assert min_p.tolist()[1:] == [0, 0, 0]
