"""The YAML of a run as typed, frozen classes. No torch.

A recipe is `recipe:` (the algorithm) plus the sections below; an unknown key is an error that names the nearest known one
(recipes.cli formats it). Values are resolved once, written to `output_dir/config.yaml`, and never change afterwards.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from hybrid.config import HybridConfig, Strict
from inference_v2.types import SamplingParams


class NewModel(Strict):
    """A randomly initialised model, made into an ordinary HF folder under `output_dir/init` and then loaded like any other."""

    architecture: str = Field(description="a transformers model_type, e.g. qwen3 or exaone4")
    characters: str = Field(description="the vocabulary of its character tokenizer; <pad>, <eos> come first")
    settings: dict[str, int | float | bool | str | list[str] | None] = Field(
        default_factory=dict, description="fields of the transformers config (hidden_size, num_hidden_layers, ...)"
    )
    seed: int = Field(0, ge=0, description="of its random weights; on the command line the default is the run's seed")


class ModelConfig(Strict):
    path: str | None = Field(None, description="a HF folder or hub name")
    new: NewModel | None = None
    recipe: str | None = Field(
        None, description="a recipe that trains the model to start from into output_dir/start/model if it is not there yet"
    )
    tokenizer: str | None = Field(None, description="folder or hub name; None: beside the model")

    @model_validator(mode="after")
    def _one(self) -> ModelConfig:
        if [self.path, self.new, self.recipe].count(None) != 2:
            raise ValueError(
                "give exactly one of path (a HF folder or hub name), new (a fresh small model) and recipe (which trains it)"
            )
        return self


Scoring = Literal["auto", "engine", "module"]
SCORING = (
    "how its hidden states are made: engine: packed prefills of the inference engine, a prompt once for all its samples; module: "
    "the training module's forward; auto: engine for registered model types"
)


class FrozenTeacher(Strict):
    kind: Literal["frozen"] = "frozen"
    path: str | None = Field(None, description="another HF folder or hub name")
    recipe: str | None = Field(
        None, description="a recipe that trains the teacher into output_dir/teacher/model if it is not there yet"
    )
    offload: bool = Field(False, description="move its shards to host memory between uses (CUDA)")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(None, description="None: as engine.compute_dtype")
    scoring: Scoring = Field("auto", description=SCORING)

    @model_validator(mode="after")
    def _one(self) -> FrozenTeacher:
        if (self.path is None) == (self.recipe is None):
            raise ValueError("give exactly one of path (a HF folder or hub name) and recipe (which trains it)")
        return self


class SelfTeacher(Strict):
    """The student itself, made better by what the `privileged` column adds to its prompt."""

    kind: Literal["self"]
    weights: Literal["start", "live", "ema"] = Field("start", description="frozen at the start, today's, or an average")
    ema_decay: float = Field(0.99, ge=0, lt=1, description="weights: ema only")
    offload: bool = Field(False, description="as a frozen teacher's; weights: live has none of its own to move")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(None, description="as a frozen teacher's; not for weights: live")
    scoring: Scoring = Field("auto", description=SCORING)

    @model_validator(mode="after")
    def _check(self) -> SelfTeacher:
        if self.weights == "live" and (self.offload or self.compute_dtype is not None):
            raise ValueError("weights=live reads the student's own weights; leave out offload and compute_dtype")
        return self


def _kind(teacher: Any) -> str | None:
    """A teacher is frozen unless it says otherwise."""
    return teacher.get("kind", "frozen") if isinstance(teacher, dict) else getattr(teacher, "kind", None)


Teacher = Annotated[Annotated[FrozenTeacher, Tag("frozen")] | Annotated[SelfTeacher, Tag("self")], Discriminator(_kind)]


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


class RolloutSection(Strict):
    prompts_per_step: int = Field(32, ge=1, description="over all ranks")
    samples_per_prompt: int = Field(1, ge=1)
    given_fraction: float = Field(0.0, ge=0, le=1, description="share of steps on given responses; the coin is f(seed, step)")
    sampling: SamplingConfig = SamplingConfig()


class DistillLoss(Strict):
    """The per-token divergence (equations in trainers/losses/divergence.py); student and teacher share the rollout's
    temperature, and there is no tau^2 factor."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "jsd_normalised", "skew_forward", "skew_reverse", "sampled_token"] = (
        "reverse_kl"
    )
    beta: float = Field(0.5, ge=0, le=1, description="jsd, jsd_normalised")
    skew: float = Field(0.1, ge=0, le=1, description="lambda of skew_forward and skew_reverse")
    top_k: int | None = Field(None, ge=1, description="restrict the two KLs to a support of k tokens; None: all of them")
    support: Literal["teacher", "student"] = Field("teacher", description="whose top k")
    tail: Literal["bucket", "renormalise"] = "bucket"
    clip_element: float | None = Field(None, gt=0, description="cap of each vocabulary term, before the sum")
    clip_token: float | None = Field(None, gt=0, description="cap of a token's divergence, after the sum")
    ratio_clip: float | None = Field(None, gt=0, description="sampled_token: clip the ratio to 1 +- this")
    cross_entropy: float = Field(0.0, ge=0, description="weight of cross-entropy in the steps on given responses")
    reduction: Literal["token_mean", "sequence_mean", "sum_per_constant"] = "token_mean"
    constant_length: int | None = Field(None, ge=1, description="sum_per_constant: the L in sum / (sequences * L)")

    @model_validator(mode="after")
    def _check(self) -> DistillLoss:
        if self.top_k is not None and self.divergence not in ("forward_kl", "reverse_kl"):
            raise ValueError(f"loss.top_k with divergence={self.divergence}; allowed: forward_kl, reverse_kl")
        if self.ratio_clip is not None and self.divergence != "sampled_token":
            raise ValueError(f"loss.ratio_clip with divergence={self.divergence}; allowed: sampled_token")
        if self.clip_element is not None and self.divergence == "sampled_token":
            raise ValueError(
                "loss.clip_element with divergence=sampled_token, which has no sum over the vocabulary; use ratio_clip"
            )
        if self.reduction == "sum_per_constant" and self.constant_length is None:
            raise ValueError("loss.reduction=sum_per_constant needs loss.constant_length")
        return self


