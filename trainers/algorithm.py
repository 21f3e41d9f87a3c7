"""What the loop asks of an algorithm. An algorithm is one short file (opsd.py, sft.py): it chooses the responses, names its
scorers and gives a loss per token; how steps, ranks, micro-batches and checkpoints go is the loop's."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hybrid.loss_head import TokenLoss
from trainers.data.order import DrawnPrompt
from trainers.losses.reductions import Reduction
from trainers.scoring import Scorer
from trainers.types import Prompt, Rollout


class Algorithm(Protocol):
    @property
    def prompts_per_step(self) -> int:
        """Over all ranks."""
        ...

    @property
    def temperature(self) -> float:
        """Of the loss and of log-probs."""
        ...

    @property
    def with_prompt(self) -> bool:
        """Whether the prompt's own tokens are trained on."""
        ...

    @property
    def scorers(self) -> Sequence[Scorer]: ...

    @property
    def reduction(self) -> Reduction: ...

    @property
    def constant_length(self) -> int | None:
        """Of reduction sum_per_constant."""
        ...

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError, before the first step, for prompts that lack what this algorithm needs."""
        ...

    def rollouts(self, step: int, prompts: Sequence[DrawnPrompt]) -> list[Rollout]:
        """This rank's share of the responses to the step's prompts, which are those of all ranks. Collective."""
        ...

    def token_loss(self) -> AbstractContextManager[TokenLoss]:
        """The loss per token, with whatever it needs gathered while the context is open."""
        ...

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """The step's record of the loss, from the means over tokens that the loss's metrics gave."""
        ...
