from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainers.config import NewModel
from trainers.new_model import write_new_model

SETTINGS = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "intermediate_size": 16, "max_position_embeddings": 32,
}  # fmt: skip


def new(**changes) -> NewModel:
    return NewModel(**{"architecture": "qwen3", "characters": "0123456789+=", "settings": SETTINGS, **changes})


def test_the_folder_is_an_ordinary_one(tmp_path):
    before = torch.get_rng_state()
    write_new_model(new(), tmp_path)
    assert torch.equal(before, torch.get_rng_state())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("1+2=")["input_ids"] == [3, 12, 4, 13]
    assert tokenizer.decode([3, 12, 4, 13, 1], skip_special_tokens=True) == "1+2="
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (0, 1, None)
    assert model.config.vocab_size == len(tokenizer) == 14
    assert not list(tmp_path.glob("*.bin"))


def test_weights_come_from_the_seed(tmp_path):
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_new_model(new(seed=seed), tmp_path / name)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architecture": "qwen33"}, "no transformers model_type; nearest: .*qwen3"),
        ({"characters": "aab"}, r"each once \(twice: \['a'\]\)"),
        ({"characters": ""}, "at least one character"),
        ({"settings": {"hidden_sizes": 3}}, r"hidden_sizes unknown to Qwen3Config; did you mean hidden_size\?"),
        ({"settings": {**SETTINGS, "hidden_size": "wide"}}, "model.new.settings: .*hidden_size"),
        ({"settings": {**SETTINGS, "vocab_size": 5}}, "vocab_size=5; allowed: 14 or more"),
    ],
)
def test_what_makes_no_model_is_one_line(tmp_path, changes, expected):
    with pytest.raises(ValueError, match=expected) as error:
        write_new_model(new(**changes), tmp_path)
    assert "\n" not in str(error.value)
