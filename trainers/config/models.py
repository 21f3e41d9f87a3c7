"""The model that a run starts from."""

from __future__ import annotations

from pydantic import Field, model_validator

from hybrid.config import Strict


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
