"""Conversations: tokens as one turn after the other would draw them, spans and masks, log-probs that the trainer agrees with, and
every way in which one ends."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny import EOS
from trainer_cases import CHARACTERS, tiny_folder

from hybrid.config import HybridConfig
from hybrid.engine import HybridEngine
from inference_v2.types import Request, SamplingParams
from trainers.config import EvalConfig
from trainers.data.batching import counted_positions, pack
from trainers.data.order import DrawnPrompt
from trainers.environments.config import EnvironmentConfig
from trainers.environments.conversations import Conversations, conversation_statistics, last_turn
from trainers.environments.environment import Reply
from trainers.evaluation import Evaluator
from trainers.rollout import sample_rollouts
from trainers.types import Prompt, Rollout

DRAWN = [DrawnPrompt(Prompt(index=i, ids=tuple(range(3, 4 + i)), text=str(i)), epoch=0) for i in range(5)]
ID = {character: 2 + i for i, character in enumerate(CHARACTERS)}
ENDS = {"stop": ("=", "1"), "stop_token_ids": (ID["?"],)}  # of 16 ids four end a turn, the end of the sequence included
FORCED = SamplingParams(max_new_tokens=3, temperature=0.0, allowed_token_ids=(ID["="],), stop=("=",))  # every turn is "="


class Scripted:
    """Says `words` one after the other, then ends the conversation; each reply is worth 1."""

    def __init__(self, prompt: Prompt, words: str = "12 3") -> None:
        self.words = words.split(" ") if words else []

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        return Reply(self.words.pop(0) if self.words else None, 1.0)


class Endless(Scripted):
    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        return Reply("+", 1.0)


class Nothing(Scripted):
    """Its messages are empty: the policy goes on as if nobody had asked."""

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        return Reply("")


class Listening(Scripted):
    heard: list[tuple] = []  # noqa: RUF012

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        self.heard.append((text, ids, finish_reason))
        return super().reply(text, ids, finish_reason)


class Asks(Scripted):
    stop = ("=",)


class OneString(Scripted):
    stop = "</a>"


class Mute:
    def __init__(self, prompt: Prompt) -> None:
        pass


class Fails(Scripted):
    """In the way `how`, at the second turn of rows 1 and 3."""

    def __init__(self, prompt: Prompt, how: str = "raise", words: str = "12 3") -> None:
        super().__init__(prompt, words)
        self.how, self.turns, self.fails = how, 0, prompt.index in (1, 3)
        if how == "make" and self.fails:
            raise KeyError("no sandbox")

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        self.turns += 1
        if self.fails and self.turns == 2:
            if self.how == "raise":
                raise OSError("connection refused")
            if self.how == "hang":
                threading.Event().wait()
            if self.how == "kind":
                return "12"
            if self.how == "infinite":
                return Reply("1", float("inf"))
        return super().reply(text, ids, finish_reason)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    engine = HybridEngine.from_pretrained(tiny_folder(path), HybridConfig())
    yield engine
    engine.close()


def conversations(engine, environment: type = Scripted, **settings) -> Conversations:
    config = EnvironmentConfig(name=f"{__name__}:{environment.__name__}", **settings)
    return Conversations(config, engine)


def turn_by_turn(engine, drawn: DrawnPrompt, sample: int, sampling: SamplingParams, words: list[str], limit: int) -> Rollout:
    """One conversation the long way, each turn a request of its own; what differs from a Rollout is left empty."""
    ids, sources, logprobs, raw = list(drawn.prompt.ids), [], [], []
    words = list(words)
    while True:
        room = limit - (len(ids) - len(drawn.prompt.ids))
        turn = replace(sampling, num_samples=1, max_new_tokens=min(sampling.max_new_tokens, room))
        with engine.generating(unchanged=True) as runner:
            runner.add(Request(tuple(ids), turn, drawn.key, first_sample=sample))
            found = []
            while not found:
                found = runner.step()
        ids += found[0].token_ids
        sources += ["policy"] * len(found[0].token_ids)
        logprobs += found[0].logprobs
        raw += found[0].logprobs_raw
        if found[0].finish_reason == "length" or not words:
            break
        message = [ID[c] for c in words.pop(0)]
        if len(ids) - len(drawn.prompt.ids) + len(message) >= limit:
            break
        ids += message
        sources += ["environment"] * len(message)
        logprobs += [0.0] * len(message)
        raw += [0.0] * len(message)
    return ids, sources, logprobs, raw


@pytest.mark.parametrize("limit", [60, 12])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_tokens_spans_and_masks_are_those_of_one_turn_after_the_other(engine, temperature, limit):
    sampling = SamplingParams(max_new_tokens=7, num_samples=4, temperature=temperature, seed=5, **ENDS)
    limit = limit if temperature else 30
    rollouts = conversations(engine, max_response_tokens=limit).sample(DRAWN, sampling)
    assert [(r.prompt.index, r.sample_index) for r in rollouts] == [(i, s) for i in range(5) for s in range(4)]
    for rollout in rollouts:
        ids, sources, logprobs, raw = turn_by_turn(
            engine, DRAWN[rollout.prompt.index], rollout.sample_index, sampling, ["12", "3"], limit
        )
        assert list(rollout.ids) == ids
        spelled = [span.source for span in rollout.spans for _ in range(span.start, span.stop)]
        assert spelled == sources
        assert rollout.spans[0].start == rollout.num_prompt
        assert [s.stop for s in rollout.spans[:-1]] == [s.start for s in rollout.spans[1:]]
        assert rollout.spans[-1].source == "policy"
        assert rollout.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert rollout.logprobs_raw == pytest.approx(raw, abs=1e-5)
        policy = [rollout.num_prompt + i for i, source in enumerate(sources) if source == "policy"]
        assert counted_positions(rollout) == policy
        batch = pack([rollout])
        assert batch.loss_index.tolist() == [p - 1 for p in policy]
        assert batch.targets.tolist() == [ids[p] for p in policy]
        assert batch.on_policy.all()
        assert batch.rollout_logprobs.tolist() == pytest.approx([logprobs[p - rollout.num_prompt] for p in policy], abs=1e-5)
    turns = Counter(sum(s.source == "policy" for s in r.spans) for r in rollouts)
    assert temperature == 0 or set(turns) == {1, 2, 3}
    assert len({r.weight_version for r in rollouts}) == 1


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.7}, {"repetition_penalty": 1.3}])
def test_the_trainers_log_probs_are_those_of_the_rollout(engine, sampling):
    """Of whole conversations, at the policy's tokens alone."""
    sampling = SamplingParams(max_new_tokens=7, num_samples=4, temperature=0.7, seed=2, **sampling, **ENDS)
    rollouts = conversations(engine).sample(DRAWN, sampling)
    batch = pack(rollouts)
    assert sum(s.source == "environment" for r in rollouts for s in r.spans) > 10
    torch.testing.assert_close(batch.rollout_logprobs_raw, engine.score(batch, temperature=0.7), rtol=0, atol=1e-4)


