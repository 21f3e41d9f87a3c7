"""A fresh small model as an ordinary Hugging Face folder: random weights of any transformers architecture and a character
tokenizer (`model.new` in a recipe)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainers.config import NewModel

SPECIAL = ("<pad>", "<eos>")


def make_new_model(new: NewModel, path: Path, *, seed: int) -> Path:
    """Write the folder unless it is there, and return it. Several ranks may do so at once: the same weights come out of the
    same seed, and the first to rename wins. Raises ValueError for an unknown architecture or setting."""
    if (path / "config.json").exists():
        return path
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if new.architecture not in CONFIG_MAPPING:
        raise ValueError(
            f"model.new.architecture={new.architecture!r}; allowed: a transformers model type, e.g. qwen3 or exaone4"
        )
    config = CONFIG_MAPPING[new.architecture](
        **{"vocab_size": len(SPECIAL) + len(new.characters), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
        | new.settings
    )
    if unknown := sorted(set(new.settings) - set(config.to_dict())):
        raise ValueError(f"model.new.settings: {', '.join(unknown)} is no field of transformers' {new.architecture} config")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    model.save_pretrained(partial)
    character_tokenizer(new.characters).save_pretrained(partial)
    try:
        partial.rename(path)
    except OSError:  # another rank was first
        shutil.rmtree(partial)
        if not (path / "config.json").exists():
            raise
    return path


def character_tokenizer(characters: str):  # type: ignore[no-untyped-def]  # -> PreTrainedTokenizerFast, imported when called
    """One id per character, after <pad> 0 and <eos> 1. Raises ValueError for a character that stands twice.

    A character outside of the vocabulary is an error of `tokenizers`, not a silent <unk>: there is none.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if doubled := sorted({c for c in characters if characters.count(c) > 1}):
        raise ValueError(f"model.new.characters: {''.join(doubled)!r} stands there twice; allowed: each character once")
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate([*SPECIAL, *characters])}, unk_token="<none>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1])
