"""What the step's responses are worth: reward functions on the rank that holds a response, reward models on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hybrid.config import HybridConfig
from hybrid.engine import HybridEngine
from hybrid.mesh import raise_together
from hybrid.models import SCALAR_HEAD, ShardedModel
from trainers.config import RewardComponent, RewardModelRef
from trainers.rewards import RewardConfig, Rewards, Scores, reward_metrics
from trainers.scoring import check_same_vocabulary, in_micro_batches
from trainers.types import Prompt, Rollout


class RewardModel:
    """A frozen scalar model, read at a response's last token. Raises ValueError for another vocabulary than the policy's, whose
    ids it reads."""

    def __init__(self, config: RewardModelRef, engine: HybridEngine, settings: HybridConfig, *, micro_batch_tokens: int) -> None:
        if config.model is None:
            raise ValueError("rewards: recipe is not trained yet; run it first and set `model` to its model folder")
        self.config, self.engine, self.micro_batch_tokens = config, engine, micro_batch_tokens
        own = settings.model_copy(update={"vocab_limit": None, "dropout": False})
        self.model = ShardedModel.from_pretrained(config.model, own, engine.mesh, trainable=False, scalar=True)
        if self.model.files is None or SCALAR_HEAD not in self.model.files.names():
            raise ValueError(f"rewards: {config.model} has no {SCALAR_HEAD}; allowed: a reward model (recipe: reward makes one)")
        vocabulary = None if self.model.tokenizer is None else self.model.tokenizer.get_vocab()
        check_same_vocabulary(engine.tokenizer.get_vocab(), vocabulary, config.model, roles=("policy", "reward model"))
        if config.offload:
            self.model.offload()

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Collective."""
        self.model.onload()
        places = [[len(r.ids) - 1] for r in rollouts]
        found = in_micro_batches(self.engine, self.model, rollouts, self.micro_batch_tokens, self.model.scores, places)
        if self.config.offload:
            self.model.offload()
        return [values.item() for values in found]


class RewardScorer:
    """All components of a recipe's `rewards`."""

    def __init__(
        self, components: Sequence[RewardComponent], engine: HybridEngine, settings: HybridConfig, *, micro_batch_tokens: int
    ) -> None:
        self.engine = engine
        self.functions = Rewards([c for c in components if isinstance(c, RewardConfig)], raise_together)
        refs = [c for c in components if isinstance(c, RewardModelRef)]
        self.models = [RewardModel(c, engine, settings, micro_batch_tokens=micro_batch_tokens) for c in refs]
        numbers = [""] if len(refs) == 1 else [f"_{i + 1}" for i in range(len(refs))]
        self.model_names = tuple(f"model{number}" for number in numbers)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the components, as metrics and completions call them."""
        return (*self.functions.names, *self.model_names)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError naming the first row that a built-in function cannot score. Collective."""
        self.functions.check(prompts)

    def score(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], dict[str, float]]:
        """The rollouts with `reward` and `reward_parts`, and metrics over all ranks. Collective."""
        scores = self.scores(rollouts)
        metrics = reward_metrics(scores, self.names, self.engine.mesh.sum)
        judged = [
            replace(r, reward=s.total, reward_parts={**(r.reward_parts or {}), **s.parts})
            for r, s in zip(rollouts, scores, strict=True)
        ]
        return judged, metrics

    def scores(self, rollouts: Sequence[Rollout]) -> list[Scores]:
        """What each is worth; what it has already, from an environment, is added. Collective."""
        scores = [
            Scores(total=s.total + (r.reward or 0.0), parts=s.parts, failed=s.failed)
            for s, r in zip(self.functions.score(rollouts), rollouts, strict=True)
        ]
        for name, model in zip(self.model_names, self.models, strict=True):
            values = model.score(rollouts)
            weight = model.config.weight
            scores = [
                Scores(total=s.total + weight * value, parts={**s.parts, name: value}, failed=s.failed)
                for s, value in zip(scores, values, strict=True)
            ]
        return scores

    def close(self) -> None:
        self.functions.close()
