"""Tiny random Hugging Face models of every registered family, and a character tokenizer: seconds, no downloads.

`from tiny import tiny_config, tiny_model, save_tiny, character_tokenizer` (tests/ is on sys.path).
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "exaone4", "exaone4_5")
CHARACTERS = "0123456789 +-*/=?.,:;!'\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PAD, EOS = 0, 1  # ids of the character tokenizer; eos also ends a turn
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] | upper }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_key_value_heads": 1, "out_hidden_size": 64,
    "window_size": 28, "fullatt_block_indexes": [1],
}  # fmt: skip


def character_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One id per character; `<pad>` 0, `<eos>` 1, `<unk>` 2, then `characters` in order. Encodes and decodes losslessly, adds
    no special tokens, and has a one-line-per-turn chat template."""
    vocab = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_config(family: str, **overrides: object) -> PreTrainedConfig:
    """A 4-layer config of `family`, hidden 64, 4 query and 2 kv heads, vocabulary 96 (the character tokenizer has fewer ids).

    exaone4 and exaone4_5 get a window of 8 in the pattern S, S, S, F. `overrides` go to the text config; `vision_config`
    overrides exaone4_5's vision tower. Any other model type that transformers knows works too.
    """
    text: dict = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.15, "bos_token_id": None,
        "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    if family == "qwen3":
        text["head_dim"] = 32
    if family == "mistral":
        text["sliding_window"] = 12
    if family.startswith("exaone4"):
        text |= {"sliding_window": 8, "sliding_window_pattern": 4}
    vision = VISION | overrides.pop("vision_config", {})  # type: ignore[operator]
    text |= overrides
    if family != "exaone4_5":
        return AutoConfig.for_model(family, **copy.deepcopy(text))
    vision["out_hidden_size"] = text["hidden_size"]
    return AutoConfig.for_model(
        family,
        text_config={"model_type": "exaone4", **copy.deepcopy(text)},
        vision_config=vision,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
    )


def tiny_model(
    family: str | PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: object
) -> PreTrainedModel:
    """The HF module of `tiny_config(family, **overrides)` (or of a given config) in eval mode. Norm weights and biases are
    random too, so that a swapped or forgotten one shows. The caller's random state is left as it was."""
    config = tiny_config(family, **overrides) if isinstance(family, str) else family
    auto = AutoModelForImageTextToText if config.model_type == "exaone4_5" else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                centre = 0.0 if name.endswith("bias") else 1.0
                torch.nn.init.normal_(parameter, mean=centre, std=0.2)
    model = model.to(dtype)
    if dtype != torch.float32:  # .to() also casts the non-persistent frequencies, which must stay fp32
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__ and hasattr(module, "compute_default_rope_parameters"):
                fresh = type(module)(module.config)
                module.inv_freq, module.original_inv_freq = fresh.inv_freq, fresh.original_inv_freq
    return model.eval()


def save_tiny(
    path: str | Path,
    family: str | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerFast | bool | None = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: object,
) -> PreTrainedModel:
    """Write `tiny_model(family, ...)` (or a given module) as a HF folder and return the module. `tokenizer=True` adds the
    character tokenizer, False or None writes none. A small `max_shard_size` ("20KB") gives several shards and an index."""
    model = tiny_model(family, seed=seed, dtype=dtype, **overrides) if isinstance(family, str) else family
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer is True:
        tokenizer = character_tokenizer()
    if tokenizer:
        tokenizer.save_pretrained(path)
    return model
