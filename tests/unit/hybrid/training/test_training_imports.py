"""Weights that come from elsewhere and go elsewhere: DeepSpeed's universal checkpoints, Hugging Face folders, one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training_cases import Net, config, loss_of, make_net, micro_batches, open_engine, share, train, weights_of, whole
from transformers import AutoModelForCausalLM

from hybrid.optim import state as optim_state
from hybrid.training import engine_state

CPU = {"device": "cpu"}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}


def settings(zero: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return config(zero_optimization=zero, optimizer=ADAMW, checkpoint={"load_universal": True}, **keys)


def message_of(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        function(*args, **options)
    return str(caught.value)


def state_of(engine: Any) -> dict[str, Tensor]:
    tensors = engine_state.named_tensors(engine)
    tensors |= optim_state.tensors(engine.optimizer, tensors)
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in tensors.items()}


# -- universal checkpoints


def universal(root: Path, net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Path:
    """What DeepSpeed's converter makes of a run."""
    for name, parameter in net.named_parameters():
        folder = root / "global_step3" / "zero" / name
        folder.mkdir(parents=True)
        torch.save({"param": parameter.detach().clone()}, folder / "fp32.pt")
        for key in ("exp_avg", "exp_avg_sq"):
            torch.save({"param": optimizer.state[parameter][key], "cat_dim": 0}, folder / f"{key}.pt")
        torch.save(steps, folder / "step.pt")
    (root / "latest_universal").write_text("global_step3")
    return root / "global_step3"


def plain_adamw(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for ((x, y),) in micro_batches(steps, 1):
        (net(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer


def loads_universal(path: str, zero: dict[str, Any]) -> dict[str, list[Any]]:
    engine = open_engine(settings(zero), make_net(8))
    assert engine.load_checkpoint(path) == (f"{path}/global_step3", {})
    held = {name: t.tolist() for name, t in state_of(engine).items()}
    train(engine, micro_batches(5, 1)[3:])
    return {"held": held, "after": {name: t.tolist() for name, t in weights_of(engine).items()}}


@pytest.mark.parametrize(
    "zero", [{"stage": 0}, {"stage": 3}, {"stage": 2, "offload_optimizer": CPU}, {"stage": 3, "offload_param": CPU}], ids=str
)
def test_a_universal_checkpoint_goes_on_as_it_would_have(pool2, tmp_path, zero):
    net, optimizer = plain_adamw(3)
    universal(tmp_path, net, optimizer, 3)
    expected = {n: p.tolist() for n, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        expected |= {f"{key}.{name}": optimizer.state[parameter][key].tolist() for key in ("exp_avg", "exp_avg_sq", "step")}
    later = dict(plain_adamw(5)[0].named_parameters())
    for result in pool2.run(loads_universal, str(tmp_path), zero):
        assert result["held"] == expected
        assert max(float((torch.tensor(v) - later[n].detach()).abs().max()) for n, v in result["after"].items()) < 1e-6


class Bomb:
    def __init__(self, folder: Path) -> None:
        self.target = str(folder.parents[2] / "exploded")

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.target,))


def loads_broken(path: str) -> tuple[str, bool]:
    engine = open_engine(settings({"stage": 3}), make_net(8))
    before = state_of(engine)
    message = message_of(engine.load_checkpoint, path)
    after = state_of(engine)
    return message, before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: torch.save({"param": Bomb(f)}, f / "fp32.pt"), "fp32.pt is not only tensors and plain values, or broken"),
        (lambda f: (f / "exp_avg.pt").write_bytes(b"\x80\x02K\x01."), "exp_avg.pt is not only tensors and plain values"),
        (lambda f: torch.save({"param": torch.zeros(3)}, f / "exp_avg.pt"), "exp_avg.pt is [3], the parameter here [4, 16]"),
        (lambda f: torch.save(torch.zeros(4, 16), f / "fp32.pt"), "fp32.pt holds no tensor under 'param'"),
        (lambda f: torch.save("three", f / "step.pt"), "step.pt holds a str; allowed: a number"),
        (lambda f: (f / "exp_avg.pt").unlink(), "holds ['exp_avg_sq'], AdamW has ['exp_avg', 'exp_avg_sq']"),
        (lambda f: f.rename(f.with_name("other")), "missing in it: ['head.weight']; only in it: ['other']"),
        (lambda f: f.parent.rename(f.parent.with_name("one")), "has no folder zero/, so it is no universal checkpoint"),
    ],
)
def test_a_universal_checkpoint_that_does_not_fit_changes_nothing(pool2, tmp_path, break_it, says):
    break_it(universal(tmp_path, *plain_adamw(1), 1) / "zero" / "head.weight")
    first, second = pool2.run(loads_broken, str(tmp_path))
    assert first == second
    assert says in first[0]
    assert first[1]
    assert not list(tmp_path.rglob("exploded"))


