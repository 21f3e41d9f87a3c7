"""Who draws a step's responses: `rollout.backend`, and `rollout.environment` where there are several turns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from hybrid.engine import HybridEngine
from trainers.backends.generators import open_generator
from trainers.config import RunConfig
from trainers.config.sections import RolloutSection
from trainers.data.order import DrawnPrompt
from trainers.environments.conversations import Conversations, conversation_statistics, last_turn
from trainers.rollout import require_room, sample_rollouts
from trainers.types import Prompt, Rollout

logger = logging.getLogger(__name__)


class Sampler:
    """Raises ValueError for a backend or environment that this model or sampling does not go with. Collective."""

    def __init__(self, run: RunConfig, rollout: RolloutSection, engine: HybridEngine) -> None:
        self.config, self.engine = rollout, engine
        self.sampling = rollout.sampling.params(num_samples=rollout.samples_per_prompt, seed=run.seed)
        self._generator = open_generator(rollout, engine)
        self.conversations = None
        if rollout.environment is not None:
            variables = run.data.chat_template_kwargs
            self.conversations = Conversations(rollout.environment, engine, chat_template_kwargs=variables)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError naming a row that leaves a response no room, or that the environment refuses."""
        require_room(prompts, self._generator.max_model_len, max_new_tokens=self.sampling.max_new_tokens)
        if self.conversations is not None:
            self.conversations.check(prompts)

    def longest_response(self, prompt: Prompt) -> int:
        """Tokens that a response to it may have, those of an environment included."""
        return self.sampling.max_new_tokens if self.conversations is None else self.conversations.limit(prompt)

    def warn_if_truncated(self, reader: str) -> None:
        if self.config.sampling.truncates and self.engine.rank == 0:
            logger.warning(
                "%s with truncated or penalised sampling: its gradient is right only for tokens drawn from softmax(z / "
                "temperature); set top_k=0, top_p=1, min_p=0, min_new_tokens=0 and no penalties", reader,
            )  # fmt: skip

    def draw(self, prompts: Sequence[DrawnPrompt]) -> tuple[list[Rollout], dict[str, float]]:
        """This rank's share of the responses to the prompts of all ranks, and metrics. Collective."""
        if self.conversations is None:
            return sample_rollouts(self._generator, prompts, self.sampling), {}
        rollouts = self.conversations.sample(prompts, self.sampling)
        return rollouts, conversation_statistics(rollouts, self.engine.mesh)

    def answers(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """The rollouts as rewards read them: with the policy's last turn as their text."""
        if self.conversations is None:
            return list(rollouts)
        return [replace(r, text=last_turn(r, self.engine.tokenizer)) for r in rollouts]

    def close(self) -> None:
        self._generator.close()
