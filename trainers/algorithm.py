"""What the loop asks of an algorithm.

An algorithm is one short file (opsd.py, sft.py, ppo.py, ...): it chooses the responses, names its scorers, turns what they found
into what its losses read, and gives a loss per token for each model that learns; how steps, ranks, micro-batches and checkpoints
go is the loop's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from hybrid.batch import Batch
from hybrid.engine import HybridEngine
from hybrid.loss_head import TokenLoss
from trainers.config import RunConfig
from trainers.data.order import DrawnPrompt
from trainers.environments.conversations import Conversations
from trainers.evaluation import Evaluator
from trainers.losses.reductions import Reduction
from trainers.reward_scoring import RewardScorer
from trainers.rollout import require_room
from trainers.scoring import Scorer
from trainers.types import Prompt, Rollout

Take = Callable[[int], list[DrawnPrompt]]  # the next n prompts of the data, the same on every rank
Fields = dict[str, list[Tensor]]  # by Batch field: a tensor [n_i, ...] for each rollout of this rank's share


@dataclass(frozen=True)
class Learner:
    """A model that is updated on a mini-batch. `prefix` goes before its metrics' names; `on_device` is open until it has
    stepped."""

    engine: HybridEngine
    token_loss: Callable[[], AbstractContextManager[TokenLoss]]  # with whatever it needs gathered while the context is open
    prefix: str = ""
    reduction: Reduction = "token_mean"
    constant_length: int | None = None  # of reduction sum_per_constant
    value_loss: TokenLoss | None = None  # of a value head on the same trunk
    value_weight: float = 1.0
    on_device: Callable[[], AbstractContextManager[None]] = nullcontext  # where its weights may be elsewhere in between


@dataclass(frozen=True)
class Mixture:
    """A further loss of an update, on sequences of its own, with a denominator of its own: weight x mean over their tokens."""

    name: str
    rollouts: Sequence[Rollout]
    token_loss: TokenLoss
    weight: float
    with_prompt: bool = False  # whether the prompts' own tokens are trained on


class HeldOutScore(Protocol):
    """What an evaluation found; `samples` go to the completions table."""

    @property
    def samples(self) -> Sequence[Rollout]: ...

    def metrics(self) -> dict[str, float]: ...


class EvaluatesHeldOut(Protocol):
    def run(self, engine: HybridEngine) -> HeldOutScore:
        """Collective."""
        ...

    def close(self) -> None: ...


class Algorithm(ABC):
    """Defaults are those of an algorithm with one model, one update a step, and nothing to remember."""

    config: RunConfig
    engine: HybridEngine  # the policy's
    prompts_per_step: int  # over all ranks
    temperature: float = 1.0  # of the loss and of log-probs
    with_prompt: bool = False  # whether the prompt's own tokens are trained on
    scorers: Sequence[Scorer] = ()
    unit: int = 1  # so many rollouts in a row stay in one micro-batch
    samples_again: bool = False  # whether `rollouts` may generate several times
    conversations: Conversations | None = None  # where responses have several turns, of evaluations too
    held_out_rewards: RewardScorer | None = None  # what scores evaluations, where eval.reward=rewards
    samples_elsewhere: bool = False  # whether another engine than the one that trains generates
    others: Mapping[str, HybridEngine] = MappingProxyType({})  # models that learn beside the policy, for checkpoints

    @abstractmethod
    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError, before the first step, for prompts that lack what this algorithm needs."""

    @abstractmethod
    def rollouts(self, step: int, take: Take) -> tuple[list[Rollout], dict[str, float]]:
        """This rank's share of the step's responses, and metrics. Collective."""

    def experience(self, step: int, rollouts: Sequence[Rollout], fields: Fields) -> tuple[Fields, dict[str, float]]:
        """What the losses read, from what the scorers found, and metrics. Collective."""
        return fields, {}

    def minibatches(self, step: int, rollouts: Sequence[Rollout]) -> Iterable[Sequence[int]]:
        """For each update of the step, this rank's places in `rollouts`; as many updates on every rank, and any place may be in
        none or in several. Collective."""
        return [range(len(rollouts))]

    @abstractmethod
    def learners(self, step: int) -> Sequence[Learner]:
        """The models that each update of the step changes, in order; the policy only if it learns."""

    def before_update(self, number: int, batches: list[Batch]) -> list[Batch]:
        """The micro-batches of the step's update `number` (from 0), with what depends on today's weights. Collective."""
        return batches

    def mixtures(self, step: int, number: int) -> Sequence[Mixture]:
        """Further losses of the policy in that update: as many on every rank."""
        return ()

    def after_step(self) -> None:
        """Called once the policy's weights have changed."""
        for scorer in self.scorers:
            scorer.after_step()

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """The record of an update's loss, from the means over tokens that the loss's metrics gave."""
        return means

    def open_evaluator(self, prompts: Sequence[Prompt]) -> EvaluatesHeldOut:
        """Raises ValueError for prompts that it cannot score."""
        require_room(prompts, self.engine.max_model_len, max_new_tokens=self.config.eval.max_new_tokens)
        return Evaluator(self.config.eval, prompts, self.conversations, self.held_out_rewards)

    # -- state

    def averages(self) -> dict[str, Tensor]:
        """The moving averages that checkpoints must hold, as DTensors."""
        return {name: t for scorer in self.scorers for name, t in scorer.averages().items()}

    def state(self) -> dict[str, Any]:
        """What else a resumed run must know, as JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes what `state` gave."""

    def export(self, run_dir: Path) -> None:  # noqa: B027
        """Writes more than the policy's own folder, beside it. Collective."""

    def close(self) -> None:
        for scorer in self.scorers:
            scorer.close()
