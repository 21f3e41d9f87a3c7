"""Supervised fine-tuning on given responses: cross-entropy, on the response alone by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybrid.engine import HybridEngine
from hybrid.loss_head import TokenLoss
from trainers.algorithm import Algorithm, Learner, Take
from trainers.config import SFTConfig
from trainers.losses import cross_entropy_token_loss
from trainers.rollout import given_rollouts, given_share, require_room
from trainers.types import Prompt, Rollout


class SFT(Algorithm):
    config: SFTConfig

    def __init__(self, config: SFTConfig, engine: HybridEngine) -> None:
        self.config, self.engine = config, engine
        self.prompts_per_step = config.train.batch_size
        self.with_prompt = not config.train.completion_only

    def check(self, prompts: Sequence[Prompt]) -> None:
        for prompt in prompts:
            if prompt.response_ids is None:
                raise ValueError(f"data: row {prompt.index} has no response to train on; fill data.response_column")
        require_room(prompts, self.engine.max_model_len, given=True)

    def rollouts(self, step: int, take: Take) -> tuple[list[Rollout], dict[str, float]]:
        mine = given_share(take(self.prompts_per_step), self.engine.rank, self.engine.world_size)
        return given_rollouts(mine, self.engine.weight_version), {}

    def learners(self, step: int) -> Sequence[Learner]:
        return [Learner(self.engine, self.token_loss)]

    @contextmanager
    def token_loss(self) -> Iterator[TokenLoss]:
        yield cross_entropy_token_loss(self.temperature, self.engine.model.kernels)