class TrainSection(Strict):
    micro_batch_tokens: int = Field(
        4096, ge=1, description="tokens of one forward and backward, per rank, padding included where there is any"
    )
    batch_size: int = Field(32, ge=1, description="SFT: sequences per optimizer step, over all ranks")
    completion_only: bool = Field(True, description="SFT: the prompt's tokens are not trained on")


class EvalConfig(Strict):
    every: int | None = Field(None, ge=1, description="steps between evaluations; None: before and after the run only")
    before: bool = True
    after: bool = True
    reward: str = Field("exact_match", description="exact_match, numeric_match, regex:PATTERN, or module:function")
    max_new_tokens: int = Field(128, ge=1)
    samples: int = Field(4, ge=0, description="completions written to the table at each evaluation")
    stop: tuple[str, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _check(self) -> EvalConfig:
        _ = self.sampling
        return self

    @property
    def sampling(self) -> SamplingParams:
        """Greedy."""
        return SamplingParams(max_new_tokens=self.max_new_tokens, temperature=0.0, stop=self.stop)


class CertificateConfig(Strict):
    """Per-token |log p_rollout - log p_train|, on the first rollout of a process and every n steps."""

    every: int = Field(50, ge=0, description="0: the first rollout only")
    bound: float | None = Field(None, gt=0, description="per token; None: 1e-4 in float32, 0.5 in bfloat16")
    mean_bound: float | None = Field(None, gt=0, description="None: 1e-4 in float32, 0.1 in bfloat16")
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


class RunConfig(Strict):
    """What every recipe has."""

    output_dir: str
    seed: int = Field(0, ge=0)
    max_steps: int = Field(100, ge=1)
    model: ModelConfig
    data: DataConfig
    engine: HybridConfig = HybridConfig()
    train: TrainSection = TrainSection()
    eval: EvalConfig = EvalConfig()
    certificate: CertificateConfig = CertificateConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class OPSDConfig(RunConfig):
    recipe: Literal["opsd"]
    teacher: Teacher
    rollout: RolloutSection = RolloutSection()
    loss: DistillLoss = DistillLoss()

    @model_validator(mode="after")
    def _check(self) -> OPSDConfig:
        if self.loss.divergence == "sampled_token" and self.rollout.given_fraction > 0:
            raise ValueError("loss.divergence=sampled_token needs tokens drawn from the policy; set rollout.given_fraction=0")
        if self.loss.cross_entropy > 0 and self.rollout.given_fraction == 0:
            raise ValueError("loss.cross_entropy acts on given responses, and rollout.given_fraction=0 uses none; raise it")
        return self


class SFTConfig(RunConfig):
    """Unlike on-policy recipes, keeps the checkpoint's dropout unless `engine.dropout` says otherwise."""

    recipe: Literal["sft"]
    engine: HybridConfig = HybridConfig(dropout=True)

    @field_validator("engine", mode="before")
    @classmethod
    def _keep_dropout(cls, engine: Any) -> Any:
        return {"dropout": True, **engine} if isinstance(engine, dict) else engine


CONFIGS: dict[str, type[RunConfig]] = {"opsd": OPSDConfig, "sft": SFTConfig}