def test_the_first_turn_is_what_sample_rollouts_draws(engine):
    """So that an environment that says nothing changes nothing."""
    sampling = SamplingParams(max_new_tokens=9, num_samples=3, seed=4)
    plain = sample_rollouts(engine, DRAWN, sampling)
    rollouts = conversations(engine, settings={"words": ""}).sample(DRAWN, sampling)
    for rollout, expected in zip(rollouts, plain, strict=True):
        assert replace(rollout, reward=None, weight_version=0) == replace(expected, weight_version=0)


def test_randomness_goes_on_from_turn_to_turn(engine):
    """A response in turns between which nothing is said is the response in one: no place is drawn with another's randomness."""
    whole = sample_rollouts(engine, DRAWN, SamplingParams(max_new_tokens=20, num_samples=3, seed=4, ignore_eos=True))
    sampling = SamplingParams(max_new_tokens=20, num_samples=3, seed=4, ignore_eos=True, **ENDS)
    rollouts = conversations(engine, Nothing, max_turns=30, max_response_tokens=20).sample(DRAWN, sampling)
    assert [r.ids for r in rollouts] == [r.ids for r in whole]
    assert max(len(r.spans) for r in rollouts) > 5
    assert {r.finish_reason for r in rollouts} == {"length"}


def test_a_stop_string_stays_in_the_ids_and_the_environment_reads_it(engine):
    Listening.heard.clear()
    (rollout,) = conversations(engine, Listening).sample(DRAWN[:1], FORCED)
    assert rollout.ids == (3, ID["="], ID["1"], ID["2"], ID["="], ID["3"], ID["="])
    assert Listening.heard == [("=", (ID["="],), "stop")] * 3
    assert rollout.text == "=12=3="
    assert rollout.reward == 3.0
    assert last_turn(rollout, engine.tokenizer) == "="


def test_the_environments_own_stop_strings_end_turns_too(engine):
    sampling = replace(FORCED, stop=())
    (rollout,) = conversations(engine, Asks).sample(DRAWN[:1], sampling)
    assert rollout.text == "=12=3="
    (cut,) = conversations(engine).sample(DRAWN[:1], sampling)
    assert (cut.text, cut.finish_reason) == ("===", "length")


