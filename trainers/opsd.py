"""On-policy (self-)distillation: the student answers, the teacher reads the answer, and every token is pulled towards what the
teacher would have said there (Agarwal et al. 2024, GKD). A self-teacher is the student with a privileged context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hybrid.batch import Batch
from hybrid.engine import HybridEngine
from hybrid.loss_head import TokenLoss
from trainers.algorithm import Algorithm, Learner, Take
from trainers.config import OPSDConfig
from trainers.data.order import coin
from trainers.losses import divergence_token_loss
from trainers.rollout import given_rollouts, given_share, require_privileged, require_room
from trainers.sampler import Sampler
from trainers.scoring import TeacherScorer
from trainers.types import Prompt, Rollout


class OPSD(Algorithm):
    config: OPSDConfig

    def __init__(self, config: OPSDConfig, engine: HybridEngine, teacher: TeacherScorer) -> None:
        self.config, self.engine, self.teacher = config, engine, teacher
        self.scorers = (teacher,)
        self.prompts_per_step = config.rollout.prompts_per_step
        self.temperature = config.rollout.sampling.temperature
        self.sampler = Sampler(config, config.rollout, engine)
        self.samples_elsewhere, self.conversations = config.rollout.is_foreign, self.sampler.conversations
        if config.loss.divergence == "sampled_token":
            self.sampler.warn_if_truncated("loss.divergence=sampled_token")

    def check(self, prompts: Sequence[Prompt]) -> None:
        config = self.config
        given = config.rollout.given_fraction > 0
        self.sampler.check(prompts)
        for model, privileged in ((self.engine.model, False), (self.teacher.model, True)):
            require_room(
                prompts,
                model.max_positions,
                max_new_tokens=self.sampler.longest_response,
                given=given,
                privileged=privileged,
            )
        if config.teacher.kind == "self":
            require_privileged(prompts, config.data)
        for prompt in prompts:
            if given and prompt.response_ids is None:
                raise ValueError(f"data: row {prompt.index} has no response; rollout.given_fraction needs data.response_column")

    def rollouts(self, step: int, take: Take) -> tuple[list[Rollout], dict[str, float]]:
        prompts = take(self.prompts_per_step)
        if coin(self.config.seed, step, self.config.rollout.given_fraction):
            mine = given_share(prompts, self.engine.rank, self.engine.world_size)
            return given_rollouts(mine, self.engine.weight_version), {}
        return self.sampler.draw(prompts)

    def close(self) -> None:
        super().close()
        self.sampler.close()

    def learners(self, step: int) -> Sequence[Learner]:
        loss = self.config.loss
        return [Learner(self.engine, self.token_loss, reduction=loss.reduction, constant_length=loss.constant_length)]

    @contextmanager
    def token_loss(self) -> Iterator[TokenLoss]:
        with self.teacher.head() as head:
            yield with_first_token(divergence_token_loss(self.config.loss, head, self.temperature, self.engine.model.kernels))

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        share = means.pop("first_token", 0.0)
        return means | {"first_token_loss": means["first_token_loss"] / share} if share else means


def with_first_token(token_loss: TokenLoss) -> TokenLoss:
    """Adds `first_token_loss`, the loss at each response's first token, and `first_token`, whether a position is one. Their ratio
    shows a teacher whose prompt ends otherwise than the student's (a template fault), which the mean over tokens hides."""

    def wrapped(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, metrics = token_loss(logits, chunk)
        assert chunk.response_index is not None
        first = chunk.response_index == 0
        metrics["first_token_loss"] = torch.where(first, per_token.detach(), 0.0)
        metrics["first_token"] = first.float()
        return per_token, metrics

    return wrapped