def test_without_the_key_no_pickle_is_read(tmp_path):
    universal(tmp_path, *plain_adamw(1), 1)
    engine = open_engine(config(ranks=1))
    assert "is a pickle, which can run code when read" in message_of(engine.load_checkpoint, tmp_path, "global_step3")


# -- one file, and Hugging Face folders


def saves_weights(path: str, stage: int, gather: bool, keys: dict[str, Any]) -> tuple[bool, dict[str, list[Any]]]:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gather}
    engine = open_engine(config(zero_optimization=zero, **keys))
    train(engine, micro_batches(1, 1))
    done = engine.save_16bit_model(path)
    state = engine.module_state_dict()
    assert state.keys() == make_net().state_dict().keys()
    make_net().load_state_dict(state)
    return done, {name: [str(t.dtype), str(t.device), t.tolist()] for name, t in state.items()}


@pytest.mark.parametrize(("stage", "gather"), [(0, False), (1, False), (3, True)])
@pytest.mark.parametrize("keys", [{}, {"bf16": {"enabled": True}}], ids=str)
def test_one_file_holds_the_weights_in_the_dtype_that_computes(pool2, tmp_path, stage, gather, keys):
    for done, state in pool2.run(saves_weights, str(tmp_path), stage, gather, keys):
        assert done
        found = load_file(tmp_path / "model.safetensors")
        assert {t.dtype for t in found.values()} == {torch.bfloat16 if keys else torch.float32}
        masters = {name: torch.tensor(value) for name, (_, _, value) in state.items()}
        assert {(dtype, device) for dtype, device, _ in state.values()} == {("torch.float32", "cpu")}
        assert found.keys() == masters.keys()
        assert all(torch.equal(found[n], masters[n].to(found[n].dtype)) for n in found)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


