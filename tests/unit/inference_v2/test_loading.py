"""Folders in: what is read, what is refused with one line, and that nothing in them is executed."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from paged import ModuleSource, Runner
from safetensors.torch import load_file, save_file
from tiny import CHARACTERS, EOS, character_tokenizer, save_tiny, tiny_config, tiny_model
from transformers import ViTConfig

from inference_v2 import InferenceEngine, SamplingParams
from inference_v2.loading import INDEX, FolderSource, eos_union, load_config, load_model, tokenizer_vocab_limit
from inference_v2.weights import FusedWeights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", "qwen3")
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_tiny(tmp_path / "model", "llama", max_shard_size="60KB")
    assert (tmp_path / "model" / INDEX).is_file()
    return tmp_path / "model"


def edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(path: Path | str, **kwargs: object) -> str:
    with pytest.raises(ValueError) as caught:
        load_model(path, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_gives_everything_the_engine_needs(folder: Path) -> None:
    loaded = load_model(folder)
    assert loaded.spec.model_type == "qwen3"
    assert loaded.eos_token_ids == {EOS}
    assert loaded.vocab_limit == len(CHARACTERS) + 3
    assert loaded.tokenizer.decode(loaded.tokenizer("1 + 2")["input_ids"]) == "1 + 2"


@pytest.mark.parametrize("max_shard_size", ["60KB", "5GB"])
def test_tensors_and_rows_equal_the_module(tmp_path: Path, max_shard_size: str) -> None:
    model = save_tiny(tmp_path, "exaone4_5", max_shard_size=max_shard_size)
    source, memory = FolderSource(tmp_path), ModuleSource(model)
    assert set(source.names()) == set(memory.names())
    for name in memory.names():
        assert torch.equal(source.get(name), memory.get(name))
        assert torch.equal(source.get(name, slice(1, 3)), memory.get(name)[1:3])
    with pytest.raises(KeyError):
        source.get("model.nothing.weight")


def test_a_tied_head_need_not_be_in_the_file(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    loaded = load_model(tmp_path)
    assert "lm_head.weight" not in set(loaded.source.names())
    weights = FusedWeights(loaded.spec, torch.float32, "cpu")
    weights.refresh(loaded.source, 0)
    with weights.final() as final:
        assert torch.equal(final.head.weight, model.model.embed_tokens.weight)


def test_a_base_models_names_get_their_prefix(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)
    loaded = load_model(tmp_path)
    weights = FusedWeights(loaded.spec, torch.float32, "cpu")
    weights.refresh(loaded.source, 0)
    ids = torch.arange(3, 20)
    got = Runner(loaded.spec, weights).step([(0, ids)])[0]
    torch.testing.assert_close(got, model(ids[None]).logits[0].detach(), rtol=1e-4, atol=1e-4)


def test_no_tokenizer_is_none_and_all_rows(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama", tokenizer=None)
    loaded = load_model(tmp_path)
    assert (loaded.tokenizer, loaded.vocab_limit) == (None, None)


def test_another_folders_tokenizer(tmp_path: Path, folder: Path) -> None:
    save_tiny(tmp_path / "bare", "llama", tokenizer=None)
    assert load_model(tmp_path / "bare", tokenizer=folder).vocab_limit == len(CHARACTERS) + 3


def test_eos_ids_are_the_union_of_all_sources() -> None:
    tokenizer = character_tokenizer()
    config = tiny_config("llama", eos_token_id=[5, 6])
    assert eos_union(config, {"eos_token_id": 7}, tokenizer) == {5, 6, 7, EOS}
    assert eos_union(config, {"eos_token_id": [7, 8]}, None) == {5, 6, 7, 8}
    assert eos_union(tiny_config("llama", eos_token_id=None)) == frozenset()
    assert eos_union(tiny_config("exaone4_5", eos_token_id=0)) == {0}  # it is the text config that has one, and 0 is an id
    assert eos_union(tiny_model("llama").config, tiny_model("llama").generation_config) == {EOS}


def test_vocab_limit_is_at_most_the_rows() -> None:
    tokenizer = character_tokenizer()
    assert tokenizer_vocab_limit(tokenizer, 200) == len(CHARACTERS) + 3
    assert tokenizer_vocab_limit(tokenizer, 50) == 50


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/model.safetensors", "a/b.safetensors", "model.bin", "..\\x.safetensors"]
)
def test_index_pointing_outside_is_refused(sharded: Path, name: str) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    weight_map["model.norm.weight"] = name
    edit_json(sharded / INDEX, weight_map=weight_map)
    message = refusal(sharded)
    assert repr(name) in message
    assert "allowed: plain names" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_broken_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert INDEX in refusal(sharded)


def test_missing_shard_and_missing_tensor_are_refused(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    shard = sharded / weight_map["model.norm.weight"]
    tensors = load_file(shard)
    del tensors["model.norm.weight"]
    save_file(tensors, shard)
    assert "lacks 'model.norm.weight'" in refusal(sharded)
    shard.unlink()
    assert "is not in the folder" in refusal(sharded)


@pytest.mark.parametrize("keep", [0.5, 0.01, 0.0])
def test_truncated_shard_is_refused(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    assert "cut short" in refusal(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_never_opened(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message
    assert "convert to safetensors" in message


def test_a_folder_without_weights_or_config_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)
    assert "no such folder" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_remote_code_is_refused_and_not_run(folder: Path, file: str) -> None:
    (folder / "code.py").write_text("raise SystemExit('executed')")
    edit_json(folder / file, auto_map={"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]})
    message = refusal(folder)
    assert "auto_map" in message
    assert "trust_remote_code" in message


@pytest.mark.parametrize(
    "changes",
    [{"model_type": None}, {"model_type": "qwen99"}, {"hidden_size": "wide"}, {"num_attention_heads": 5}],
    ids=str,
)
def test_a_config_that_makes_no_sense_is_refused(folder: Path, changes: dict) -> None:
    edit_json(folder / "config.json", **changes)
    if "num_attention_heads" in changes:
        edit_json(folder / "config.json", num_key_value_heads=2)
    refusal(folder)


def test_config_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("model_type: llama")
    assert "not readable as JSON" in refusal(folder)


def test_weights_of_another_size_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", intermediate_size=64)
    loaded = load_model(folder)
    with pytest.raises(ValueError, match=r"gate_proj.weight has shape \[96, 64\]; allowed: \[64, 64\]"):
        FusedWeights(loaded.spec, torch.float32, "cpu").refresh(loaded.source, 0)


def test_hub_names_fail_offline_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "some-org/no-such-model: not a folder here" in refusal("some-org/no-such-model")
    assert "no such folder" in refusal("a/b/c")


@pytest.mark.parametrize(
    ("window", "pattern", "want"), [(None, 4, "GGGG"), (8, None, "GGGG"), (8, 2, "LGLG"), (8, "LLLG", "LLLG"), (8, "LG", "LGLG")]
)
@pytest.mark.parametrize("family", ["exaone4", "exaone4_5"])
def test_exaone4_pattern_forms_load(
    tmp_path: Path, family: str, window: int | None, pattern: int | str | None, want: str
) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.get("text_config", raw)
    text |= {"sliding_window": window, "sliding_window_pattern": pattern}
    del text["layer_types"]
    if family == "exaone4_5":
        text["model_type"] = "exaone4_5_text"  # as first released
    (tmp_path / "config.json").write_text(json.dumps(raw))
    types = load_config(tmp_path).get_text_config().layer_types
    assert "".join({"sliding_attention": "L", "full_attention": "G"}[kind] for kind in types) == want


@pytest.mark.parametrize(
    ("form", "kinds"),
    [
        ({"sliding_window_pattern": None}, "GGGG"),
        ({"sliding_window_pattern": "LLLG"}, "LLLG"),
        ({"sliding_window_pattern": None, "layer_types": "GLGG"}, "GLGG"),
        ({"sliding_window_pattern": "LLLG", "layer_types": "LGLG"}, "LGLG"),  # the list is what counts
    ],
)
def test_an_exaone4_folder_of_any_pattern_form_answers_like_the_module(tmp_path: Path, form: dict, kinds: str) -> None:
    """The module has its layers named one by one; the folder's window is 8, the prompt longer."""
    names = {"L": "sliding_attention", "G": "full_attention"}
    model = save_tiny(tmp_path, "exaone4", layer_types=[names[kind] for kind in kinds])
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["layer_types"]
    form = form | ({"layer_types": [names[kind] for kind in form["layer_types"]]} if "layer_types" in form else {})
    (tmp_path / "config.json").write_text(json.dumps(raw | form))
    engine, prompt = load_engine(tmp_path), list(range(3, 32))
    ((sample,),) = engine.generate([prompt], SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *sample.token_ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1, :79]
    assert logits.argmax(-1).tolist() == list(sample.token_ids)
    want = logits.log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(sample.logprobs_raw), want, rtol=0, atol=1e-4)


