"""A reward model from pairs (Bradley and Terry 1952; for language models Stiennon et al. 2020): a scalar head on the backbone,
read at a response's last token, its end-of-sequence token. Saved as a transformers sequence classifier with one label."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from hybrid.batch import Batch
from hybrid.engine import HybridEngine
from hybrid.loss_head import TokenLoss
from trainers.algorithm import Algorithm, Fields, Learner, Take
from trainers.config import RewardRecipe
from trainers.data.batching import counted_positions, read_at
from trainers.data.order import DrawnPrompt, share
from trainers.losses.policy import reward_pair_loss
from trainers.rollout import given_rollouts, require_room
from trainers.scoring import in_micro_batches
from trainers.types import Prompt, Rollout


class RewardTraining(Algorithm):
    config: RewardRecipe
    unit = 2  # a pair is compared within one micro-batch

    def __init__(self, config: RewardRecipe, engine: HybridEngine) -> None:
        self.config, self.engine = config, engine
        self.prompts_per_step = config.train.batch_size

    def check(self, prompts: Sequence[Prompt]) -> None:
        check_pairs(prompts, self.engine.max_model_len)
        if self.config.loss.margin:
            for prompt in prompts:
                if prompt.margin is None:
                    raise ValueError(f"data: row {prompt.index} has no margin; fill data.margin_column, or set loss.margin=false")

    def rollouts(self, step: int, take: Take) -> tuple[list[Rollout], dict[str, float]]:
        return pair_rollouts(take(self.prompts_per_step), self.engine), {}

    def experience(self, step: int, rollouts: Sequence[Rollout], fields: Fields) -> tuple[Fields, dict[str, float]]:
        if not self.config.loss.margin:
            return fields, {}
        margins = [torch.full((len(counted_positions(r)),), r.prompt.margin or 0.0) for r in rollouts]
        return fields | {"margins": margins}, {}

    def before_update(self, number: int, batches: list[Batch]) -> list[Batch]:
        return [at_the_end(batch) for batch in batches]

    def learners(self, step: int) -> Sequence[Learner]:
        return [Learner(self.engine, self.token_loss)]

    @contextmanager
    def token_loss(self) -> Iterator[TokenLoss]:
        yield reward_pair_loss(self.config.loss.centring)

    def open_evaluator(self, prompts: Sequence[Prompt]) -> PairEvaluator:
        check_pairs(prompts, self.engine.max_model_len)
        return PairEvaluator(prompts, self.config.train.micro_batch_tokens)


@dataclass(frozen=True)
class PairEvaluation:
    """Over all held-out pairs of all ranks."""

    accuracy: float  # share with the higher score on the chosen response; a tie counts half
    margin: float  # mean difference of the scores
    samples: tuple[Rollout, ...] = ()

    def metrics(self) -> dict[str, float]:
        return {"eval_accuracy": self.accuracy, "eval_margin": self.margin}


class PairEvaluator:
    def __init__(self, prompts: Sequence[Prompt], micro_batch_tokens: int) -> None:
        self.prompts, self.micro_batch_tokens = prompts, micro_batch_tokens

    def run(self, engine: HybridEngine) -> PairEvaluation:
        """Collective: each rank scores its share."""
        rollouts = pair_rollouts([DrawnPrompt(p, epoch=0) for p in self.prompts], engine)
        places = [[len(r.ids) - 1] for r in rollouts]
        found = in_micro_batches(engine, engine.model, rollouts, self.micro_batch_tokens, engine.model.scores, places)
        scores = [values.item() for values in found]
        differences = [chosen - rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
        right = sum(1.0 if d > 0 else 0.5 if d == 0 else 0.0 for d in differences)
        accuracy, margin = (total / len(self.prompts) for total in engine.mesh.sum([right, sum(differences)]))
        return PairEvaluation(accuracy, margin)

    def close(self) -> None:
        """Nothing is open."""


def check_pairs(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raises ValueError naming the first row that is no pair, or is too long for the model."""
    for prompt in prompts:
        if prompt.response_ids is None or prompt.rejected_ids is None:
            raise ValueError(
                f"data: row {prompt.index} is no pair; fill the columns data.response_column (chosen) and data.rejected_column"
            )
        if prompt.response_ids == prompt.rejected_ids:
            raise ValueError(f"data: row {prompt.index} has one response twice, chosen and rejected; leave the row out")
    require_room([*prompts, *map(_rejected, prompts)], max_model_len, given=True)


def pair_rollouts(prompts: Sequence[DrawnPrompt], engine: HybridEngine) -> list[Rollout]:
    """This rank's share of the pairs of all ranks: chosen, rejected, chosen, rejected, ..."""
    work = [len(d.prompt.ids) * 2 + len(d.prompt.response_ids or ()) + len(d.prompt.rejected_ids or ()) for d in prompts]
    mine = share(prompts, engine.rank, engine.world_size, work)
    both = [(d, replace(d, prompt=_rejected(d.prompt))) for d in mine]
    return given_rollouts([d for pair in both for d in pair], engine.weight_version)


def at_the_end(batch: Batch) -> Batch:
    """The batch read at each sequence's last token, with the margin of each."""
    ends = [[n - 1] for n in batch.cu_seqlens.diff().tolist()]
    read = read_at(batch, ends)
    if batch.margins is None:
        return read
    margins = torch.zeros(batch.num_sequences).index_put_((batch.sequence_index,), batch.margins)
    return replace(read, margins=margins)


def _rejected(prompt: Prompt) -> Prompt:
    return replace(prompt, response=None, response_ids=prompt.rejected_ids)
