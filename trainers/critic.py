"""The critic: a scalar model with an optimizer of its own, and the scorer of `values`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hybrid.config import HybridConfig, LoraConfig
from hybrid.engine import HybridEngine
from hybrid.loss_head import TokenLoss
from trainers.config import Critic
from trainers.data.batching import counted_positions
from trainers.losses.policy import value_token_loss
from trainers.scoring import check_same_vocabulary, in_micro_batches
from trainers.types import Rollout


class SharedCritic:
    """`values` from a scalar head on the policy's own trunk; its loss is added to the policy's."""

    field = "values"
    reads_policy = False

    def __init__(self, config: Critic, policy: HybridEngine, *, micro_batch_tokens: int) -> None:
        self.config, self.policy, self.micro_batch_tokens = config, policy, micro_batch_tokens

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """As CriticModel.score."""
        model = self.policy.model
        return in_micro_batches(self.policy, model, rollouts, self.micro_batch_tokens, model.values, value_places(rollouts))

    def after_step(self) -> None:
        """It is the policy's."""

    def averages(self) -> dict[str, Tensor]:
        return {}

    def close(self) -> None:
        """Nothing of its own is open."""


def value_places(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Of each rollout: the tokens before its counted ones, and its last."""
    return [[p - 1 for p in counted_positions(r)] + [len(r.ids) - 1] for r in rollouts]


def critic_settings(policy: HybridConfig) -> HybridConfig:
    """The policy's, but for what is about its vocabulary and its parameters' names. Where that goes on from an adapter, which is
    not the critic's, the critic gets one of the default shape."""
    lora = policy.lora if policy.lora is None or policy.lora.path is None else LoraConfig()
    return policy.model_copy(update={"vocab_limit": None, "freeze": (), "lora": lora})


class CriticModel:
    """`values`: for a rollout of n counted tokens [n + 1], the value read at the token before each, and at its last token."""

    field = "values"
    reads_policy = False

    def __init__(
        self,
        config: Critic,
        policy: HybridEngine,
        settings: HybridConfig,
        *,
        start: str,
        tokenizer: str | None,
        num_updates: int,
        micro_batch_tokens: int,
    ) -> None:
        """`settings` and `tokenizer` are the policy's; `start` is what the policy started from; the rate's decay ends at
        `num_updates`. Raises ValueError for another vocabulary."""
        self.config, self.policy, self.micro_batch_tokens = config, policy, micro_batch_tokens
        optimizer = config.optimizer.until(num_updates)
        own = critic_settings(settings).model_copy(update={"optimizer": optimizer})
        named = tokenizer if config.path is None else None
        self.engine = HybridEngine.from_pretrained(config.path or start, own, tokenizer=named, scalar=True)
        if config.path is not None and policy.tokenizer is not None:
            vocabulary = None if self.engine.tokenizer is None else self.engine.tokenizer.get_vocab()
            check_same_vocabulary(policy.tokenizer.get_vocab(), vocabulary, config.path, roles=("policy", "critic"))
        self._move("cpu")

    def score(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        with self.on_device():
            model = self.engine.model
            return in_micro_batches(self.policy, model, rollouts, self.micro_batch_tokens, model.scores, value_places(rollouts))

    @contextmanager
    def token_loss(self) -> Iterator[TokenLoss]:
        yield value_token_loss(self.config.clip)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """With `offload`, shards and optimizer state are on the device only inside."""
        self._move(self.policy.mesh.device)
        try:
            yield
        finally:
            self._move("cpu")

    def _move(self, device: torch.device | str) -> None:
        if not self.config.offload or self.policy.mesh.device.type == "cpu":
            return
        model = self.engine.model
        if str(device) == "cpu":
            model.offload()
        else:
            model.onload()
        if self.engine.config.offload_optimizer:
            return  # it stays in host memory
        for group in self.engine.optimizer.param_groups:
            steps_too = bool(group.get("fused") or group.get("capturable"))  # else step counts are the host's
            for state in (self.engine.optimizer.state.get(p, {}) for p in group["params"]):
                for name, value in state.items():
                    if isinstance(value, Tensor) and (value.ndim or steps_too):
                        state[name] = value.to(device)

    def after_step(self) -> None:
        """It has stepped by itself."""

    def averages(self) -> dict[str, Tensor]:
        return {}

    def close(self) -> None:
        self.engine.close()