def test_a_folders_config_equals_transformers_own_reading(folder: Path) -> None:
    from transformers import AutoConfig

    ours, theirs = load_config(folder).to_dict(), AutoConfig.from_pretrained(folder).to_dict()
    assert ours | {"_name_or_path": ""} == theirs | {"_name_or_path": ""}


def load_engine(path: Path | str, **settings: object) -> InferenceEngine:
    return InferenceEngine.from_pretrained(path, **settings)


def answer(path: Path | str, **settings: object) -> tuple[int, ...]:
    ((completion,),) = load_engine(path, **settings).generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, temperature=0.0))
    return completion.token_ids


def test_a_folder_of_the_hubs_cache_is_links_to_blobs_and_loads(sharded: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sharded.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    (tmp_path / "link").symlink_to(snapshot)
    want = answer(sharded)
    for path in (snapshot, f"{sharded}/", tmp_path / "link", f"{tmp_path}/link/"):
        assert answer(path) == want


def test_old_checkpoints_hold_rotary_buffers_that_nobody_reads(folder: Path) -> None:
    want, weights = answer(folder), load_file(folder / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(weights, folder / "model.safetensors")
    assert answer(folder) == want


def test_a_whole_file_is_read_before_an_index_that_was_left_behind(sharded: Path, folder: Path) -> None:
    save_tiny(sharded, "llama", seed=1)
    (sharded / INDEX).write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}}')
    assert set(load_model(sharded).source.names()) >= {"model.norm.weight", "model.embed_tokens.weight"}


