"""Checkpoints: bit-equal at the same rank count, resharded at another, whole or not there, and never a pickle."""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Pool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hybrid import checkpoint, folders
from hybrid.checkpoint import last_checkpoint, load_checkpoint, prune, save_checkpoint
from hybrid.config import HybridConfig
from hybrid.folders import DELETED, PARTIAL, REPLACED, FolderError
from hybrid.mesh import open_mesh
from hybrid.optim import state as optim_state


class Net(nn.Module):
    """Sizes that divide by nothing: on 4 ranks some shards are empty. A buffer without dimension, and dropout."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.first = nn.Linear(5, width)
        self.last = nn.Linear(width, 1)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.first(x) * self.scale, 0.5)).square().mean()


def build(seed: int, *, stage: int = 3, width: int = 7) -> tuple[Net, torch.optim.Optimizer]:
    mesh = open_mesh(HybridConfig(zero_stage=stage, device="cpu"))
    torch.manual_seed(seed)
    net = fully_shard(Net(width), mesh=mesh.device_mesh)
    torch.manual_seed(100 * seed + mesh.rank)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def named(net: nn.Module) -> dict[str, Tensor]:
    return dict(net.named_parameters()) | dict(net.named_buffers())


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Losses of steps on random data: any generator that was not restored shows in them."""
    losses = []
    for _ in range(steps):
        x = torch.randn(3, 5) + random.random() + random.gauss(0, 1) + np.random.normal()
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(tensors: dict[str, Tensor]) -> dict[str, list]:
    """Full values, as lists: they cross process borders."""
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {n: [str(t.dtype), t.detach().tolist()] for n, t in full.items()}


def everything(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, list]:
    return whole(named(net)) | whole(optim_state.tensors(optimizer, named(net)))


# -- on ranks


def save_on_rank(path: str, stage: int = 3, steps: int = 2) -> dict[str, list]:
    net, optimizer = build(0, stage=stage)
    train(net, optimizer, steps)
    average = {name: tensor.detach() * 2 for name, tensor in named(net).items()}
    save_checkpoint(path, model=named(net), optimizer=optimizer, ema=average, state={"position": [3, 4]}, weight_version=5)
    return everything(net, optimizer) | {f"ema {n}": v for n, v in whole(average).items()}


def load_on_rank(path: str, stage: int = 3) -> tuple[dict[str, list], checkpoint.LoadedCheckpoint]:
    net, optimizer = build(1, stage=stage)
    average = {name: torch.zeros_like(tensor) for name, tensor in named(net).items()}
    loaded = load_checkpoint(path, model=named(net), optimizer=optimizer, ema=average, seed=3)
    values = everything(net, optimizer) | {f"ema {n}": v for n, v in whole(average).items()}
    train(net, optimizer, 1)  # it goes on
    return values, loaded


def uninterrupted(path: str) -> tuple[list[float], dict[str, list]]:
    net, optimizer = build(0)
    train(net, optimizer, 2)
    save_checkpoint(path, model=named(net), optimizer=optimizer)
    return train(net, optimizer, 2), everything(net, optimizer)


def resumed(path: str) -> tuple[list[float], dict[str, list]]:
    net, optimizer = build(1)
    load_checkpoint(path, model=named(net), optimizer=optimizer)
    return train(net, optimizer, 2), everything(net, optimizer)


def draws_after_load(path: str, seed: int) -> list[float]:
    net, _ = build(1)
    load_checkpoint(path, model=named(net), seed=seed)
    return [torch.rand(()).item(), random.random(), np.random.random()]


