"""Prompts -> rollouts of several turns. A conversation goes on in the engine's next step after its turn has ended: there is no
barrier between turns, and what a turn begins with is in the prefix cache."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hybrid.engine import HybridEngine
from hybrid.mesh import Mesh, describe, raise_together
from hybrid.runner import Runner
from inference_v2.types import Completion, Request, SamplingParams
from trainers.data.order import DrawnPrompt, share
from trainers.deadline import Deadline
from trainers.environments.config import EnvironmentConfig
from trainers.environments.environment import Environment, Reply
from trainers.environments.messages import MessageEncoder
from trainers.environments.registry import ENVIRONMENTS, resolve
from trainers.types import Prompt, Rollout, Source, Span

logger = logging.getLogger(__name__)

MOST_STUCK = 64  # replies that have not come; with so many of them no environment is asked


class Conversations:
    """What `sample_rollouts` is, with an environment that speaks between the policy's turns.

    Raises ValueError for an unknown environment, settings that it does not take, a model without a tokenizer, and markers that
    the tokenizer cannot make.
    """

    def __init__(
        self, config: EnvironmentConfig, engine: HybridEngine, *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """`chat_template_kwargs` as the prompts had them."""
        if engine.tokenizer is None:
            raise ValueError("environment: the model has no tokenizer, which messages need; set model.tokenizer")
        self.config, self.engine = config, engine
        self._make = resolve(config.name, config.settings)
        self._encoder = MessageEncoder(engine.tokenizer, config, engine.model.eos_token_ids, chat_template_kwargs or {})
        self._calls = Deadline(config.timeout_s, workers=math.inf, most_stuck=MOST_STUCK)
        self._stop: tuple[str, ...] | None = None  # known once an environment was made

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Make the environment of the first prompt, or where it is built in, of every one. Raises ValueError, naming the row, for
        what that raises, and for what was made if it is no environment."""
        for prompt in prompts if self.config.name in ENVIRONMENTS else prompts[:1]:
            try:
                self._stop = _stop_strings(self._make(prompt))
            except Exception as error:  # a user's class: whatever it raises
                raise ValueError(f"environment {self.config.name}: row {prompt.index}: {describe(error)}") from error

    def sample(self, prompts: Sequence[DrawnPrompt], sampling: SamplingParams) -> list[Rollout]:
        """`sampling.num_samples` conversations for each prompt of this rank's share of `prompts` (those of all ranks), prompt by
        prompt. Collective; a share may be empty.

        A response begins and ends with a turn of the policy. Its tokens are functions of (seed, the prompt's key, sample, place)
        and of what stands before them, as those of `sample_rollouts`. Messages of the environment have spans of their own and
        log-prob 0.0. `text` is the whole response, `reward` the sum of the environment's. `finish_reason`: "stop" where the
        environment ended it; "length" where a turn was cut, or a message would leave the policy no token (it is dropped);
        "max_turns"; "environment_error".

        Raises ValueError on every rank, naming the row, for a prompt that the engine refuses and for a message that the
        tokenizer cannot encode.
        """
        raise_together(self._prepare(prompts))
        work = [len(p.prompt.ids) + sampling.num_samples * self.limit(p.prompt) for p in prompts]
        mine = share(prompts, self.engine.rank, self.engine.world_size, work)
        with self.engine.generating() as runner:
            conversations, error = self._converse(runner, mine, sampling)
        self._calls.close()
        raise_together(error)
        failures = [(c, c.failure) for c in conversations if c.failure is not None]
        for first, failure in failures[:1]:
            logger.warning(
                "environment %s failed in %d of %d conversations of rank %d; the first: row %d sample %d: %s",
                self.config.name, len(failures), len(conversations), self.engine.rank,
                first.drawn.prompt.index, first.sample_index, describe(failure),
            )  # fmt: skip
        return [c.rollout(self.engine.tokenizer) for c in conversations]

    def _prepare(self, prompts: Sequence[DrawnPrompt]) -> ValueError | None:
        """See that the environment's stop strings are known."""
        try:
            if self._stop is None and prompts:
                self.check([prompts[0].prompt])
        except ValueError as error:
            return error
        return None

    def _converse(
        self, runner: Runner, prompts: Sequence[DrawnPrompt], sampling: SamplingParams
    ) -> tuple[list[_Conversation], ValueError | None]:
        """Conversations of this rank, to their ends; no more at a time than the engine has seats, so that what a conversation has
        in the cache is there when it goes on. With an error, none was begun after it and none runs any more."""
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *(self._stop or ())))))
        first_turn = _at_most(sampling, self.config.max_response_tokens or sampling.max_new_tokens)
        seats = self.engine.config.rollout.engine.max_running
        conversations, errors = list[_Conversation](), list[ValueError]()
        waiting: dict[tuple[int, int], _Conversation] = {}  # for the policy, by request and sample
        unstarted = deque(prompts)
        while waiting or (unstarted and not errors):
            while unstarted and not errors and (not waiting or len(waiting) + sampling.num_samples <= seats):
                drawn = unstarted.popleft()
                request_id = runner.add(Request(drawn.prompt.ids, first_turn, drawn.key))
                begun = [_Conversation(drawn, i, list(drawn.prompt.ids)) for i in range(sampling.num_samples)]
                waiting |= {(request_id, c.sample_index): c for c in begun}
                conversations += begun
            spoken = [(waiting.pop((c.request_id, c.sample_index)), c) for c in runner.step()]
            errors += [_refusal(conversation, c) for conversation, c in spoken if c.error is not None]
            if errors:
                continue  # to the end of what runs
            for (conversation, turn), reply in zip(spoken, self._ask(spoken), strict=True):
                conversation.add_turn(turn)
                try:
                    room = self._answer(conversation, reply)
                except ValueError as caught:
                    errors.append(caught)
                    break
                if room:
                    next_turn = replace(_at_most(sampling, room), num_samples=1)
                    key, sample = conversation.drawn.key, conversation.sample_index
                    request_id = runner.add(Request(tuple(conversation.ids), next_turn, key, first_sample=sample))
                    waiting[request_id, sample] = conversation
        return conversations, next(iter(errors), None)

    def limit(self, prompt: Prompt) -> int:
        """Tokens of a response, at most."""
        room = self.engine.max_model_len - len(prompt.ids)
        return room if self.config.max_response_tokens is None else min(room, self.config.max_response_tokens)

    def _ask(self, spoken: Sequence[tuple[_Conversation, Completion]]) -> list[Reply | BaseException]:
        """What the environments reply to turns that have just ended, side by side; the exception where one fails."""
        texts = [self.engine.tokenizer.decode(turn.token_ids, skip_special_tokens=True) for _, turn in spoken]
        return self._calls.run([partial(self._reply, *pair, text) for pair, text in zip(spoken, texts, strict=True)])

    def _reply(self, conversation: _Conversation, turn: Completion, text: str) -> Reply:
        if conversation.environment is None:
            conversation.environment = self._make(conversation.drawn.prompt)
        reply = conversation.environment.reply(text, turn.token_ids, turn.finish_reason)
        if not isinstance(reply, Reply):
            raise TypeError(f"it replied {reply!r:.80}; allowed: a Reply")
        return reply

    def _answer(self, conversation: _Conversation, reply: Reply | BaseException) -> int:
        """Add what the environment says to a turn. Returns how many tokens the policy may add to that, 0 at the end."""
        if isinstance(reply, BaseException):
            conversation.fail(reply, self.config.error_reward)
            return 0
        conversation.reward += reply.reward
        if conversation.finish_reason == "length" or reply.text is None:
            return 0
        if conversation.num_turns == self.config.max_turns:
            conversation.finish_reason = "max_turns"
            return 0
        try:
            ids = self._encoder.encode(reply.text, after=conversation.ids[-1])
        except ValueError as error:
            row = conversation.drawn.prompt.index
            raise ValueError(f"environment {self.config.name}: row {row}: {error}") from error
        prompt = conversation.drawn.prompt
        room = self.limit(prompt) - (len(conversation.ids) - len(prompt.ids)) - len(ids)
        if room <= 0:
            conversation.finish_reason = "length"
            return 0
        conversation.add("environment", ids, (0.0,) * len(ids), (0.0,) * len(ids))
        return room