def test_the_turns_are_limited(engine):
    (rollout,) = conversations(engine, Endless, max_turns=3).sample(DRAWN[:1], FORCED)
    assert rollout.text == "=+=+="
    assert (rollout.finish_reason, rollout.reward) == ("max_turns", 3.0)
    (rollout,) = conversations(engine, Endless, max_turns=1).sample(DRAWN[:1], FORCED)
    assert (rollout.text, rollout.finish_reason, rollout.reward) == ("=", "max_turns", 1.0)


def test_an_end_of_sequence_in_the_first_turn_is_one_turn_or_goes_on(engine):
    """Which of the two, the environment says."""
    sampling = SamplingParams(max_new_tokens=3, temperature=0.0, allowed_token_ids=(EOS,))
    (rollout,) = conversations(engine, settings={"words": ""}).sample(DRAWN[:1], sampling)
    assert (rollout.response_ids, rollout.finish_reason, rollout.text) == ((EOS,), "stop", "")
    (rollout,) = conversations(engine, settings={"words": "7"}).sample(DRAWN[:1], sampling)
    assert rollout.response_ids == (EOS, ID["7"], EOS)
    assert pack([rollout]).targets.tolist() == [EOS, EOS]


def test_a_turn_that_is_cut_ends_the_conversation_and_its_reward_counts(engine):
    sampling = SamplingParams(max_new_tokens=2, temperature=0.0, allowed_token_ids=(ID["5"],))
    Listening.heard.clear()
    (rollout,) = conversations(engine, Listening).sample(DRAWN[:1], sampling)
    assert (rollout.text, rollout.finish_reason, rollout.reward) == ("55", "length", 1.0)
    assert Listening.heard == [("55", (ID["5"],) * 2, "length")]


@pytest.mark.parametrize(
    ("limit", "text", "reason"),
    [*((n, "=", "length") for n in (1, 2, 3)), (4, "=12=", "length"), (5, "=12=", "length"), (6, "=12=3=", "stop")],
)
def test_a_response_has_a_limit_in_all(engine, limit, text, reason):
    """A message after which the policy could not speak is dropped, so that a response ends with the policy's own token, where
    a score can land."""
    (rollout,) = conversations(engine, max_response_tokens=limit).sample(DRAWN[:1], replace(FORCED, min_new_tokens=1))
    assert (rollout.text, rollout.spans[-1].source, rollout.finish_reason) == (text, "policy", reason)


def test_the_least_length_of_a_turn_gives_way_to_the_limit(engine):
    """And until it is reached, a turn does not end with its stop string."""
    sampling = replace(FORCED, min_new_tokens=2)
    texts = [conversations(engine, max_response_tokens=n).sample(DRAWN[:1], sampling)[0].text for n in (1, 2, 5, 9)]
    assert texts == ["=", "==", "==12=", "==12==3=="]


def test_the_models_length_is_a_limit_too(engine):
    (rollout,) = conversations(engine, Endless, max_turns=99).sample(DRAWN[:1], FORCED)
    assert (len(rollout.ids), rollout.finish_reason) == (64, "length")
    assert len(rollout.spans) == 63
    turns = SamplingParams(max_new_tokens=30, temperature=0.0, allowed_token_ids=(ID["="],), stop=("=" * 30,))
    (rollout,) = conversations(engine, Endless, max_turns=99).sample(DRAWN[:1], turns)
    assert len(rollout.ids) == 64  # the last turn was shorter than max_new_tokens
    assert rollout.finish_reason == "length"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "row 1 sample 0: connection refused"),
        ("hang", "it took longer than timeout_s=0.5"),
        ("kind", "it replied '12'"),
        ("infinite", "reward=inf"),
        ("make", "KeyError: 'no sandbox'"),
    ],
)
def test_an_environment_that_fails_ends_its_conversation_and_no_other(engine, caplog, how, reason):
    opened = conversations(engine, Fails, settings={"how": how}, timeout_s=0.5, error_reward=-2.0)
    opened.check([d.prompt for d in DRAWN])
    with caplog.at_level(logging.WARNING):
        rollouts = opened.sample(DRAWN, replace(FORCED, num_samples=2))
    for rollout in rollouts:
        if rollout.prompt.index in (1, 3):
            text = "=" if how == "make" else "=12="
            assert (rollout.text, rollout.finish_reason, rollout.reward) == (text, "environment_error", -2.0)
        else:
            assert (rollout.text, rollout.finish_reason, rollout.reward) == ("=12=3=", "stop", 3.0)
    (record,) = caplog.records
    assert "failed in 4 of 10 conversations of rank 0; the first: row 1 sample 0" in record.message
    assert reason in record.message
    statistics = conversation_statistics(rollouts, engine.mesh)
    assert statistics["environment_errors"] == 0.4
    assert statistics["environment_reward"] == pytest.approx((6 * 3.0 - 4 * 2.0) / 10)
    assert statistics["turns"] == (2.2 if how == "make" else 2.6)
    assert statistics["environment_tokens"] == (1.8 if how == "make" else 2.6)
    assert statistics["max_turns"] == 0