def save_with_a_full_disk(path: str, full_rank: int) -> str:
    """What the error says when rank `full_rank` may not write another byte."""
    net, optimizer = build(0)
    train(net, optimizer, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(FolderError) as caught:
            save_checkpoint(path, model=named(net), optimizer=optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return str(caught.value)


def save_with_an_error(path: str, where: str) -> str:
    """What the error says when rank 1 cannot write its generators, or rank 0 cannot finish the folder."""
    net, _ = build(0)

    def broken(*_: object) -> None:
        raise RuntimeError("broken\nhere")

    with pytest.MonkeyPatch.context() as patch:
        if where == "rng" and dist.get_rank() == 1:
            patch.setattr(checkpoint.rng, "save", broken)
        if where == "finish" and dist.get_rank() == 0:
            patch.setattr(folders, "sync_tree", broken)
        with pytest.raises(FolderError) as caught:
            save_checkpoint(path, model=named(net))
    return str(caught.value)


def memory_of_save_and_load(path: str) -> dict[str, float]:
    """Peaks above the shards, in MB."""
    mesh = open_mesh(HybridConfig(device="cpu"))
    net = fully_shard(nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16))), mesh=mesh.device_mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    peaks = {}
    for name in ("save", "load"):
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        if name == "save":
            save_checkpoint(path, model=named(net), optimizer=optimizer)
        else:
            load_checkpoint(path, model=named(net), optimizer=optimizer)
        peaks[name] = _status("VmHWM") - before
    peaks["largest"] = max(p.numel() * p.element_size() for p in net.parameters()) / 1e6
    peaks["shards"] = 3 * sum(p.to_local().nbytes for p in net.parameters()) / 1e6
    return peaks


