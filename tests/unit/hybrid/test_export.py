"""HF folders out of sharded models: loaded by the auto classes, bit for bit, whole or not there, one tensor at a time."""

import gc
import json
import resource
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import FAMILIES, character_tokenizer, save_tiny, tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from hybrid.config import HybridConfig
from hybrid.export import save_pretrained
from hybrid.folders import FolderError
from hybrid.mesh import open_mesh
from hybrid.safetensors_stream import TensorInfo, write_safetensors


def auto_class(family: str) -> type:
    return AutoModelForImageTextToText if family == "exaone4_5" else AutoModelForCausalLM


def is_vision(name: str) -> bool:
    return name.startswith("model.visual.")


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def export(path: Path, model: PreTrainedModel, **options) -> None:
    save_pretrained(path, model.named_parameters(), model.config, **options)


# -- what it loads as


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_models_own_auto_class_loads_the_same_model(tmp_path: Path, family: str, tied: bool) -> None:
    model = save_tiny(tmp_path / "source", family, tie_word_embeddings=tied)
    export(tmp_path / "out", model, tokenizer=character_tokenizer(), source=tmp_path / "source")
    loaded, info = auto_class(family).from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]  # noqa: PT018
    assert type(loaded) is type(model)
    ids = torch.tensor([[5, 9, 11, 30, 7]])
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model(input_ids=ids).logits)
    assert ("lm_head.weight" in weights(tmp_path / "out")) is not tied
    assert weights(tmp_path / "out").keys() == weights(tmp_path / "source").keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((tmp_path / "source" / "config.json").read_text())
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (
        tmp_path / "source" / "generation_config.json"
    ).read_bytes()


def test_a_tensor_under_two_names_is_written_once(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    both = list(model.named_parameters(remove_duplicate=False))
    save_pretrained(tmp_path / "out", both, model.config)
    assert "lm_head.weight" in dict(both)
    assert weights(tmp_path / "out").keys() == dict(model.named_parameters()).keys()


def test_the_tokenizer_comes_with_its_chat_template(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    export(tmp_path / "out", tiny_model("qwen3"), tokenizer=tokenizer)
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "1+1="}]
    assert loaded.apply_chat_template(messages, tokenize=False) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert loaded("12+3=").input_ids == tokenizer("12+3=").input_ids


def test_side_files_of_the_source_come_along_and_others_do_not(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "source", "llama")
    for name in ("preprocessor_config.json", "pytorch_model.bin", "code.py", "training_args.json"):
        (tmp_path / "source" / name).write_text("{}")
    export(tmp_path / "out", model, source=tmp_path / "source")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "preprocessor_config.json",
        "chat_template.jinja",
        "model.safetensors",
    }


def test_a_config_without_architectures_gets_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.architectures = None
    export(tmp_path / "out", model, architecture="LlamaForCausalLM")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert model.config.architectures is None


@pytest.mark.parametrize("family", ["qwen2", "exaone4_5"])
def test_a_given_dtype_is_in_the_weights_and_in_the_config(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    export(tmp_path / "out", model, dtype=torch.bfloat16)
    assert {t.dtype for t in weights(tmp_path / "out").values()} == {torch.bfloat16}
    loaded = auto_class(family).from_pretrained(tmp_path / "out", dtype="auto")
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16()), name
    assert model.config.get_text_config().dtype != torch.bfloat16  # the caller's config is the caller's