def test_a_message_that_the_tokenizer_cannot_encode_names_the_row(engine):
    with pytest.raises(ValueError, match="row 2: the tokenizer cannot encode the environment's 'no!'"):
        conversations(engine, settings={"words": "no!"}).sample(DRAWN[2:4], FORCED)
    (rollout,) = conversations(engine).sample(DRAWN[:1], FORCED)  # and the engine goes on
    assert rollout.text == "=12=3="


def test_a_prompt_that_the_engine_refuses_names_its_row(engine):
    with pytest.raises(ValueError, match=r"turn 1 of row 4: .*max_new_tokens=60"):
        conversations(engine).sample(DRAWN, SamplingParams(max_new_tokens=60))


def test_what_is_wrong_with_an_environment_is_said_before_the_first_step(engine):
    with pytest.raises(ValueError, match="row 1: KeyError: 'no sandbox'"):
        conversations(engine, Fails, settings={"how": "make"}).check([DRAWN[1].prompt])
    with pytest.raises(ValueError, match=r"row 0: its stop is '</a>'; allowed: a tuple"):
        conversations(engine, OneString).sample(DRAWN[:1], FORCED)
    with pytest.raises(ValueError, match="row 0: it has no method reply"):
        conversations(engine, Mute).check([DRAWN[0].prompt])
    verifier = Conversations(EnvironmentConfig(name="verifier"), engine)
    with pytest.raises(ValueError, match="environment verifier: row 4: reward exact_match: row 4 of the data has no answer"):
        verifier.check([replace(d.prompt, answer=None if d.prompt.index == 4 else "3") for d in DRAWN])
    with pytest.raises(ValueError, match="'!'"):
        conversations(engine, suffix="!")


@pytest.mark.parametrize("settings", [{}, {"max_running": 1, "cache_bytes": 16 * 1024}])
def test_earlier_turns_are_found_in_the_prefix_cache(tmp_path, settings):
    """Also where the cache, of 16 blocks of 4 tokens, holds one conversation: it is led to its end before the next begins."""
    tiny_folder(tmp_path)
    settings = {"engine": {"block_size": 4, **settings}, "on_leave": "keep"}
    engine = HybridEngine.from_pretrained(str(tmp_path), HybridConfig.model_validate({"rollout": settings}))
    conversations(engine, Endless, max_turns=9).sample(DRAWN, FORCED)
    with engine.generating(unchanged=True) as runner:
        stats = runner.stats()
    # A turn of 1 token begins with all that was computed in the one before it, in whole blocks: all but the token drawn last and
    # the message of 1 token. And a prompt may begin as another does.
    begins = [[len(d.prompt.ids) + 2 * n for n in range(9)] for d in DRAWN]
    hit = sum(length // 4 * 4 for lengths in begins for length in lengths[:-1])
    assert hit <= stats.tokens_hit <= hit + 4
    assert stats.prompt_tokens_prefilled + stats.tokens_hit == sum(map(sum, begins))
    engine.close()


@pytest.mark.parametrize("samples", [1, 3])
def test_few_seats_change_nothing(tmp_path, engine, samples):
    tiny_folder(tmp_path)
    sampling = SamplingParams(max_new_tokens=7, num_samples=samples, seed=5, **ENDS)
    few = HybridEngine.from_pretrained(str(tmp_path), HybridConfig.model_validate({"rollout": {"engine": {"max_running": 2}}}))
    rollouts = [conversations(e).sample(DRAWN, sampling) for e in (few, engine)]
    assert [r.ids for r in rollouts[0]] == [r.ids for r in rollouts[1]]
    few.close()


def test_an_evaluation_has_the_same_turns_and_scores_the_last(engine):
    """Greedy, as `sample` of the same prompts; a reward that reads the whole response would find the first turn's text too."""
    prompts = [d.prompt for d in DRAWN]
    made = conversations(engine)
    config = EvalConfig(reward="regex:^.{0,8}$", max_new_tokens=8, samples=5, stop=tuple(CHARACTERS[:8]))
    evaluation = Evaluator(config, prompts, made).run(engine)
    expected = made.sample(DRAWN, config.sampling)
    assert [r.ids for r in evaluation.samples] == [r.ids for r in expected]
    assert all(len(last_turn(r, engine.tokenizer)) <= 8 for r in expected)
    several = [r for r in expected if any(s.source == "environment" for s in r.spans)]
    assert several, "some conversation has two turns"
    assert any(len(r.text) > 8 for r in several)
    assert evaluation.reward == 1.0