def last_turn(rollout: Rollout, tokenizer: Any) -> str:
    """What the policy said last, its answer: the text that a reward reads. Where there is one turn, the rollout's own text."""
    turns = [span for span in rollout.spans if span.source == "policy"]
    if len(turns) < 2:
        return rollout.text
    return tokenizer.decode(rollout.ids[turns[-1].start : turns[-1].stop], skip_special_tokens=True)


def conversation_statistics(rollouts: Sequence[Rollout], mesh: Mesh) -> dict[str, float]:
    """Per conversation: turns of the policy, tokens and reward of the environment; and the shares that ended at max_turns or with
    an environment that failed. Collective."""
    local = [
        len(rollouts),
        sum(span.source == "policy" for r in rollouts for span in r.spans),
        sum(span.stop - span.start for r in rollouts for span in r.spans if span.source == "environment"),
        sum(r.reward or 0.0 for r in rollouts),
        sum(r.finish_reason == "max_turns" for r in rollouts),
        sum(r.finish_reason == "environment_error" for r in rollouts),
    ]
    count, *sums = mesh.sum(local)
    names = ("turns", "environment_tokens", "environment_reward", "max_turns", "environment_errors")
    return {name: total / max(count, 1.0) for name, total in zip(names, sums, strict=True)}


@dataclass(slots=True)
class _Conversation:
    """One sample on its way through its turns; `ids` begin with the prompt's."""

    drawn: DrawnPrompt
    sample_index: int
    ids: list[int]
    spans: list[Span] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs_raw: list[float] = field(default_factory=list)
    environment: Environment | None = None  # made once its first turn has ended, where an error is the environment's
    num_turns: int = 0
    reward: float = 0.0
    finish_reason: str = ""
    weight_version: int = 0
    failure: BaseException | None = None

    def add(self, source: Source, ids: Sequence[int], logprobs: Sequence[float], logprobs_raw: Sequence[float]) -> None:
        if ids:
            self.spans.append(Span(len(self.ids), len(self.ids) + len(ids), source))
        self.ids += ids
        self.logprobs += logprobs
        self.logprobs_raw += logprobs_raw

    def add_turn(self, turn: Completion) -> None:
        self.add("policy", turn.token_ids, turn.logprobs, turn.logprobs_raw)
        self.num_turns += 1
        self.finish_reason, self.weight_version = turn.finish_reason, turn.weight_version

    def fail(self, failure: BaseException, reward: float) -> None:
        self.failure, self.reward, self.finish_reason = failure, reward, "environment_error"

    def rollout(self, tokenizer: Any) -> Rollout:
        prompt = self.drawn.prompt
        return Rollout(
            prompt=prompt,
            sample_index=self.sample_index,
            ids=tuple(self.ids),
            spans=tuple(self.spans),
            logprobs=tuple(self.logprobs),
            logprobs_raw=tuple(self.logprobs_raw),
            finish_reason=self.finish_reason,
            weight_version=self.weight_version,
            text=tokenizer.decode(self.ids[len(prompt.ids) :], skip_special_tokens=True),
            reward=self.reward,
            group=self.drawn.key,
        )


def _stop_strings(environment: Any) -> tuple[str, ...]:
    """Raises ValueError for what is no environment."""
    stop = getattr(environment, "stop", ())
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"its stop is {stop!r:.80}; allowed: a tuple of texts, such as ('</tool>',)")
    if not callable(getattr(environment, "reply", None)):
        raise ValueError("it has no method reply(text, ids, finish_reason)")
    return tuple(stop)


def _at_most(sampling: SamplingParams, room: int) -> SamplingParams:
    """`sampling` for a turn of at most `room` tokens."""
    most = min(sampling.max_new_tokens, room)
    return replace(sampling, max_new_tokens=most, min_new_tokens=min(sampling.min_new_tokens, most))


def _refusal(conversation: _Conversation, completion: Completion) -> ValueError:
    row = conversation.drawn.prompt.index
    return ValueError(f"rollout: the engine refused turn {conversation.num_turns + 1} of row {row}: {completion.error}")