def _status(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / 1e6


# -- round trips


@pytest.mark.parametrize("stage", [0, 3])
def test_the_same_ranks_get_every_bit_back(pool2: Pool, tmp_path: Path, stage: int) -> None:
    saved = pool2.run(save_on_rank, str(tmp_path / "step_2"), stage)
    found = pool2.run(load_on_rank, str(tmp_path / "step_2"), stage)
    for rank in (0, 1):
        values, loaded = found[rank]
        assert values == saved[rank]
        assert loaded == checkpoint.LoadedCheckpoint({"position": [3, 4]}, weight_version=5, world_size=2, rng_restored=True)
    assert "exp_avg.first.weight" in saved[0]
    assert saved[0]["step.last.bias"] == ["torch.float32", 2.0]


@pytest.mark.parametrize(
    ("saving", "loading"), [((2, 3), (1, 3)), ((1, 3), (2, 3)), ((2, 3), (4, 3)), ((4, 3), (2, 0)), ((4, 0), (1, 3))]
)
def test_other_ranks_and_stages_get_the_same_values(
    request: pytest.FixtureRequest, tmp_path: Path, saving: tuple[int, int], loading: tuple[int, int]
) -> None:
    def on(ranks: int, function, *args):
        return [function(*args)] if ranks == 1 else request.getfixturevalue(f"pool{ranks}").run(function, *args)

    path = str(tmp_path / "step_2")
    saved = on(saving[0], save_on_rank, path, saving[1])
    for values, loaded in on(loading[0], load_on_rank, path, loading[1]):
        assert values == saved[0]
        assert loaded.world_size == saving[0]
        assert not loaded.rng_restored


def test_a_resumed_run_is_bit_equal_with_dropout_and_random_data(pool2: Pool, tmp_path: Path) -> None:
    first = pool2.run(uninterrupted, str(tmp_path / "step_2"))
    second = pool2.run(resumed, str(tmp_path / "step_2"))
    assert first == second
    assert first[0][0] != first[1][0]  # ranks draw differently


def test_another_rank_count_seeds_generators_anew_and_says_so(
    pool2: Pool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "step_2")
    save_on_rank(path)
    a, b = pool2.run(draws_after_load, path, 3), pool2.run(draws_after_load, path, 4)
    assert a == pool2.run(draws_after_load, path, 3)
    values = [x for ranks in (a, b) for draws in ranks for x in draws]
    assert len(set(values)) == len(values)  # by seed, by rank, by generator
    pool2.run(save_on_rank, path)
    caplog.set_level("WARNING", "hybrid.checkpoint")  # a run in this process may have set its loggers' levels
    load_on_rank(path)
    assert [r.getMessage() for r in caplog.records if r.name == "hybrid.checkpoint"] == [
        f"{path} was saved by 2 ranks and is read by 1: random generators start anew from seed 3"
    ]


def test_parameters_that_were_never_stepped_have_no_state(tmp_path: Path) -> None:
    path = str(tmp_path / "step_0")
    saved = save_on_rank(path, steps=0)
    values, _ = load_on_rank(path)
    assert values == saved
    assert not any(name.startswith("exp_avg") for name in saved)


def test_sgd_momentum_is_restored_into_the_optimizers_own_tensors(tmp_path: Path) -> None:
    net, _ = build(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer, 1)
    save_checkpoint(tmp_path / "c", model=named(net), optimizer=optimizer)
    saved = everything(net, optimizer)
    held = optimizer.state[net.last.bias]["momentum_buffer"]
    train(net, optimizer, 1)
    load_checkpoint(tmp_path / "c", model=named(net), optimizer=optimizer)
    assert everything(net, optimizer) == saved
    assert optimizer.state[net.last.bias]["momentum_buffer"] is held  # no second copy


def test_a_group_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    saved = save_on_rank(str(tmp_path / "c"))
    net, _ = build(1)
    load_checkpoint(tmp_path / "c", model=named(net))
    assert all(saved[name] == value for name, value in whole(named(net)).items())


# -- what is on the disk


def test_nothing_in_a_checkpoint_is_a_pickle(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(save_on_rank, str(tmp_path / "c"))
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
    names = {str(p.relative_to(tmp_path / "c")) for p in files}
    assert {"state.json", "rng/rank_00000.safetensors", "rng/rank_00001.safetensors"} < names
    assert sum(name.startswith("shards/") for name in names) == len(names) - 3
    for file in files:
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            load_file(file)  # raises unless it is safetensors, which holds nothing but tensors
        assert not zipfile.is_zipfile(file)


def test_no_file_of_shards_grows_beyond_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_FILE_BYTES", 4_000)
    net, optimizer = build(0, width=150)  # 3,000 bytes of weight
    train(net, optimizer, 1)
    save_checkpoint(tmp_path / "c", model=named(net), optimizer=optimizer)
    tensors = [sum(t.nbytes for t in load_file(p).values()) for p in (tmp_path / "c" / "shards").iterdir()]
    assert len(tensors) > 3
    assert max(tensors) <= 4_000
    before = everything(net, optimizer)
    train(net, optimizer, 1)
    load_checkpoint(tmp_path / "c", model=named(net), optimizer=optimizer)
    assert everything(net, optimizer) == before


def test_memory_stays_near_the_shards_while_saving_and_loading(pool2: Pool, tmp_path: Path) -> None:
    for peaks in pool2.run(memory_of_save_and_load, str(tmp_path / "c"), timeout_s=300):
        assert peaks["shards"] > 1.5 * (peaks["largest"] + 200)  # else a second copy could hide
        assert peaks["save"] <= peaks["largest"] + 200
        assert peaks["load"] <= peaks["largest"] + 200


def test_a_state_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    net, _ = build(0)
    for state in ({"a": float("nan")}, {"a": torch.zeros(2)}):
        with pytest.raises(ValueError, match="must be JSON"):
            save_checkpoint(tmp_path / "c", model=named(net), state=state)
    assert not list(tmp_path.iterdir())


# -- what does not fit


def test_names_that_do_not_fit_are_listed_both_ways_and_nothing_changes(tmp_path: Path) -> None:
    save_on_rank(str(tmp_path / "c"))
    net, _ = build(1)
    tensors = named(net)
    before = whole(tensors)
    wanted = {("renamed" if name == "last.bias" else name): tensor for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=r"missing in it: \['model.renamed'\]; only in it: \['model.last.bias'\]"):
        load_checkpoint(tmp_path / "c", model=wanted)
    assert whole(tensors) == before


def test_shapes_and_dtypes_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    save_on_rank(str(tmp_path / "c"))
    net, _ = build(1, width=8)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(tmp_path / "c", model=named(net))
    assert "model.first.weight: [7, 5] float32 in it, [8, 5] float32 here" in str(caught.value)
    assert "model.last.weight: [1, 7] float32 in it, [1, 8] float32 here" in str(caught.value)
    assert "\n" not in str(caught.value)
    net, _ = build(1)
    with pytest.raises(ValueError, match=r"model.scale: \[\] float32 in it, \[\] bfloat16 here"):
        load_checkpoint(tmp_path / "c", model=named(net.bfloat16()))


def test_another_set_of_trained_parameters_is_refused(tmp_path: Path) -> None:
    save_on_rank(str(tmp_path / "c"))
    net, _ = build(1)
    optimizer = torch.optim.AdamW(net.last.parameters())
    with pytest.raises(ValueError, match=r"trained only here: \[\]; trained only there: \['first.bias', 'first.weight'\]"):
        load_checkpoint(tmp_path / "c", model=named(net), optimizer=optimizer)


def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    save_on_rank(str(tmp_path / "c"))
    net, _ = build(1)
    before = whole(named(net))
    with pytest.raises(ValueError, match="SGD here, AdamW there"):
        load_checkpoint(tmp_path / "c", model=named(net), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    assert whole(named(net)) == before


def test_every_rank_raises_the_same_when_one_cannot_read(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(save_on_rank, str(tmp_path / "c"))
    (tmp_path / "c" / "rng" / "rank_00001.safetensors").unlink()
    messages = pool2.run(_message_of_load, str(tmp_path / "c"))
    assert messages[0] == messages[1] == f"{tmp_path / 'c'}: rng/rank_00001.safetensors is missing; use an older checkpoint"


def _message_of_load(path: str) -> str:
    net, _ = build(1)
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, model=named(net))
    return str(caught.value)


# -- hostile and broken folders


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "shards/__0_0.distcp", ".metadata", "notes.txt", "rng/state.json", "x.pt"])
def test_a_pickle_is_refused_by_name_and_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    save_on_rank("c")
    if name == "x.pt":
        torch.save(Bomb(), tmp_path / "c" / "x.pt")
    else:
        (tmp_path / "c" / name).write_bytes(pickle.dumps(Bomb()))
    assert f"c/{name} is a pickle" in _message_of_load("c")
    assert not Path("exploded").exists()


def test_a_truncated_shard_is_one_clear_line(tmp_path: Path) -> None:
    save_on_rank(str(tmp_path / "c"))
    (shard,) = (tmp_path / "c" / "shards").iterdir()
    whole_file = shard.read_bytes()
    shard.write_bytes(whole_file[:-10])
    name = f"shards/{shard.name}"
    assert f"{name} is truncated: {len(whole_file) - 10} of {len(whole_file)} bytes" in _message_of_load(str(tmp_path / "c"))
    shard.write_bytes(b"\xff" * len(whole_file))
    message = _message_of_load(str(tmp_path / "c"))
    assert f"{name} is damaged: its checksum differs" in message
    assert "\n" not in message


def test_a_flipped_byte_in_any_file_is_named_before_anything_changes(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(save_on_rank, str(tmp_path / "c"))
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
    assert len(files) == 5
    for file in files:
        held = file.read_bytes()
        is_header = file.name == "state.json"  # a byte of whose form is noticed before its checksum
        what = file.name if is_header else f"{file.relative_to(tmp_path / 'c')} is damaged: its checksum differs"
        for place in (len(held) - 1, len(held) // 2, 9):
            file.write_bytes(held[:place] + bytes([held[place] ^ 1]) + held[place + 1 :])
            first, second = pool2.run(_message_and_change_of_load, str(tmp_path / "c"))
            assert first == second
            assert what in first[0], (place, first)
            assert not first[1]
        file.write_bytes(held)
    pool2.run(load_on_rank, str(tmp_path / "c"))
    header = json.loads((tmp_path / "c" / "state.json").read_text())
    (tmp_path / "c" / "state.json").write_text(json.dumps(header | {"weight_version": 6}))
    assert "state.json is damaged: its checksum differs" in _message_and_change_of_load(str(tmp_path / "c"))[0]


def _message_and_change_of_load(path: str) -> tuple[str, bool]:
    net, optimizer = build(1)
    before, drawn = everything(net, optimizer), torch.get_rng_state()
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, model=named(net), optimizer=optimizer)
    changed = everything(net, optimizer) != before or not torch.equal(torch.get_rng_state(), drawn)
    return str(caught.value).removeprefix("rank 0: ").removeprefix("rank 1: "), changed


def test_a_checkpoint_of_format_1_without_checksums_still_loads(pool2: Pool, tmp_path: Path) -> None:
    saved = pool2.run(save_on_rank, str(tmp_path / "c"))
    text = tmp_path / "c" / "state.json"
    header = json.loads(text.read_text())
    assert header.pop("checksums").keys() == header["files"].keys()
    header.pop("checksum")
    text.write_text(json.dumps(header | {"format": 1}))
    assert [values for values, _ in pool2.run(load_on_rank, str(tmp_path / "c"))] == saved


def test_a_shard_of_another_run_is_not_mixed_in(tmp_path: Path) -> None:
    save_on_rank(str(tmp_path / "c"))
    (shard,) = (tmp_path / "c" / "shards").iterdir()
    shutil.copy(shard, shard.with_name("other.safetensors"))
    assert "files that it was not saved with: ['shards/other.safetensors']" in _message_of_load(str(tmp_path / "c"))


@pytest.mark.parametrize("text", [None, "{", "[]", '{"format": 99}', '{"format": 1}', "files"])
def test_a_folder_without_a_proper_state_is_refused(tmp_path: Path, text: str | None) -> None:
    save_on_rank(str(tmp_path / "c"))
    header = json.loads((tmp_path / "c" / "state.json").read_text())
    (tmp_path / "c" / "state.json").unlink()
    if text == "files":
        text = json.dumps(header | {"files": ["state.json"]})
    if text is not None:
        (tmp_path / "c" / "state.json").write_text(text)
    assert "state.json" in _message_of_load(str(tmp_path / "c"))


# -- whole or not at all


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_on_one_rank_is_one_error_on_all_and_leaves_the_old_one(pool2: Pool, tmp_path: Path, full_rank: int) -> None:
    old = str(tmp_path / "checkpoints" / "step_1")
    saved = pool2.run(save_on_rank, old)
    first, second = pool2.run(save_with_a_full_disk, str(tmp_path / "checkpoints" / "step_2"), full_rank)
    assert first == second
    assert f"step_2: rank {full_rank}: " in first
    assert "File too large" in first
    assert "\n" not in first
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_1"]
    assert last_checkpoint(tmp_path) == Path(old)
    assert pool2.run(load_on_rank, old)[0][0] == saved[0]


@pytest.mark.parametrize(("where", "rank"), [("rng", 1), ("finish", 0)])
def test_an_error_of_one_rank_outside_of_any_collective_ends_all(pool2: Pool, tmp_path: Path, where: str, rank: int) -> None:
    messages = pool2.run(save_with_an_error, str(tmp_path / "c"), where)
    assert set(messages) == {f"could not write {tmp_path / 'c'}: rank {rank}: RuntimeError: broken here"}
    assert not list(tmp_path.iterdir())


def test_a_failed_rewrite_leaves_what_stood_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "c")
    saved = save_on_rank(path)

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "sync_tree", full)
    with pytest.raises(FolderError, match="No space left on device"):
        save_on_rank(path, steps=1)
    assert load_on_rank(path)[0] == saved


