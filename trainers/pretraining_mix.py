"""The pretraining mixture of PPO-ptx (Ouyang et al. 2022): given sequences, some for each update of the policy."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hybrid.engine import HybridEngine
from trainers.algorithm import Mixture
from trainers.config import PolicyConfig
from trainers.data.order import DataPosition, PromptStream
from trainers.data.prompts import load_prompts
from trainers.losses import cross_entropy_token_loss
from trainers.rollout import given_rollouts, given_share, require_room

logger = logging.getLogger(__name__)


class PretrainingData:
    """Raises ValueError for rows without a response, or too long for the model."""

    def __init__(self, config: PolicyConfig, engine: HybridEngine) -> None:
        assert config.ptx is not None
        self.config, self.engine, self.seed = config.ptx, engine, config.seed
        given = {"train": config.ptx.data, "max_train": None, "privileged_template": None}
        found = load_prompts(config.data.model_copy(update=given), engine.tokenizer, eos_token_ids=engine.model.eos_token_ids)
        if engine.rank == 0:
            logger.log(logging.INFO if len(found) == found.num_rows else logging.WARNING, "ptx data: %s", found)
        self.prompts = found.prompts
        for prompt in self.prompts:
            if prompt.response_ids is None:
                raise ValueError(f"ptx.data: row {prompt.index} has no response; fill data.response_column")
        require_room(self.prompts, engine.max_model_len, given=True)
        self._stream = self._stream_from(DataPosition())

    def draw(self) -> Mixture:
        """The next batch: this rank's share."""
        mine = given_share(self._stream.take(self.config.batch_size), self.engine.rank, self.engine.world_size)
        return Mixture(
            name="ptx",
            rollouts=given_rollouts(mine, self.engine.weight_version),
            token_loss=cross_entropy_token_loss(1.0, self.engine.model.kernels),
            weight=self.config.weight,
            with_prompt=not self.config.completion_only,
        )

    def state(self) -> dict[str, Any]:
        return self._stream.position.to_json()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._stream = self._stream_from(DataPosition(**state))

    def _stream_from(self, position: DataPosition) -> PromptStream:
        return PromptStream(self.prompts, seed=self.seed, shuffle=True, position=position)
