"""Conversations over ranks, and a model that has learned to ask the calculator."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_cases import CHARACTERS, tiny_folder

from hybrid import HybridEngine
from hybrid.config import HybridConfig
from inference_v2 import SamplingParams
from trainers.data.batching import make_batches
from trainers.data.order import DrawnPrompt, share
from trainers.environments.config import EnvironmentConfig
from trainers.environments.conversations import Conversations, conversation_statistics, last_turn
from trainers.environments.environment import Reply
from trainers.losses import cross_entropy_token_loss
from trainers.rollout import given_rollouts
from trainers.types import Prompt, Rollout

DRAWN = [
    DrawnPrompt(Prompt(index=i, ids=tuple(3 + (i * n) % 11 for n in range(1 + 5 * i % 7)), text=str(i)), epoch=0)
    for i in range(7)
]
STOP = ("=", "1", "2", "3", "5", "7")
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=6, num_samples=2, temperature=0.0, repetition_penalty=2.0, stop=STOP),
    "sampled": SamplingParams(max_new_tokens=6, num_samples=3, temperature=0.9, seed=3, stop=STOP),
}


class Counts:
    """So many messages as the row's number says. Where `bad` is a row, its second message is `word`, or it fails."""

    stop = ("4",)

    def __init__(self, prompt: Prompt, bad: int = -1, word: str = "") -> None:
        self.left, self.bad, self.word = prompt.index, prompt.index == bad, word
        self.said = 0

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        if self.said == self.left:
            return Reply(None, 1.0)
        self.said += 1
        if self.bad and self.said == 2:
            return Reply(self.word or None) if self.word else 1 / 0  # type: ignore[return-value]
        return Reply("0" * self.said, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def converse(folder: str, how: str, count: int, gather: str, **settings: Any) -> dict[str, Any]:
    """What crosses a process border: the rank's rollouts, an error's text, statistics, and rollouts of a second stay."""
    rollout = {"gather": gather, "engine": {"batch_invariant": True}}
    engine = HybridEngine.from_pretrained(folder, HybridConfig.model_validate({"rollout": rollout}))
    config = EnvironmentConfig(name=f"{__name__}:Counts", max_turns=6, settings=settings)
    conversations = Conversations(config, engine)
    found: dict[str, Any] = {"error": None, "rollouts": []}
    try:
        found["rollouts"] = [plain(r) for r in conversations.sample(DRAWN[:count], SAMPLINGS[how])]
    except ValueError as error:
        found["error"] = str(error)
    conversations = Conversations(EnvironmentConfig(name=f"{__name__}:Counts", max_turns=6), engine)
    again = conversations.sample(DRAWN[:count], SAMPLINGS[how])
    found |= {"again": [plain(r) for r in again], "statistics": conversation_statistics(again, engine.mesh)}
    engine.close()
    return found


def plain(r: Rollout) -> tuple:
    spans = [(s.start, s.stop, s.source) for s in r.spans]
    return (r.prompt.index, r.sample_index, r.ids, spans, r.logprobs, r.logprobs_raw, r.finish_reason, r.reward, r.text, r.group)


@pytest.mark.parametrize("count", [7, 1, 0])  # with 1, a rank has none; with 0, both
@pytest.mark.parametrize("gather", ["full", "stream"])
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_two_ranks_have_the_conversations_of_one(pool2, folder, how, gather, count):
    """Though theirs are of different lengths, and one rank may have none."""
    results = pool2.run(converse, folder, how, count, gather)
    expected = converse(folder, how, count, gather)
    assert sorted(r for result in results for r in result["rollouts"]) == sorted(expected["rollouts"])
    work = [len(d.prompt.ids) + SAMPLINGS[how].num_samples * (64 - len(d.prompt.ids)) for d in DRAWN[:count]]
    for rank, result in enumerate(results):
        mine = [d.prompt.index for d in share(DRAWN[:count], rank, 2, work)]
        assert [r[:2] for r in result["rollouts"]] == [(i, s) for i in mine for s in range(SAMPLINGS[how].num_samples)]
        assert result["again"] == result["rollouts"]
        assert result["error"] is None
        assert result["statistics"] == pytest.approx(expected["statistics"])
    if count == 7:
        assert len({len(r[3]) for r in expected["rollouts"]}) > 3
        assert len({r[6] for r in expected["rollouts"]}) > 1


@pytest.mark.parametrize("gather", ["full", "stream"])
def test_an_environment_that_fails_on_one_rank_stops_nobody(pool2, folder, gather):
    results = pool2.run(converse, folder, "sampled", 7, gather, bad=5)
    expected = converse(folder, "sampled", 7, gather, bad=5)
    rollouts = sorted(r for result in results for r in result["rollouts"])
    assert rollouts == sorted(expected["rollouts"])
    assert {r[0] for r in rollouts if r[6] == "environment_error"} == {5}
    assert all(result["again"] for result in results)


@pytest.mark.parametrize("gather", ["full", "stream"])
def test_a_message_that_cannot_be_encoded_on_one_rank_is_an_error_on_all(pool2, folder, gather):
    """And all go on afterwards."""
    results = pool2.run(converse, folder, "sampled", 7, gather, bad=5, word="x")
    lines = {result["error"] for result in results}
    (line,) = lines
    assert "row 5: the tokenizer cannot encode the environment's 'x'" in line
    assert line.startswith("rank ")
    assert all(result["again"] for result in results)


# -- the calculator

PRODUCTS = [(3, 4), (17, 5), (8, 88), (20, 30)]


def test_a_model_that_has_seen_calls_uses_the_calculator_and_copies_what_it_says(tmp_path):
    """Learned by heart from whole texts; what the calculator says then comes from the calculator, as a changed one shows."""
    folder = tiny_folder(tmp_path, characters=CHARACTERS + "*[];")
    engine = HybridEngine.from_pretrained(folder, HybridConfig.model_validate({"optimizer": {"lr": 1e-2}}))
    encode = engine.tokenizer.encode
    prompts = [
        Prompt(
            index=i, ids=tuple(encode(f"{a}*{b}=")), text="", answer=str(a * b),
            response_ids=(*encode(f"[{a}*{b}]{a * b};{a * b}"), engine.tokenizer.eos_token_id),
        )
        for i, (a, b) in enumerate(PRODUCTS)
    ]  # fmt: skip
    drawn = [DrawnPrompt(p, epoch=0) for p in prompts]
    for _ in range(80):
        batches = make_batches(given_rollouts(drawn, 0), 1000, packed=engine.model.packs)
        engine.forward_backward(batches, cross_entropy_token_loss(1.0, engine.model.kernels))
        engine.optim_step()
    config = EnvironmentConfig(
        name="calculator", settings={"opening": "[", "closing": "]", "error": "?"}, suffix=";", max_turns=2
    )
    conversations = Conversations(config, engine)
    conversations.check(prompts)
    rollouts = conversations.sample(drawn, SamplingParams(max_new_tokens=10, temperature=0.0))
    for rollout, (a, b) in zip(rollouts, PRODUCTS, strict=True):
        assert rollout.text == f"[{a}*{b}]{a * b};{a * b}"
        assert [s.source for s in rollout.spans] == ["policy", "environment", "policy"]
        said = rollout.spans[1]
        assert engine.tokenizer.decode(rollout.ids[said.start : said.stop]) == f"{a * b};"
        assert last_turn(rollout, engine.tokenizer) == rollout.prompt.answer
        assert rollout.ids[-1] == engine.tokenizer.eos_token_id
        assert rollout.finish_reason == "stop"
    engine.close()
