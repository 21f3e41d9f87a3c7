"""`model.new`: a small random model with a character tokenizer, written as an ordinary HF folder."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from trainers.config import NewModel

SPECIAL_TOKENS = ("<pad>", "<eos>")


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One id per character, after `<pad>` 0 and `<eos>` 1. It adds no special tokens, has no chat template, and refuses a
    character that it does not know. Raises ValueError for no or repeated characters."""
    if not characters or len(set(characters)) != len(characters):
        twice = sorted({c for c in characters if characters.count(c) > 1})
        raise ValueError(f"model.new.characters={characters!r}; allowed: at least one character, each once (twice: {twice})")
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unknown>"))  # not in the vocabulary: an unknown one is an error
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, eos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos, clean_up_tokenization_spaces=False)


def write_new_model(new: NewModel, folder: Path) -> None:
    """Write weights (float32, from `new.seed`), configs and tokenizer into `folder`. Torch's random state is left as it was.

    Raises ValueError for an unknown architecture or settings that its config or the tokenizer's size contradicts.
    """
    tokenizer = character_tokenizer(new.characters)
    if new.architecture not in CONFIG_MAPPING:
        near = difflib.get_close_matches(new.architecture, list(CONFIG_MAPPING.keys()), 3)
        raise ValueError(f"model.new.architecture={new.architecture!r} is no transformers model_type; nearest: {', '.join(near)}")
    config_class = CONFIG_MAPPING[new.architecture]
    known = config_class().to_dict().keys()
    if unknown := sorted(new.settings.keys() - known):
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"model.new.settings: {', '.join(unknown)} unknown to {config_class.__name__}{hint}")
    fields: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    try:
        config = config_class(**{**fields, **new.settings})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(new.seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"model.new.settings: {' '.join(str(error).split())}") from error
    if config.vocab_size < len(tokenizer):
        raise ValueError(
            f"model.new.settings.vocab_size={config.vocab_size}; allowed: {len(tokenizer)} or more (the tokenizer's)"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
