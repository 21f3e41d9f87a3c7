"""Sections that recipes share."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hybrid.config import Strict
from inference_v2.types import SamplingParams
from trainers.backends.config import BackendConfig, check_sampling
from trainers.environments.config import EnvironmentConfig


class DataConfig(Strict):
    """Columns: `prompt` (text or messages), optional `response`, `privileged`, `answer`. JSONL, parquet, or a hub name."""

    train: str
    eval: str | None = None
    split: str = Field("train", description="hub data sets only")
    eval_split: str = "test"
    prompt_column: str = "prompt"
    response_column: str = "response"
    privileged_column: str = "privileged"
    answer_column: str = "answer"
    rejected_column: str | None = Field(None, description="recipe: reward (rejected); its pair's better one is response_column")
    margin_column: str = Field("margin", description="recipe: reward, optional: by how much the better one is better")
    chat: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: messages and, where the tokenizer has a chat template, text prompts go through it"
    )
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, description="variables of the chat template, e.g. {enable_thinking: false} for Qwen3"
    )
    system: str | None = Field(None, description="a system message put before prompts that have none")
    privileged_template: str | None = Field(
        None,
        description="str.format template over {prompt}, {privileged}, {answer} for text; None: text is put before the prompt, "
        "messages are put before the prompt's messages. Every kind of teacher reads the privileged prompt of a row that has one",
    )
    max_prompt_tokens: int = Field(1024, ge=1, description="longer prompts are dropped, with a count")
    max_response_tokens: int | None = Field(None, ge=1, description="given responses; longer ones are dropped, with a count")
    shuffle: bool = True
    max_train: int | None = Field(None, ge=1)
    max_eval: int | None = Field(None, ge=1)


class SamplingConfig(Strict):
    """What a rollout draws from. The checkpoint's generation_config is never read."""

    max_new_tokens: int = Field(128, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    min_new_tokens: int = Field(0, ge=0)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_token_ids: tuple[int, ...] = Field((), strict=False)
    stop: tuple[str, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _check(self) -> SamplingConfig:
        self.params()
        return self

    def params(self, *, num_samples: int = 1, seed: int = 0) -> SamplingParams:
        return SamplingParams(**self.model_dump(), num_samples=num_samples, seed=seed)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from something else than softmax(z / temperature)."""
        neutral = SamplingConfig()
        names = ("top_k", "top_p", "min_p", "min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty")
        return any(getattr(self, n) != getattr(neutral, n) for n in names)


class RolloutSection(BackendConfig):
    prompts_per_step: int = Field(32, ge=1, description="over all ranks")
    samples_per_prompt: int = Field(1, ge=1)
    given_fraction: float = Field(0.0, ge=0, le=1, description="share of steps on given responses; the coin is f(seed, step)")
    sampling: SamplingConfig = SamplingConfig()
    environment: EnvironmentConfig | None = Field(None, description="answers the policy between its turns (tools, verifiers)")

    @model_validator(mode="after")
    def _check_rollout(self) -> RolloutSection:
        if self.environment is not None and self.backend != "hybrid":
            raise ValueError(f"rollout.environment with backend={self.backend}; allowed: backend=hybrid")
        check_sampling(self.backend, self.sampling.params())
        return self


class TrainSection(Strict):
    micro_batch_tokens: int = Field(
        4096, ge=1, description="tokens of one forward and backward, per rank, padding included where there is any"
    )
    batch_size: int = Field(32, ge=1, description="SFT: sequences per optimizer step, over all ranks")
    completion_only: bool = Field(True, description="SFT: the prompt's tokens are not trained on")


class PairLoss(Strict):
    """-log sigmoid(s_chosen - s_rejected - margin) + centring (s_chosen + s_rejected)^2."""

    margin: bool = Field(False, description="take data.margin_column off the difference (Touvron et al. 2023)")
    centring: float = Field(0.0, ge=0, description="keeps scores near 0 (Eisenstein et al. 2023); 0.01 is usual")


class EvalConfig(Strict):
    every: int | None = Field(None, ge=1, description="steps between evaluations; None: before and after the run only")
    before: bool = True
    after: bool = True
    reward: str = Field(
        "exact_match",
        description="exact_match, numeric_match, math_verify, regex:PATTERN, format:PATTERN, module:function, a URL, or rewards: "
        "those that a policy is trained with, reward models and an environment's included",
    )
    max_new_tokens: int = Field(128, ge=1)
    samples: int = Field(4, ge=0, description="completions written to the table at each evaluation")
    stop: tuple[str, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        _ = self.sampling
        return self

    @property
    def by_training_rewards(self) -> bool:
        return self.reward == "rewards"

    @property
    def is_share(self) -> bool:
        """Whether the score is a share of right answers, between 0 and 1."""
        return self.reward.partition(":")[0] in ("exact_match", "numeric_match", "math_verify", "regex", "format")

    @property
    def sampling(self) -> SamplingParams:
        """Greedy."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=0.0, stop=self.stop)


class CertificateConfig(Strict):
    """Per-token |log p_rollout - log p_train|, on the first rollout of a process and every n steps."""

    every: int = Field(50, ge=0, description="0: the first rollout only")
    bound: float | None = Field(
        None, gt=0, description="per token; None: 1e-4 in float32, 0.5 in bfloat16 and for other rollout backends"
    )
    mean_bound: float | None = Field(
        None, gt=0, description="None: 1e-4 in float32, 0.1 in bfloat16 and for other rollout backends"
    )
    action: Literal["stop", "warn"] = "stop"


class CheckpointConfig(Strict):
    every: int | None = Field(100, ge=1, description="steps between checkpoints; None: at the end and on a signal only")
    keep: int = Field(2, ge=1)
    resume: Literal["auto", "never"] = Field(
        "auto",
        description="auto: go on from the last whole checkpoint of output_dir; never: delete its checkpoints and start over",
    )


class LogConfig(Strict):
    console: bool = True
    every: int = Field(1, ge=1)
    completions: int = Field(4, ge=0, description="completions per step written to completions.jsonl")
    console_completions_every: int | None = Field(None, ge=1, description="steps between completion tables on the console")
    tensorboard: bool = False
    wandb: str | None = Field(None, description="project name")
    trackio: str | None = Field(None, description="project name")