def test_saving_to_the_same_name_replaces_it(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    save_on_rank(path, steps=1)
    saved = save_on_rank(path, steps=2)
    assert load_on_rank(path)[0] == saved
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


KILLED = """
import sys, torch, hybrid.folders
from torch import nn
from hybrid.checkpoint import save_checkpoint
torch.manual_seed(0)
net = nn.Linear(1000, 1000)
step = 1
while True:
    save_checkpoint(f"{sys.argv[1]}/checkpoints/step_{step}", model=dict(net.named_parameters()), state={"step": step})
    print(step, flush=True)
    step += 1
    with torch.no_grad():
        net.weight += 1
"""


def test_kill_9_during_a_write_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        end = time.monotonic() + 60
        while not list((tmp_path / "checkpoints").glob(f".step_*{PARTIAL}/shards/*")) and time.monotonic() < end:
            pass  # until a shard is being written
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    left = last_checkpoint(tmp_path)
    assert left is not None
    net = nn.Linear(1000, 1000)
    loaded = load_checkpoint(left, model=dict(net.named_parameters()))
    step = loaded.state["step"]
    assert left.name == f"step_{step}"
    torch.manual_seed(0)
    expected = nn.Linear(1000, 1000).weight.detach()
    for _ in range(step - 1):
        expected += 1
    assert torch.equal(net.weight, expected)
    save_checkpoint(tmp_path / "checkpoints" / f"step_{step + 1}", model=dict(net.named_parameters()))
    prune(tmp_path, keep=1)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [f"step_{step + 1}"]  # what the kill left is gone


def test_writing_a_folder_leaves_what_others_write_beside_it(tmp_path: Path) -> None:
    def write_beside(folder: Path) -> None:
        (folder / "a").write_text("a")
        folders.write_folder(tmp_path / "mine[1]", lambda other: (other / "b").touch())

    for left in (f".theirs{PARTIAL}", f".mine[1]{PARTIAL}", f".mine[1]{DELETED}"):
        (tmp_path / left).mkdir()
    folders.write_folder(tmp_path / "theirs", write_beside)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine[1]", "theirs"]
    assert (tmp_path / "theirs" / "a").is_file()


def test_an_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = save_on_rank(str(tmp_path / "c"))
    plain = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if PARTIAL in self.name:
            raise OSError(28, "No space left on device")
        return plain(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(FolderError, match="No space left"):
            save_on_rank(str(tmp_path / "c"), steps=1)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert load_on_rank(str(tmp_path / "c"))[0] == saved


def test_the_last_checkpoint_is_the_whole_one_of_the_highest_step(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    root = tmp_path / "checkpoints"
    for name in ("step_2", "step_10", f".step_11{PARTIAL}", f".step_12{DELETED}", "step_x", "other"):
        (root / name).mkdir(parents=True)
        (root / name / "state.json").write_text("{}")
    (root / "step_20").mkdir()  # nothing in it
    assert last_checkpoint(tmp_path) == root / "step_10"


def test_a_kill_between_two_renames_brings_the_old_one_back(tmp_path: Path) -> None:
    save_on_rank(str(tmp_path / "checkpoints" / "step_3"))
    step_3 = tmp_path / "checkpoints" / "step_3"
    step_3.rename(step_3.with_name(f".step_3{REPLACED}"))
    assert last_checkpoint(tmp_path) == step_3
    load_on_rank(str(step_3))
    step_3.rename(step_3.with_name(f".step_3{REPLACED}"))
    load_on_rank(str(step_3))


def test_pruning_keeps_the_newest_and_removes_what_kills_left(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    for name in ("step_2", "step_9", "step_10", f".step_11{PARTIAL}", f".step_8{DELETED}", "mine"):
        (root / name).mkdir(parents=True)
        (root / name / "state.json").write_text("{}")
    prune(tmp_path, keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["mine", "step_10", "step_9"]
    prune(tmp_path, keep=5)
    assert sorted(p.name for p in root.iterdir()) == ["mine", "step_10", "step_9"]