def test_weights_that_are_not_floating_point_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight holds torch.int8; allowed: floating-point"):
        load_engine(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "text_config=None"),
        ({"text_config": {}}, "text_config in a config of model_type='qwen3'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"quantization_config": 5}, "quantised"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000; allowed: 1 to"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": -2}, "num_key_value_heads=-2"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
        ({"max_position_embeddings": 10**12}, "rotary table of 1000000000000 positions"),
        ({"max_position_embeddings": -1}, "max_position_embeddings=-1"),
        ({"layer_types": ["sliding_attention"] * 4, "sliding_window": 0, "use_sliding_window": True}, "sliding_window=0"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "rope_theta > 0"),
        ({"rope_parameters": {"rope_type": [], "rope_theta": 1e4}}, "rope_theta > 0"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, "make no table"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}}, "factor='2'; allowed: finite"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": [2.0]}}, "make no table"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": None}}, "lack 'factor'"),
    ],
    ids=str,
)
def test_a_config_of_senseless_sizes_is_refused_in_one_line(folder: Path, changes: dict, message: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_engine(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"type": "Evil"}, "added_tokens": []}', '{"added_tokens": []}'])
def test_a_broken_tokenizer_is_refused(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert "the tokenizer cannot be read" in refusal(folder)


def test_another_tokenizer_that_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "no tokenizer there" in refusal(folder, tokenizer=tmp_path)


@pytest.mark.parametrize("ids", ["x", ["x"], [None, 5], 1.5, {"a": 1}], ids=str)
def test_eos_ids_that_are_no_ids_are_refused(folder: Path, ids: object) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=ids)
    assert "generation_config: eos_token_id=" in refusal(folder)


def test_eos_ids_of_all_sources_end_a_sample(folder: Path) -> None:
    """Config, generation_config and tokenizer each name another one."""
    edit_json(folder / "config.json", eos_token_id=[10, -1])
    edit_json(folder / "generation_config.json", eos_token_id=[11, 12])
    engine = load_engine(folder)
    for eos in (10, 11, 12, EOS):
        only = SamplingParams(max_new_tokens=5, allowed_token_ids=(eos,))
        ((completion,),) = engine.generate([[5]], only)
        assert (completion.token_ids, completion.finish_reason) == ((eos,), "stop")


def test_the_checkpoints_generation_config_never_changes_the_sampling(folder: Path) -> None:
    sampling = SamplingParams(max_new_tokens=12, ignore_eos=True)
    (plain,) = load_engine(folder).generate([[5, 6]], sampling)
    edit_json(
        folder / "generation_config.json", repetition_penalty=5.0, temperature=0.1, top_k=1, do_sample=False, min_new_tokens=9
    )
    (again,) = load_engine(folder).generate([[5, 6]], sampling)
    assert (again[0].token_ids, again[0].logprobs) == (plain[0].token_ids, plain[0].logprobs)


def test_names_of_no_folder_and_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vit").mkdir()
    ViTConfig().save_pretrained(tmp_path / "vit")
    save_file({"a": torch.ones(1)}, tmp_path / "vit" / "model.safetensors")
    assert "has no vocabulary" in refusal(tmp_path / "vit")
    assert "no such folder" in refusal("/" + "x" * 5000)
