"""One protocol for whoever generates rollouts, and the factory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from inference_v2.types import Completion, SamplingParams
from trainers.backends.config import BackendConfig

if TYPE_CHECKING:
    from hybrid.engine import HybridEngine


class ClosableGenerator(Protocol):
    """What rollouts need (trainers.rollout.Generator), and an end. Every verb is collective."""

    @property
    def max_model_len(self) -> int:
        """Prompt and new tokens of one request, at most."""
        ...

    def generate_together(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, keys: Sequence[int] | None = None
    ) -> dict[int, list[Completion]]:
        """The samples of this rank's share of `prompts`, which are those of all ranks and the same on each, by place in the list,
        under the engine's current weights. A prompt that can never be served comes back with `error`. Raises ValueError for
        sampling that the backend does not know."""
        ...

    def close(self) -> None: ...


class HybridGenerator:
    """The engine itself; to close it is its owner's."""

    def __init__(self, engine: HybridEngine) -> None:
        self.generate_together, self.max_model_len = engine.generate_together, engine.max_model_len

    def close(self) -> None:
        pass


def open_generator(config: BackendConfig, engine: HybridEngine) -> ClosableGenerator:
    """The generator that `config` names, for `engine`'s weights. Collective. Raises ValueError for a model or a machine that the
    backend cannot serve, BackendError where it does not start."""
    if config.backend == "hf":
        from trainers.backends.hf import HFGenerator

        return HFGenerator(engine)
    if config.backend == "vllm":
        from trainers.backends.vllm import VLLMGenerator

        assert config.vllm is not None, "checked by the config"
        return VLLMGenerator(engine, config.vllm)
    return HybridGenerator(engine)