class Several(nn.Module):
    """Parts that compute in several dtypes, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 4), nn.LayerNorm(4)
        self.stats, self.down = nn.BatchNorm1d(4), nn.Linear(4, 4, dtype=torch.bfloat16)


def saves_several(path: str) -> list[dict[str, str]]:
    found = []
    norms = [{"match": "class:LayerNorm", "dtype": "fp32"}]
    for stage, keys in ((3, {"bf16": {"enabled": True}, "module_precision": norms}), (1, {}), (0, {})):
        zero = {"stage": stage, "stage3_gather_fp16_weights_on_model_save": True}  # as the key was called before
        engine = open_engine(config(zero_optimization=zero, **keys), Several())
        assert engine.save_16bit_model(path)
        found.append({name: str(t.dtype).removeprefix("torch.") for name, t in load_file(f"{path}/model.safetensors").items()})
    return found


def test_each_weight_is_saved_in_the_dtype_in_which_it_computes_and_buffers_as_they_are(pool2, tmp_path):
    fp32 = {"norm.weight", "norm.bias", "stats.weight", "stats.bias", "stats.running_mean", "stats.running_var"}
    names = Several().state_dict().keys() - {"stats.num_batches_tracked"}
    ruled = {name: "float32" if name in fp32 else "bfloat16" for name in names}
    kept = {name: "bfloat16" if name.startswith("down") else "float32" for name in names}
    counts = {"stats.num_batches_tracked": "int64"}
    assert pool2.run(saves_several, str(tmp_path))[0] == [ruled | counts, kept | counts, kept | counts]


def test_stage_3_writes_no_file_unless_asked_to_gather(pool2, tmp_path):
    assert [done for done, _ in pool2.run(saves_weights, str(tmp_path), 3, False, {})] == [False, False]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model"])
def test_only_safetensors_are_written_whatever_the_name(tmp_path, name, caplog):
    engine = open_engine(config(ranks=1, stage=1))
    assert engine.save_16bit_model(tmp_path, name)
    (written,) = tmp_path.iterdir()
    assert written.name == f"{name.partition('.')[0]}.safetensors"
    assert load_file(written).keys() == dict(engine.module.named_parameters()).keys()
    assert f"writes {written.name} in place of {name}" in caplog.text


def test_a_file_name_is_no_path(tmp_path):
    message = message_of(open_engine(config(ranks=1, stage=1)).save_16bit_model, tmp_path, "a/model.safetensors")
    assert "save_filename='a/model.safetensors'; allowed: a file's name" in message


def whole_states() -> dict:
    engine = open_engine(config(zero_optimization={"offload_optimizer": {"device": "cpu"}}))
    other = make_net(seed=5).state_dict()
    refused = [message_of(engine.module.state_dict), message_of(engine.module.load_state_dict, other)]
    wrong = [message_of(engine.load_module_state_dict, {**other, "more": torch.zeros(1)}),
             message_of(engine.load_module_state_dict, {**other, "head.bias": torch.zeros(7)})]  # fmt: skip
    engine.load_module_state_dict(other)
    state = engine.module_state_dict()
    x, y = micro_batches(1, 1)[0][0]
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    engine.step()
    return {
        "refused": refused,
        "wrong": wrong,
        "equal": all(torch.equal(state[n], w) for n, w in other.items()),
        "moved": max((whole(p) - other[n]).abs().max().item() for n, p in engine.module.named_parameters()),
    }


def test_a_sharded_modules_own_state_dict_names_the_verbs_that_gather(pool2):
    for result in pool2.run(whole_states):
        assert "use engine.module_state_dict()" in result["refused"][0]
        assert "use engine.load_module_state_dict(state)" in result["refused"][1]
        assert "surplus ['more']" in result["wrong"][0]
        assert "head.bias is [7], not [4]" in result["wrong"][1]
        assert result["equal"]
        assert 0 < result["moved"] < 0.2  # the copy that steps in host memory was loaded too


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Linear(16, 4)
        self.twin.weight = self.head.weight


def test_a_state_dict_has_every_name_of_a_tied_weight():
    module = make_net(0, Tied)
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    state = open_engine(config(ranks=1), module).module_state_dict()
    assert state.keys() == expected.keys() > {"head.weight", "twin.weight"}
    assert all(torch.equal(state[n], expected[n]) for n in expected)


def reads_a_folder(path: str, stage: int, tag: str | None) -> tuple[Any, bool, int]:
    engine = open_engine(config(stage=stage), make_net(6, Tied))
    train(engine, micro_batches(1, 1))
    found = engine.load_checkpoint(path, tag)
    expected = dict(make_net(0, Tied).named_parameters())
    return found, all(torch.equal(w, expected[n]) for n, w in weights_of(engine).items()), engine.global_steps


@pytest.mark.parametrize(("stage", "tag"), [(0, None), (3, None), (3, "model")])
def test_a_hugging_face_folder_gives_weights_alone(pool2, tmp_path, stage, tag):
    folder = tmp_path / "model"
    folder.mkdir()
    weights = {n: t.detach().clone() for n, t in make_net(0, Tied).state_dict().items() if n != "head.weight"}  # under twin
    names = list(weights)
    save_file({n: weights[n] for n in names[:5]}, folder / "model-00001-of-00002.safetensors")
    save_file({n: weights[n] for n in names[5:]}, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text("{}")
    path = str(folder if tag is None else tmp_path)
    for result in pool2.run(reads_a_folder, path, stage, tag):
        assert result == ((str(folder), {}), True, 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop("door.bias"), "missing in it: ['door.bias']; only in it: []"),
        (lambda w: w.update(more=torch.zeros(1)), "missing in it: []; only in it: ['more']"),
        (lambda w: w.update({"door.bias": torch.zeros(3)}), "door.bias is [3] in it, [16] here"),
    ],
)
def test_a_folder_of_another_model_is_refused(tmp_path, change, says):
    weights = {n: t.detach().clone() for n, t in make_net(0).state_dict().items()}
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    engine = open_engine(config(ranks=1), make_net(6))
    before = weights_of(engine)
    assert says in message_of(engine.load_checkpoint, tmp_path)
    assert all(torch.equal(before[n], w) for n, w in weights_of(engine).items())
    if "more" in weights:
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert torch.equal(weights_of(engine)["door.weight"], weights["door.weight"])


def test_a_model_of_transformers_goes_out_and_comes_back(tmp_path):
    from tiny import save_tiny

    save_tiny(tmp_path / "in", "qwen2", vocab_size=97, tie_word_embeddings=True)
    engine = open_engine(config(ranks=1, stage=1), AutoModelForCausalLM.from_pretrained(tmp_path / "in"))
    expected = weights_of(engine)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.load_checkpoint(tmp_path / "in")
    assert all(torch.equal(w, expected[n]) for n, w in weights_of(engine).items())
    engine.save_16bit_model(tmp_path / "in")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    assert all(torch.equal(p, expected[n]) for n, p in back.named_parameters())
