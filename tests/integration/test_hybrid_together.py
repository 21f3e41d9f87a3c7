"""Ranks that generate a step's prompts together: the tokens of one rank, whoever computes them, and shares that depend on nothing
but the tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from hybrid_cases import cross_entropy, make_engine, pack, ragged_sequences
from tiny import save_tiny

from hybrid import HybridEngine
from hybrid.exchange import _pack, _unpack
from hybrid.runner import LockStep
from hybrid.sharding import gathered
from hybrid.shares import deal
from inference_v2 import SamplingParams
from inference_v2.types import Completion

SAMPLING = SamplingParams(max_new_tokens=9, num_samples=2, temperature=0.8, seed=3)
PROMPTS = [[5 + i] * (1 + 7 * (i % 3)) for i in range(12)]
KEYS = [1000 + 7 * i for i in range(12)]
FEW_SEATS = {"max_running": 4, "max_step_tokens": 64}
INVARIANT = FEW_SEATS | {"batch_invariant": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    save_tiny(path, "qwen3")
    return path


def outcomes(found: dict[int, list[Completion]]) -> dict[int, list[tuple]]:
    return {
        i: [
            (c.prompt_ids, c.sample_index, c.token_ids, c.logprobs, c.logprobs_raw, c.finish_reason, c.text, c.error)
            for c in samples
        ]
        for i, samples in found.items()
    }


def together(folder: str, dtype: str, count: int, rollout: dict[str, Any]) -> dict[str, Any]:
    engine = make_engine(folder, compute_dtype=dtype, rollout=rollout)
    found = engine.generate_together(PROMPTS[:count], SAMPLING, KEYS[:count])
    twice = engine.generate_together(PROMPTS[:count], SAMPLING, KEYS[:count])
    idle = engine.ledger.idle_s
    engine.close()
    return {"found": outcomes(found), "twice": outcomes(twice) == outcomes(found), "idle": idle}


def alone(folder: str, dtype: str, count: int, **settings: Any) -> dict[int, list[tuple]]:
    engine = make_engine(folder, compute_dtype=dtype, rollout={"engine": settings})
    return outcomes(dict(enumerate(engine.generate(PROMPTS[:count], SAMPLING, KEYS[:count]))))


def check(results: list[dict[str, Any]], expected: dict[int, list[tuple]], *, bits: bool) -> None:
    """Every prompt once, with the tokens of one rank, on the rank that the tokens say."""
    found = {i: samples for result in results for i, samples in result["found"].items()}
    assert sum(len(result["found"]) for result in results) == len(found) == len(expected)
    tokens = [sum(len(s[0]) + len(s[2]) for s in expected[i]) for i in sorted(expected)]
    assert [sorted(result["found"]) for result in results] == deal(tokens, 2)
    for i, samples in expected.items():
        for given, wanted in zip(found[i], samples, strict=True):
            assert (given[:3], given[5:]) == (wanted[:3], wanted[5:])
            assert given[3] == pytest.approx(wanted[3], abs=0 if bits else 1e-5)
            assert given[4] == pytest.approx(wanted[4], abs=0 if bits else 1e-5)
    assert all(result["twice"] or not bits for result in results)
    assert all(result["idle"] >= 0 for result in results)


@pytest.mark.parametrize("count", [12, 1, 0])  # with 1, a rank has none; with 0, both
@pytest.mark.parametrize("how", ["steal", "static", "stream"])
def test_two_ranks_draw_the_tokens_of_one(pool2, folder, how, count):
    rollout = {
        "steal": {"gather": "full", "steal": "on", "engine": FEW_SEATS},
        "static": {"gather": "full", "steal": "off"},
        "stream": {"gather": "stream"},
    }[how]
    check(pool2.run(together, folder, "float32", count, rollout), alone(folder, "float32", count), bits=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_under_batch_invariance_not_a_bit_depends_on_who_computes_what(pool2, folder, dtype):
    """So there requests are taken over by default."""
    expected = alone(folder, dtype, 12, batch_invariant=True)
    for steal in ("on", "off"):
        rollout = {"gather": "full", "steal": steal, "engine": INVARIANT}
        check(pool2.run(together, folder, dtype, 12, rollout), expected, bits=True)


def test_a_refused_prompt_ends_alone(pool2, folder):
    """Prompts of 1, 8 and 15 tokens, of which the first leaves room for 9 new ones."""
    rollout = {"steal": "on", "gather": "full", "engine": {"max_model_len": 16}}
    results = pool2.run(together, folder, "float32", 3, rollout)
    samples = {i: s for result in results for i, s in result["found"].items()}
    assert [samples[i][0][5] == "abort" for i in range(3)] == [False, True, True]
    assert "8 prompt tokens" in samples[1][0][7]


# -- requests that another rank has not started


def slow_second_rank(folder: str, steal: str) -> dict[str, Any]:
    """Rank 1 computes nothing before rank 0 has run dry: rank 0 sets a key when it waits for rank 1."""
    engine = make_engine(folder, rollout={"gather": "full", "steal": steal, "engine": INVARIANT})
    key, store = f"dry/{steal}", dist.distributed_c10d._get_default_store()
    added = []
    with engine.generating() as runner:
        add, step, meet = runner.add, runner._engine.step, runner._lock_step.meet
        runner.add = lambda request: added.append(request.key) or add(request)
        if engine.rank == 0:
            runner._lock_step.meet = lambda: (store.set(key, "1"), meet())
        else:
            runner._engine.step = lambda: (store.wait([key]), step())[1]
        found = runner.generate_together(PROMPTS, SAMPLING, KEYS)
    store.delete_key(key)
    return {"found": outcomes(found), "twice": True, "idle": engine.ledger.idle_s, "added": len(added)}


def test_a_rank_that_runs_dry_takes_over_what_the_other_has_not_started(pool2, folder):
    expected = alone(folder, "float32", 12, batch_invariant=True)
    results = pool2.run(slow_second_rank, folder, "auto")
    check(results, expected, bits=True)
    assert [r["added"] for r in results] == [10, 2]  # two requests of two samples have a seat
    assert results[0]["idle"] > 0


def fails(folder: str, steal: str, where: str) -> tuple[str, bool]:
    """Rank 1 fails at the second call; then both train and generate again."""
    engine = make_engine(folder, rollout={"gather": "full", "steal": steal, "engine": FEW_SEATS})
    caught = ""
    try:
        with engine.generating() as runner:
            if engine.rank == 1:
                target = {"step": runner._engine, "add": runner, "generate_together": runner}[where]
                plain, calls = getattr(target, where), []

                def broken(*args):
                    calls.append(1)
                    if where == "generate_together" or len(calls) == 2:
                        raise ArithmeticError("boom")
                    return plain(*args)

                setattr(target, where, broken)
            runner.generate_together(PROMPTS, SAMPLING, KEYS)
    except (ArithmeticError, RuntimeError) as error:
        caught = f"{type(error).__name__}: {error}"
    engine.forward_backward([pack(ragged_sequences(2))], cross_entropy)
    engine.optim_step()
    found = engine.generate_together(PROMPTS[:3], SAMPLING, KEYS[:3])
    return caught, not gathered(engine.model.module) and len(found) in (1, 2)


@pytest.mark.parametrize("where", ["step", "add", "generate_together"])
def test_a_rank_that_fails_ends_all(pool2, folder, where):
    results = pool2.run(fails, folder, "on", where)
    assert "generation failed on rank 1" in results[0][0]
    assert results[1] == ("ArithmeticError: boom", True)
    assert results[0][1]


def leaves(folder: str) -> str:
    engine = make_engine(folder, rollout={"gather": "full"})
    try:
        with engine.generating() as runner:
            if engine.rank == 0:
                runner.generate_together(PROMPTS, SAMPLING, KEYS)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_take_part_is_named(pool2, folder):
    first, second = pool2.run(leaves, folder)
    assert "rank 1 left generation; every rank must generate together as often" in first
    assert "generation failed on rank 0" in second


# -- parcels


def test_completions_cross_ranks_bit_for_bit():
    odd = Completion(9, 1, (1, 2), (3, 2**40, 0), (-0.1, 0.0, -1e-300), (-1 / 3, -88.0, -5e-324), "stop", 7, 'é√😀\n"', None)
    none = Completion(9, 0, (1, 2), (), (), (), "abort", 7, None, "too long: ü")
    data = _pack(3, [none, odd]) + _pack(0, [])
    unpacked = _unpack(data, [(), (), (), [1, 2]])
    assert unpacked == [(3, [replace(none, request_id=3), replace(odd, request_id=3)]), (0, [])]


def test_one_rank_generates_as_before(folder, monkeypatch):
    """No meeting, no parcel: what `generate` gives."""
    monkeypatch.setattr(LockStep, "meet", lambda self: pytest.fail("one rank waits for none"))
    engine: HybridEngine = make_engine(folder)
    assert outcomes(engine.generate_together(PROMPTS, SAMPLING, KEYS)) == alone(folder, "float32", 12)