@pytest.mark.parametrize(("stored", "exported"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_a_vision_tower_is_copied_bit_for_bit_in_its_own_dtype(
    tmp_path: Path, stored: torch.dtype, exported: torch.dtype
) -> None:
    save_tiny(tmp_path / "source", "exaone4_5", dtype=stored, max_shard_size="20KB")
    model = tiny_model("exaone4_5", seed=1)  # trained since
    text = [(name, parameter) for name, parameter in model.named_parameters() if not is_vision(name)]
    save_pretrained(
        tmp_path / "out", text, model.config, source=tmp_path / "source", dtype=exported, tokenizer=character_tokenizer(),
        copied=[(name, tensor) for name, tensor in weights(tmp_path / "source").items() if is_vision(name)],
    )  # fmt: skip
    before, after = weights(tmp_path / "source"), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert sum(map(is_vision, after)) > 4
    for name, tensor in after.items():
        expected = before[name] if is_vision(name) else model.get_parameter(name).to(exported)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name
    _, info = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]  # noqa: PT018
    AutoTokenizer.from_pretrained(tmp_path / "out")


def test_large_models_are_split_with_an_index(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    export(tmp_path / "out", model, max_file_bytes=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    assert all(sum(t.nbytes for t in load_file(tmp_path / "out" / f).values()) <= 40_000 for f in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(p, model.get_parameter(n)) for n, p in loaded.named_parameters())


# -- where it may be written


def test_an_earlier_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    export(tmp_path / "out", tiny_model("qwen3"), max_file_bytes=40_000, tokenizer=character_tokenizer())
    model = tiny_model("qwen3", seed=1)
    export(tmp_path / "out", model)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(weights(tmp_path / "out")["model.norm.weight"], model.model.norm.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("present", ["thesis.tex", "data/config.json", "model.safetensors"])
def test_a_folder_that_is_no_export_is_left_alone(tmp_path: Path, present: str) -> None:
    file = tmp_path / "out" / present
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(ValueError, match="is not a model folder"):
        export(tmp_path / "out", tiny_model("llama"))
    assert file.read_text() == "mine"


def test_the_folder_the_model_came_from_is_not_overwritten(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "source", "llama")
    (tmp_path / "link").symlink_to(tmp_path / "source")
    with pytest.raises(ValueError, match="is the folder that the model came from"):
        export(tmp_path / "source", model, source=tmp_path / "link")


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export(tmp_path / "out", tiny_model("llama"))
    assert (tmp_path / "out" / "model.safetensors").is_file()


# -- on ranks


UNEVEN = {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 54, "vocab_size": 91}


def export_sharded(path: str, stage: int) -> None:
    mesh = open_mesh(HybridConfig(zero_stage=stage, device="cpu"))
    model = tiny_model(
        "qwen2", tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1, hidden_size=45, vocab_size=91
    )
    fully_shard(model, mesh=mesh.device_mesh)
    save_pretrained(path, model.named_parameters(), model.config, max_file_bytes=40_000)


def export_with_a_full_disk(path: str) -> str:
    model = fully_shard(tiny_model("qwen2"), mesh=open_mesh(HybridConfig(device="cpu")).device_mesh)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(FolderError) as caught:
            save_pretrained(path, model.named_parameters(), model.config, max_file_bytes=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value)


def memory_of_export(path: str) -> dict[str, float]:
    """Peak above the shards, in MB."""
    net = nn.Sequential(*(nn.Linear(2048, 4096, bias=False) for _ in range(20)))
    fully_shard(net, mesh=open_mesh(HybridConfig(device="cpu")).device_mesh)
    model = tiny_model("llama")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    save_pretrained(path, net.named_parameters(), model.config, dtype=torch.bfloat16)
    sizes = [p.numel() * p.element_size() / 1e6 for p in net.parameters()]
    return {"peak": _status("VmHWM") - before, "largest": max(sizes), "whole": sum(sizes) / 2}  # bf16


def _status(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_shards_are_written_as_the_whole_model(
    request: pytest.FixtureRequest, tmp_path: Path, ranks: int, stage: int
) -> None:
    request.getfixturevalue(f"pool{ranks}").run(export_sharded, str(tmp_path / "out"), stage)
    model = tiny_model(
        "qwen2", tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=1, hidden_size=45, vocab_size=91
    )
    found = weights(tmp_path / "out")
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in found.items())


def test_a_full_disk_is_one_error_on_all_ranks_and_leaves_the_old_folder(pool2: Pool, tmp_path: Path) -> None:
    old = tiny_model("qwen2", seed=1)
    export(tmp_path / "out", old)
    first, second = pool2.run(export_with_a_full_disk, str(tmp_path / "out"))
    assert first == second
    assert "rank 0: " in first
    assert "File too large" in first
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert torch.equal(weights(tmp_path / "out")["lm_head.weight"], old.lm_head.weight)


def test_memory_stays_near_the_shards_while_exporting(pool2: Pool, tmp_path: Path) -> None:
    for peak in pool2.run(memory_of_export, str(tmp_path / "out")):
        assert peak["whole"] > 1.3 * (peak["largest"] + 200)  # else the whole model could hide
        assert peak["peak"] <= peak["largest"] + 200


# -- the file format


def test_the_library_reads_what_is_streamed(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.float64), "ä.weight": torch.randn(7, 2).t(), "scalar": torch.tensor(2.5),
        "half": torch.randn(3).bfloat16(), "none": torch.zeros(0, 4), "ids": torch.arange(3), "flag": torch.tensor([True, False]),
    }  # fmt: skip
    infos = [TensorInfo(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    write_safetensors(tmp_path / "x.safetensors", infos, iter(tensors.values()))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_one_tensor_is_alive_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref] = []

    def tensors():
        for _ in range(4):
            assert not any(ref() is not None for ref in alive)
            tensor = torch.zeros(3)
            alive.append(weakref.ref(tensor))
            yield tensor
            del tensor

    write_safetensors(tmp_path / "x.safetensors", [TensorInfo(str(i), torch.float32, (3,)) for i in range(4)], tensors())
    assert len(alive) == 4
