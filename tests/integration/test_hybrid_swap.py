"""The swap on two ranks: the weights that generate are the weights that train, ranks end together, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch
from hybrid_cases import (
    cross_entropy,
    full_weights,
    hf_greedy,
    hf_module,
    live_bytes,
    make_engine,
    pack,
    ragged_sequences,
    with_weights,
)
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny

from hybrid import HybridEngine
from hybrid.sharding import gathered
from inference_v2 import Request, SamplingParams, pages

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5], [11], [20, 21, 22, 23]]
CYCLES = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """family -> folder, made when first asked for."""
    made: dict[str, str] = {}

    def folder(family: str, **overrides) -> str:
        key = f"{family}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = str(tmp_path_factory.mktemp(family))
            save_tiny(made[key], family, **overrides)
        return made[key]

    return folder


def _ids(completions) -> list[tuple[int, ...]]:
    return [c.token_ids for samples in completions for c in samples]


def cycles(folder: str, rollout: dict, path: str | None, stage: int = 3) -> dict:
    """generate -> train -> step, five times, on fixed completions. One rank writes its weights, two compare."""
    engine = make_engine(folder, rollout=rollout, zero_stage=stage)
    engine.model.module.train()
    mine = PROMPTS[engine.rank :: engine.world_size]
    fixed = ragged_sequences(8)[engine.rank :: engine.world_size]
    held, wrong, left = [], [], []
    hf = hf_module(folder)
    for _ in range(CYCLES):
        ids = _ids(engine.generate(mine, GREEDY))
        left += gathered(engine.model.module)
        with_weights(hf, full_weights(engine))
        wrong += [(p, got) for p, got in zip(mine, ids, strict=True) if got != hf_greedy(hf, p, GREEDY.max_new_tokens)]
        engine.forward_backward([pack(fixed[:2]), pack(fixed[2:])], cross_entropy)
        engine.optim_step()
        left += gathered(engine.model.module)
        held.append(live_bytes())
    weights = full_weights(engine)
    if engine.world_size == 1:
        assert path is not None
        save_file(weights, path)
    reference = load_file(path) if path else weights
    return {
        "wrong": wrong,
        "left": left,
        "growth": held[-1] - held[1],
        "error": max((weights[n] - reference[n]).abs().max().item() for n in reference),
        "gather": engine.ledger.gather,
    }


@pytest.mark.parametrize("gather", ["full", "stream"])
def test_five_cycles_on_two_ranks_equal_hf_and_one_rank(pool2, folders, tmp_path, gather):
    folder, path = folders("qwen3"), str(tmp_path / "weights.safetensors")
    cycles(folder, {"gather": "full"}, path)
    for result in pool2.run(cycles, folder, {"gather": gather}, path):
        assert result["gather"] == gather
        assert result["wrong"] == []
        assert result["left"] == []
        assert result["growth"] == 0
        assert result["error"] < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_stage_generates_with_the_trained_weights(pool2, folders, tmp_path, stage):
    path = str(tmp_path / "weights.safetensors")
    cycles(folders("qwen3"), {}, path)
    for result in pool2.run(cycles, folders("qwen3"), {"on_leave": "keep"}, path, stage):
        assert result["wrong"] == []
        assert result["left"] == []
        assert result["growth"] == 0
        assert result["error"] < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_generates_from_shards_what_hf_does(pool2, folders, family):
    for gather in ("full", "stream"):
        for result in pool2.run(one_cycle, folders(family, tie_word_embeddings=family in ("qwen2", "exaone4_5")), gather):
            assert result == []


def one_cycle(folder: str, gather: str) -> list:
    engine = make_engine(folder, rollout={"gather": gather})
    engine.forward_backward([pack(ragged_sequences(2, seed=engine.rank))], cross_entropy)
    engine.optim_step()
    prompts = [[5] * 11, [7, 8, 9]]
    ids = _ids(engine.generate(prompts, GREEDY))
    hf = hf_module(folder, full_weights(engine))
    return [(p, got) for p, got in zip(prompts, ids, strict=True) if got != hf_greedy(hf, p, GREEDY.max_new_tokens)]


# -- ranks end together


def uneven_limits(folder: str, gather: str) -> dict:
    """Rank 0 may draw 2 tokens, rank 1 may draw 5."""
    engine = make_engine(folder, rollout={"gather": gather})
    with engine.generating() as runner:
        before = runner.stats().forwards
        limited = dataclasses.replace(GREEDY, max_new_tokens=2 if engine.rank == 0 else 5)
        first = runner.generate([[30 + engine.rank]], limited)
        forwards = runner.stats().forwards - before
    return {"length": len(_ids(first)[0]), "forwards": forwards}


def test_ranks_with_different_limits_finish_together(pool2, folders):
    streamed = pool2.run(uneven_limits, folders("llama"), "stream", timeout_s=60)
    assert [r["length"] for r in streamed] == [2, 5]
    assert [r["forwards"] for r in streamed] == [5, 5]
    full = pool2.run(uneven_limits, folders("llama"), "full", timeout_s=60)
    assert [r["forwards"] for r in full] == [2, 5]


def stop_early(folder: str) -> dict:
    """A stop id that greedy decoding meets at different steps, far below max_new_tokens."""
    engine = make_engine(folder, rollout={"gather": "stream"})
    prompt = [[40 + 7 * engine.rank]]
    ids = _ids(engine.generate(prompt, dataclasses.replace(GREEDY, max_new_tokens=12)))[0]
    wanted = 1 if engine.rank == 0 else 4
    stop = ids[wanted]
    expected = ids.index(stop) + 1
    with engine.generating() as runner:
        sampling = dataclasses.replace(GREEDY, max_new_tokens=64, stop_token_ids=(stop,))
        (sample,) = runner.generate(prompt, sampling)[0]
        return {
            "expected": expected,
            "length": len(sample.token_ids),
            "reason": sample.finish_reason,
            "forwards": runner.stats().forwards,
        }


def test_a_stop_ends_the_lock_step_early(pool2, folders):
    results = pool2.run(stop_early, folders("llama"), timeout_s=60)
    longest = max(r["length"] for r in results)
    for r in results:
        assert r["length"] == r["expected"]
        assert r["reason"] == "stop"
        assert r["forwards"] <= longest + 1


def greedy_to_its_end(folder: str, prompts: list[int]) -> dict:
    engine = make_engine(folder, rollout={"gather": "stream"})
    with engine.generating() as runner:
        ((sample,),) = runner.generate([[prompts[engine.rank]]], SamplingParams(max_new_tokens=64, temperature=0.0))
        return {"ids": sample.token_ids, "reason": sample.finish_reason, "forwards": runner.stats().forwards}


def test_ends_of_sequence_at_steps_2_and_5_take_5_forwards_of_64_allowed(pool2, tmp_path):
    """Ends are what the model itself draws: ids of its generation_config that greedy decoding meets there and not before."""
    hf = save_tiny(tmp_path, "llama")
    greedy = {first: hf_greedy(hf, [first], 5) for first in range(3, 40)}

    def ends(prompts: tuple[int, int]) -> set[int]:
        return {1, greedy[prompts[0]][1], greedy[prompts[1]][4]}

    def steps(prompts: tuple[int, int]) -> list[int]:
        return [min(step for step, i in enumerate([*greedy[p], 1], start=1) if i in ends(prompts)) for p in prompts]

    prompts = next(pair for pair in itertools.permutations(greedy, 2) if steps(pair) == [2, 5])
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": sorted(ends(prompts))}))
    results = pool2.run(greedy_to_its_end, str(tmp_path), list(prompts), timeout_s=60)
    assert [r["ids"] for r in results] == [greedy[prompts[0]][:2], greedy[prompts[1]]]
    assert [(r["reason"], r["forwards"]) for r in results] == [("stop", 5)] * 2


def shares(folder: str, gather: str, counts: list[int]) -> dict:
    engine = make_engine(folder, rollout={"gather": gather})
    prompts = PROMPTS[: counts[engine.rank]]
    completions = engine.generate(prompts, dataclasses.replace(GREEDY, num_samples=2))
    engine.forward_backward([pack(ragged_sequences(2))] if prompts else [], cross_entropy)
    engine.optim_step()
    return {"samples": [len(c) for c in completions], "left": gathered(engine.model.module)}


@pytest.mark.parametrize("gather", ["full", "stream"])
@pytest.mark.parametrize("counts", [[4, 1], [0, 3], [0, 0]])
def test_unequal_and_empty_shares_finish(pool2, folders, gather, counts):
    results = pool2.run(shares, folders("llama"), gather, counts, timeout_s=60)
    assert [r["samples"] for r in results] == [[2] * n for n in counts]
    assert all(r["left"] == [] for r in results)


def several_calls(folder: str, gather: str) -> list:
    """Rank 0 generates twice and drives the third request itself; rank 1 generates once."""
    engine = make_engine(folder, rollout={"gather": gather})
    with engine.generating() as runner:
        ids = _ids(runner.generate(PROMPTS[:1], GREEDY))
        if engine.rank == 0:
            ids += _ids(runner.generate(PROMPTS[:1], GREEDY))
            request = runner.add(Request(tuple(PROMPTS[0]), GREEDY))
            while runner.has_work:
                ids += [c.token_ids for c in runner.step() if c.request_id == request]
    return ids


@pytest.mark.parametrize("gather", ["full", "stream"])
def test_ranks_may_call_the_runner_unequally_often(pool2, folders, gather):
    first, second = pool2.run(several_calls, folders("llama"), gather, timeout_s=60)
    assert first == second * 3


# -- faults


def fail_on_rank_1(folder: str, gather: str, where: str) -> dict:
    engine = make_engine(folder, rollout={"gather": gather})
    engine.model.module.train()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    caught = ""
    if engine.rank == 1 and where == "the KV pool":
        engine._generation._engine_with = _boom
    try:
        with engine.generating() as runner:
            if engine.rank == 1:
                _sabotage(runner, where)
            runner.generate(PROMPTS[:2], dataclasses.replace(GREEDY, temperature=1.0))
    except (ArithmeticError, RuntimeError) as error:
        caught = f"{type(error).__name__}: {error}"
    vars(engine._generation).pop("_engine_with", None)
    copy = engine._generation._copy
    kept = copy is None or copy.nbytes == 0  # on_leave=free, also after an exception
    kept &= torch.equal(state, torch.get_rng_state()) and engine.model.module.training and not gathered(engine.model.module)
    engine.forward_backward([pack(ragged_sequences(2))], cross_entropy)
    engine.optim_step()
    ids = _ids(engine.generate(PROMPTS[:1], GREEDY))[0]
    hf = hf_module(folder, full_weights(engine))
    return {"caught": caught, "kept": kept, "afterwards": ids == hf_greedy(hf, PROMPTS[0], 6)}


def _boom(*args):
    raise ArithmeticError("boom")


def _sabotage(runner, where: str) -> None:
    if where == "outside a step":
        raise ArithmeticError("boom")
    engine = runner._engine
    in_one_call = engine._weights.stack is not None  # then there is no layer to fail in
    layer = (engine.decoder, "forward" if in_one_call else "_layer")
    target, name = {"a step": (engine, "step"), "a layer": layer}[where]
    plain, calls = getattr(target, name), []

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise ArithmeticError("boom")
        return plain(*args, **kwargs)

    setattr(target, name, fails)


@pytest.mark.parametrize("gather", ["full", "stream"])
@pytest.mark.parametrize("where", ["the KV pool", "outside a step", "a step", "a layer"])
def test_an_exception_of_one_rank_reaches_all_and_leaves_a_working_engine(pool2, folders, gather, where):
    results = pool2.run(fail_on_rank_1, folders("llama"), gather, where, timeout_s=60)
    assert "failed on rank 1" in results[0]["caught"]
    assert results[1]["caught"] == "ArithmeticError: boom"
    for result in results:
        assert result["kept"]
        assert result["afterwards"]


# -- what generation must leave alone, one rank


def test_generation_leaves_modes_flags_and_random_states_alone(folders):
    engine = make_engine(folders("llama", attention_dropout=0.5), dropout=True, activation_checkpointing=True)
    reference = _ids(engine.generate(PROMPTS, GREEDY))
    module = engine.model.module
    module.train()
    module.hf.gradient_checkpointing_enable()
    module.hf.model.layers[1].eval()
    flags = [(m.training, getattr(m, "gradient_checkpointing", None)) for m in module.modules()]
    state = torch.get_rng_state()
    assert _ids(engine.generate(PROMPTS, GREEDY)) == reference
    assert _ids(engine.generate(PROMPTS, dataclasses.replace(GREEDY, temperature=1.0))) != reference
    with pytest.raises(ValueError, match="keys"):
        engine.generate(PROMPTS, GREEDY, keys=[1])
    assert [(m.training, getattr(m, "gradient_checkpointing", None)) for m in module.modules()] == flags
    assert torch.equal(state, torch.get_rng_state())
    engine.forward_backward([pack(ragged_sequences(3))], cross_entropy)


def test_training_losses_are_those_of_a_run_that_never_generates(folders):
    losses = []
    for generates in (False, True):
        engine = make_engine(folders("llama"))
        run = []
        for _ in range(3):
            if generates:
                engine.generate(PROMPTS, GREEDY)
            run.append(engine.forward_backward([pack(ragged_sequences(4))], cross_entropy)["loss"])
            engine.optim_step()
        losses.append(run)
    assert losses[0] == losses[1]


# -- versions, copies and the ledger


def test_a_copy_serves_again_only_while_the_caller_vouches_for_it(folders):
    engine = make_engine(folders("llama"), rollout={"gather": "full", "on_leave": "keep"})
    versions = []

    def gathered_bytes(**kwargs) -> int:
        versions.append(engine.generate(PROMPTS[:1], GREEDY, **kwargs)[0][0].weight_version)
        return engine.ledger.gathered_bytes

    weights = sum(p.numel() * 4 for p in engine.model.parameters().values())
    assert gathered_bytes() == weights
    assert gathered_bytes(unchanged=True) == 0
    assert gathered_bytes() == weights
    engine.forward_backward([pack(ragged_sequences(2))], cross_entropy)
    engine.optim_step()
    assert gathered_bytes(unchanged=True) == weights  # the engine itself stepped
    assert versions == [1, 1, 2, 3]
    assert engine.weight_version == 3


def test_an_edit_between_two_entries_is_seen(folders):
    engine = make_engine(folders("llama", tie_word_embeddings=True), rollout={"on_leave": "keep"})
    engine.generate(PROMPTS[:1], GREEDY)
    with torch.no_grad():
        for shard in engine.model.local_shards().values():
            shard.mul_(-0.7)
    hf = hf_module(engine.model.path, full_weights(engine))
    assert _ids(engine.generate(PROMPTS[:1], GREEDY))[0] == hf_greedy(hf, PROMPTS[0], 6)


@pytest.mark.parametrize("on_leave", ["keep", "offload", "free"])
def test_what_stays_after_leaving(folders, on_leave, monkeypatch):
    monkeypatch.setattr(pages, "CHUNK", 4096)  # of memory for packed weights, which is large for a tiny model
    engine = make_engine(folders("llama"), rollout={"gather": "full", "on_leave": on_leave})
    engine.generate(PROMPTS, GREEDY)
    engine.close()
    before = live_bytes()
    engine.generate(PROMPTS, GREEDY)
    once = live_bytes() - before
    for _ in range(2):
        engine.generate(PROMPTS, GREEDY)
    assert live_bytes() - before == once
    copy = engine.ledger.copy_bytes
    if on_leave == "free":
        assert once == 0
    elif on_leave == "offload":  # the copy waits on the host; the KV pool is gone
        assert copy <= once < 1.1 * copy
    else:
        assert once > 1.1 * copy
    engine.close()
    assert live_bytes() <= before


def auto_choice(folder: str, limit: int | None) -> str:
    engine = make_engine(folder, rollout={"gather": "auto", "max_copy_bytes": limit})
    engine.generate(PROMPTS[:1], GREEDY)
    engine.generate(PROMPTS[:1], GREEDY)
    return engine.ledger.gather


def test_auto_decides_by_bytes_alike_on_all_ranks(pool2, folders):
    assert pool2.run(auto_choice, folders("llama"), 10_000) == ["stream"] * 2
    assert pool2.run(auto_choice, folders("llama"), None) == ["full"] * 2


def test_auto_says_why_once(folders, caplog):
    with caplog.at_level("INFO", "hybrid.modes"):
        auto_choice(folders("llama"), 10_000)
    (line,) = [r.getMessage() for r in caplog.records if "rollout.gather" in r.getMessage()]
    assert "stream" in line
    assert "is 0.01 MB" in line


def test_a_copy_takes_the_bytes_that_auto_reckoned_with(folders):
    from hybrid.modes import copy_bytes

    for overrides in ({}, {"tie_word_embeddings": True}):
        for dtype in ("float32", "bfloat16"):
            engine = make_engine(folders("llama", **overrides), compute_dtype=dtype, rollout={"gather": "full"})
            engine.generate(PROMPTS[:1], GREEDY)
            assert copy_bytes(engine.model, engine.model.spec) == pytest.approx(engine.ledger.copy_bytes, rel=0.02)


def checksums(folder: str) -> list[str]:
    engine = make_engine(folder, debug_checksums=True, rollout={"on_leave": "keep"})
    engine.generate(PROMPTS[:1], GREEDY)
    engine.generate(PROMPTS[:1], GREEDY, unchanged=True)
    if engine.rank == 1:
        with torch.no_grad():
            next(iter(engine.model.local_shards().values()))[0] += 1.0
    try:
        engine.generate(PROMPTS[:1], GREEDY, unchanged=True)
    except RuntimeError as error:
        return [str(error)]
    return []


def test_checksums_catch_a_false_assertion_on_every_rank(pool2, folders):
    first, second = pool2.run(checksums, folders("llama"))
    assert "on another rank" in first[0]
    assert "model.embed_tokens.weight" in second[0]


def certificate(folder: str, dtype: str, gather: str) -> dict:
    """Rollout log-probs against those of the training module, on the same tokens."""
    engine = make_engine(folder, compute_dtype=dtype, rollout={"gather": gather})
    sampling = dataclasses.replace(GREEDY, temperature=0.7, max_new_tokens=12)
    samples = [c for group in engine.generate(PROMPTS[engine.rank :: 2], sampling) for c in group]
    differences = []
    for c in samples:
        scored = engine.score(pack([[*c.prompt_ids, *c.token_ids]], counted_from=len(c.prompt_ids)), temperature=0.7)
        differences.append((scored - torch.tensor(c.logprobs_raw)).abs())
    all_of_them = torch.cat(differences)
    return {"max": all_of_them.max().item(), "mean": all_of_them.mean().item()}


@pytest.mark.parametrize("gather", ["full", "stream"])
def test_rollout_and_training_log_probs_agree(pool2, folders, gather):
    for result in pool2.run(certificate, folders("exaone4"), "float32", gather):
        assert result["max"] < 1e-4
    for result in pool2.run(certificate, folders("exaone4"), "bfloat16", gather):
        assert result["mean"] < 0.1


def unregistered(folder: str, rollout: dict) -> dict:
    engine = make_engine(folder, rollout=rollout)
    wrong = []
    for _ in range(2):
        ids = _ids(engine.generate(PROMPTS[: 1 + engine.rank], GREEDY))
        hf = hf_module(folder, full_weights(engine))
        wrong += [got for p, got in zip(PROMPTS, ids, strict=False) if got != hf_greedy(hf, p, 6)]
        engine.forward_backward([pack(ragged_sequences(2, seed=engine.rank))], cross_entropy)
        engine.optim_step()
    return {"wrong": wrong, "left": gathered(engine.model.module), "gather": engine.ledger.gather}


@pytest.mark.parametrize("family", ["granite", "gpt2"])
@pytest.mark.parametrize("on_leave", ["free", "offload", "keep"])
def test_an_unregistered_family_trains_and_generates_with_its_own_module(pool2, folders, family, on_leave):
    for result in pool2.run(unregistered, folders(family), {"on_leave": on_leave}):
        assert result == {"wrong": [], "left": [], "gather": "full"}


def test_an_unregistered_family_cannot_be_streamed(folders):
    engine = make_engine(folders("granite"), rollout={"gather": "stream"})
    with pytest.raises(ValueError, match="not registered"):
        engine.generate(PROMPTS, GREEDY)


def test_a_single_process_needs_no_launcher(folders):
    engine = HybridEngine.from_pretrained(folders("llama"))
    assert (engine.rank, engine.world_size) == (0, 1)
    assert len(engine.generate(PROMPTS, GREEDY)) == len(PROMPTS)
