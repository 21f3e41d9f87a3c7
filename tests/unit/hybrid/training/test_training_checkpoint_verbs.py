"""The checkpoint verbs at the door and at the edges: arguments, tags, `latest`, parts that are left out, damage, handles."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from training_cases import Net, config, loss_of, make_net, micro_batches, open_engine, plain_sgd, share, train, weights_of, worst

from hybrid.optim import state as optim_state
from hybrid.training import engine_state
from hybrid.training.config.top import resolve_training
from hybrid.training.json_values import decode, encode

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}

CPU = {"device": "cpu"}


def message_of(function: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(ValueError) as caught:
        function(*args, **options)
    return str(caught.value)


def log_of(engine: Any, function: Any) -> tuple[Any, list[str]]:
    """What a call returned, and what the engine logged."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    engine._log.addHandler(handler)
    try:
        return function(), records
    finally:
        engine._log.removeHandler(handler)


# -- arguments


def saves_with_one_bad_rank(path: str, argument: str, bad: Any) -> tuple[str, int]:
    """What every rank hears when rank 1 alone gives `bad`; the collectives still fit afterwards."""
    engine = open_engine(config())
    given = {"save_dir": path, "tag": "one", "client_state": {}}
    if engine.global_rank == 1:
        given[argument] = bad
    message = message_of(engine.save_checkpoint, **given)
    engine.save_checkpoint(path, "two")
    return message, len(list(Path(path).iterdir()))


@pytest.mark.parametrize(
    ("argument", "bad", "says"),
    [
        ("save_dir", None, "save_dir=None; allowed: the path of a folder"),
        ("save_dir", "", "save_dir=''; allowed: the path of a folder"),
        ("tag", "../up", "tag='../up'; allowed: one folder's name"),
        ("tag", "", "tag=''; allowed: one folder's name"),
        ("tag", "latest", "tag='latest' is the file that names the last tag"),
        ("client_state", [1], "client_state is a list; allowed: a dict"),
        ("client_state", {"a": {"b": {1, 2}}}, "client_state['a']['b'] is a builtins.set; allowed in a checkpoint: JSON"),
        ("client_state", {"w": torch.zeros(2)}, "client_state['w'] is a torch.Tensor; allowed in a checkpoint: JSON"),
        ("client_state", {"n": np.ones(1)}, "client_state['n'] is a numpy.ndarray; allowed in a checkpoint: JSON"),
    ],
)
def test_one_bad_rank_is_one_error_on_all_before_anything_is_written(pool2, tmp_path, argument, bad, says):
    results = pool2.run(saves_with_one_bad_rank, str(tmp_path), argument, bad)
    assert {message for message, _ in results} == {results[0][0]}
    assert says in results[0][0]
    assert results[0][0].startswith("rank 1: ")
    assert [left for _, left in results] == [2, 2]  # two/ and latest


@pytest.mark.parametrize("bad", [None, ""])
def test_no_directory_is_refused_by_every_verb(bad):
    engine = open_engine(config(ranks=1))
    assert "save_dir=" in message_of(engine.save_checkpoint, bad)
    assert "load_dir=" in message_of(engine.load_checkpoint, bad)
    assert "save_dir=" in message_of(engine.save_16bit_model, bad)


def test_an_elastic_checkpoint_is_refused_when_the_config_is_read():
    for stage in (1, 3):
        message = message_of(resolve_training, config(stage=stage, zero_optimization={"elastic_checkpoint": True}))
        assert "zero_optimization.elastic_checkpoint: a checkpoint loads at any number of ranks already" in message
    resolve_training(config(zero_optimization={"elastic_checkpoint": False}))


def saves_with_two_tags(path: str, validation: str) -> tuple[str, list[str]]:
    engine = open_engine(config(checkpoint={"tag_validation": validation}))

    def save() -> str:
        try:
            engine.save_checkpoint(path, f"tag{engine.global_rank}")
        except ValueError as error:
            return str(error)
        return "saved"

    return log_of(engine, save)


@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Fail"])
def test_tags_that_differ_are_what_the_config_says(pool2, tmp_path, validation):
    (first, log), (second, other) = pool2.run(saves_with_two_tags, str(tmp_path), validation)
    left = sorted(p.name for p in tmp_path.iterdir())
    if validation == "Fail":
        assert first == second == "ranks give different tags: tag0, tag1; give the same on all"
        assert left == []
    else:
        assert (first, second, left) == ("saved", "saved", ["latest", "tag0"])
        assert (tmp_path / "latest").read_text() == "tag0"
        said = ["ranks give different tags (tag0, tag1); rank 0's is used: tag0"]
        assert (log, other) == (said if validation == "Warn" else [], [])


def test_ranks_with_different_directories_are_refused(pool2, tmp_path):
    with pytest.raises(AssertionError, match="ranks give different directories"):
        pool2.run(saves_to_its_own, str(tmp_path))


def saves_to_its_own(path: str) -> None:
    engine = open_engine(config())
    engine.save_checkpoint(f"{path}/{engine.global_rank}")


def saves_between_backwards(path: str, stage: int) -> dict[str, Any]:
    engine = open_engine(config(stage=stage, accumulation=2))
    engine.save_checkpoint(path)
    x, y = micro_batches(1, 2, seed=7)[0][0]
    engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
    message = message_of(engine.save_checkpoint, path, "half")
    engine.load_checkpoint(path)  # whose gradients are of other weights
    train(engine, micro_batches(1, 2))
    engine.save_checkpoint(path, "after")
    return {"message": message, "weights": weights_of(engine), "micro": engine.micro_steps}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_between_the_backwards_of_a_step_a_save_is_refused_and_a_load_drops_gradients(pool2, tmp_path, stage):
    for result in pool2.run(saves_between_backwards, str(tmp_path), stage):
        assert "gradients wait for the rest of their step" in result["message"]
        assert worst(result["weights"], plain_sgd(micro_batches(1, 2))) < 1e-5
        assert result["micro"] == 2


def test_a_folder_of_somebody_else_is_not_replaced(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    engine = open_engine(config(ranks=1))
    assert "is no checkpoint (mine); give another tag" in message_of(engine.save_checkpoint, tmp_path, "data")


# -- latest


def test_latest_names_the_last_save_unless_it_is_asked_not_to(tmp_path):
    engine = open_engine(config(ranks=1))
    engine.save_checkpoint(tmp_path)
    train(engine, micro_batches(1, 1))
    engine.save_checkpoint(tmp_path, save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step0"
    assert engine.load_checkpoint(tmp_path, "global_step1") == (str(tmp_path / "global_step1"), {})
    assert engine.global_steps == 1
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 0
    engine.save_checkpoint(tmp_path, 7)
    assert (tmp_path / "latest").read_text() == "7"


def test_without_latest_nothing_is_loaded_and_that_is_said(tmp_path):
    engine = open_engine(config(ranks=1))
    before = weights_of(engine)
    for folder in (tmp_path, tmp_path / "missing"):
        found, said = log_of(engine, lambda folder=folder: engine.load_checkpoint(folder))
        assert found == (None, {})
        assert said == [f"{folder} has no file `latest`: nothing is loaded; give the folder that was saved to, or a tag"]
    assert "is not a whole checkpoint" in message_of(engine.load_checkpoint, tmp_path, "nothing")
    (tmp_path / "latest").write_text("../x")
    assert "give a tag" in message_of(engine.load_checkpoint, tmp_path)
    assert all(torch.equal(before[n], w) for n, w in weights_of(engine).items())


# -- parts


def state_of(engine: Any) -> dict[str, Any]:
    tensors = engine_state.named_tensors(engine)
    tensors |= optim_state.tensors(engine.optimizer, tensors)
    found = {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for name, t in tensors.items()}
    return {"tensors": found, "lr": engine.get_lr(), "steps": engine.global_steps, "schedule": encode(
        engine.lr_scheduler.state_dict(), "") if engine.lr_scheduler is not None else None}  # fmt: skip


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    a, b = one["tensors"], other["tensors"]
    equal = a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
    return equal and all(one[key] == other[key] for key in ("lr", "steps", "schedule"))


SCHEDULES: dict[str, Any] = {
    "plateau": lambda o: Plateau(o, patience=0),  # infinity in its state
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3], 0.5),  # a Counter with numbers as keys
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
}


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """As an engine steps it: without a metric."""

    def step(self, metrics: float = 1.0, epoch: Any = None) -> None:
        super().step(metrics)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_any_scheduler_of_torch_goes_on_where_it_was(tmp_path, name):
    made = SCHEDULES[name]
    engine = open_engine(config(ranks=1, optimizer=ADAMW), lr_scheduler=made)
    train(engine, micro_batches(2, 1))
    engine.save_checkpoint(tmp_path)
    again = open_engine(config(ranks=1, optimizer=ADAMW), lr_scheduler=made, module=make_net(3))
    again.load_checkpoint(tmp_path)
    for _ in range(3):
        assert same(state_of(engine), state_of(again))
        for one in (engine, again):
            train(one, micro_batches(1, 1))


@pytest.mark.parametrize(
    "value",
    [1, -0.0, float("-inf"), "~float", (1, (2, [3, None])), {1: 2, (1, 2): {"a": True}}, {"~tuple": 1}, {"a": {"~x": []}}, {}],
    ids=str,
)
def test_plain_values_come_back_exactly(value):
    back = decode(json.loads(json.dumps(encode(value, "x"), allow_nan=False)))
    assert (back, repr(back), type(back)) == (value, repr(value), type(value))


def test_a_number_that_python_has_no_form_for_is_refused():
    with pytest.raises(ValueError, match=r"client_state\['loss'\] is a numpy\.longdouble"):
        encode({"loss": np.longdouble(1)}, "client_state")


def test_what_is_not_asked_for_stays(tmp_path):
    settings = config(ranks=1, optimizer=ADAMW, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 5}})
    engine = open_engine(settings)
    train(engine, micro_batches(2, 1))
    engine.save_checkpoint(tmp_path)
    saved = state_of(engine)

    def loaded(**options: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        other = open_engine(settings, make_net(5))
        before = state_of(other)
        other.load_checkpoint(tmp_path, **options)
        return before, state_of(other)

    _, everything = loaded()
    assert same(everything, saved)
    before, weights = loaded(load_module_only=True)
    assert (weights["lr"], weights["steps"], weights["schedule"]) == (before["lr"], 0, before["schedule"])
    assert weights["tensors"].keys() == before["tensors"].keys()  # no moments
    assert all(torch.equal(value, saved["tensors"][n]) for n, value in weights["tensors"].items())
    _, no_moments = loaded(load_optimizer_states=False)
    assert (no_moments["steps"], no_moments["schedule"]) == (2, saved["schedule"])
    assert not any(name.startswith("exp_avg") for name in no_moments["tensors"])
    before, no_schedule = loaded(load_lr_scheduler_states=False)
    assert no_schedule["schedule"] == before["schedule"]
    assert no_schedule["lr"] == saved["lr"]


def test_a_schedule_that_was_not_saved_is_refused_and_nothing_changes(tmp_path):
    open_engine(config(ranks=1, optimizer=ADAMW)).save_checkpoint(tmp_path)
    settings = config(ranks=1, optimizer=ADAMW, scheduler={"type": "WarmupLR", "params": {}})
    engine = open_engine(settings, make_net(2))
    train(engine, micro_batches(1, 1))
    before = state_of(engine)
    assert "holds no schedule, and there is one here" in message_of(engine.load_checkpoint, tmp_path)
    assert same(state_of(engine), before)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)


def test_the_loss_scale_goes_on(tmp_path):
    fp16 = {"enabled": True, "initial_scale_power": 40, "max_loss_scale": 2.0**50, "hysteresis": 1}
    settings = config(ranks=1, fp16=fp16, module_precision=[{"match": "norms", "dtype": "fp32", "output": "input"}])
    engine = open_engine(settings)
    train(engine, micro_batches(3, 1))
    assert engine.skipped_steps > 0
    engine.save_checkpoint(tmp_path)
    again = open_engine(settings)
    again.load_checkpoint(tmp_path)
    assert again.loss_scale == engine.loss_scale < 2.0**40
    assert again.skipped_steps == engine.skipped_steps


def draws_after(path: str, load: bool, **options: bool) -> list[float]:
    engine = open_engine(config())
    torch.manual_seed(100 + engine.global_rank)
    if load:
        engine.load_checkpoint(path, **options)
    else:
        engine.save_checkpoint(path)
    return [torch.rand(()).item(), np.random.random()]


def test_generators_of_each_rank_go_on_unless_weights_alone_are_loaded(pool2, tmp_path):
    saved = pool2.run(draws_after, str(tmp_path), False)
    pool2.run(draws_after, str(tmp_path / "other"), False)
    assert pool2.run(draws_after, str(tmp_path), True) == saved
    assert saved[0] != saved[1]
    again = pool2.run(draws_after, str(tmp_path), True, load_module_only=True)
    assert [draws[0] for draws in again] == [draws[0] for draws in saved]  # as seeded there
    assert [draws[1] for draws in again] != [draws[1] for draws in saved]


def test_other_parameter_groups_are_refused_and_nothing_changes(tmp_path):
    engine = open_engine(config(ranks=1, optimizer=ADAMW))
    train(engine, micro_batches(1, 1))
    engine.save_checkpoint(tmp_path)
    net = make_net(3)
    groups = [{"params": net.door.parameters(), "lr": 0.5}, {"params": [*net.blocks.parameters(), *net.head.parameters()]}]
    other = open_engine(config(ranks=1, optimizer=ADAMW), net, model_parameters=groups)
    before = state_of(other)
    assert "groups of [2, 10] parameters here, of [12] there" in message_of(other.load_checkpoint, tmp_path)
    assert same(state_of(other), before)
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert other.get_lr() == [0.5, 1e-2]


class Counting(torch.optim.SGD):
    """Keeps a plain number per parameter."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["calls"] = self.state[parameter].get("calls", 0) + 1


def test_optimizer_state_that_is_no_tensor_is_kept(tmp_path):
    def make(groups: Any) -> Counting:
        return Counting(groups, lr=0.1)

    engine = open_engine(config(ranks=1), optimizer=make)
    train(engine, micro_batches(2, 1))
    engine.save_checkpoint(tmp_path)
    again = open_engine(config(ranks=1), optimizer=make)
    again.load_checkpoint(tmp_path)
    assert {s["calls"] for s in again.optimizer.state.values()} == {2}
    assert len(again.optimizer.state) == len(list(Net().parameters()))


def half_frozen(seed: int) -> nn.Module:
    net = make_net(seed)
    net.door.requires_grad_(False)
    return net


def test_frozen_parameters_may_be_left_out_and_then_stay(tmp_path):
    engine = open_engine(config(ranks=1), half_frozen(0))
    train(engine, micro_batches(1, 1))
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    names = {n for f in (tmp_path / "global_step1" / "shards").iterdir() for n in load_file(f)}
    assert {"model.door.weight", "model.door.bias"}.isdisjoint(names)
    again = open_engine(config(ranks=1), half_frozen(1))
    before = weights_of(again)
    again.load_checkpoint(tmp_path)
    trained, after = weights_of(engine), weights_of(again)
    assert all(torch.equal(after[n], before[n] if n.startswith("door") else trained[n]) for n in after)
    assert engine.module_state_dict(exclude_frozen_parameters=True).keys() == trained.keys() - {"door.weight", "door.bias"}


class More(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


def test_names_on_one_side_only_need_strict_off(tmp_path):
    engine = open_engine(config(ranks=1))
    engine.save_checkpoint(tmp_path, "less")
    wide = open_engine(config(ranks=1), make_net(4, More))
    wide.save_checkpoint(tmp_path, "more")
    assert "missing in it: ['model.extra.bias', 'model.extra.weight']" in message_of(
        wide.load_checkpoint, tmp_path, "less", load_optimizer_states=False
    )
    extra = weights_of(wide)["extra.weight"]
    wide.load_checkpoint(tmp_path, "less", load_module_strict=False, load_optimizer_states=False)
    assert torch.equal(weights_of(wide)["extra.weight"], extra)
    assert torch.equal(weights_of(wide)["head.weight"], weights_of(engine)["head.weight"])
    engine.load_checkpoint(tmp_path, "more", load_module_strict=False, load_optimizer_states=False)
    assert torch.equal(weights_of(engine)["head.weight"], make_net(4, More).head.weight)


@pytest.mark.parametrize(
    "zero", [{"stage": 1}, {"stage": 1, "offload_optimizer": CPU}, {"stage": 3, "offload_optimizer": CPU}], ids=str
)
def test_what_a_checkpoint_lacks_stays_as_the_caller_has_made_it(tmp_path, zero):
    open_engine(config(ranks=1)).save_checkpoint(tmp_path)
    wide = open_engine(config(ranks=1, zero_optimization=zero), make_net(4, More))
    wide.module.extra.weight.data.fill_(3.0)
    wide.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
    assert weights_of(wide)["extra.weight"].unique().tolist() == [3.0]


def test_a_schedule_that_goes_on_without_the_optimizer_has_its_rate(tmp_path):
    halving = {"lr_scheduler": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)}
    engine = open_engine(config(ranks=1), **halving)
    train(engine, micro_batches(3, 1))
    engine.save_checkpoint(tmp_path)
    again = open_engine(config(ranks=1), **halving)
    again.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert again.get_lr() == engine.get_lr() == [0.0125]
    train(again, micro_batches(1, 1))
    assert again.get_lr() == [0.00625]


# -- damage and handles


def loads_damaged(path: str) -> tuple[str, bool]:
    engine = open_engine(config(optimizer=ADAMW, scheduler={"type": "WarmupLR", "params": {}}), make_net(9))
    train(engine, micro_batches(1, 1))
    before = state_of(engine)
    message = message_of(engine.load_checkpoint, path)
    return message, same(state_of(engine), before)


def saves(path: str) -> None:
    engine = open_engine(config(optimizer=ADAMW, scheduler={"type": "WarmupLR", "params": {}}))
    train(engine, micro_batches(1, 1))
    engine.save_checkpoint(path)


def test_a_flipped_byte_is_named_and_changes_nothing_on_any_rank(pool2, tmp_path):
    pool2.run(saves, str(tmp_path))
    shards = sorted((tmp_path / "global_step1" / "shards").iterdir())
    assert len(shards) == 2
    for shard in shards:
        held = shard.read_bytes()
        shard.write_bytes(held[:-5] + bytes([held[-5] ^ 4]) + held[-4:])
        for message, unchanged in pool2.run(loads_damaged, str(tmp_path)):
            assert f"shards/{shard.name} is damaged: its checksum differs" in message
            assert unchanged
        shard.write_bytes(held)


HANDLES = """
import os, resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from training_cases import config, micro_batches, open_engine, train
from hybrid.folders import FolderError
engine = open_engine(config(ranks=1, optimizer={"type": "AdamW", "params": {"lr": 0.01}}, checkpoint={"async_save": True}))
train(engine, micro_batches(1, 1))
folder, counts = Path(sys.argv[1]), []
for cycle in range(202):
    engine.save_checkpoint(folder, "t")
    engine.load_checkpoint(folder)
    if cycle % 4 == 0:
        file = next((folder / "t" / "shards").iterdir())
        file.write_bytes(file.read_bytes()[:-1] + b"#")
        for asked in (folder, folder / "nowhere"):
            try:
                engine.load_checkpoint(asked, "t")
                raise SystemExit("a damaged checkpoint was loaded")
            except ValueError as error:
                assert "damaged" in str(error) or "not a whole" in str(error), error
    if cycle > 0:
        counts.append(len(os.listdir("/proc/self/fd")))
print(*sorted(set(counts)), len(counts))
"""


def test_two_hundred_saves_and_loads_leave_no_file_open(tmp_path):
    """With failed loads between them; after the first, which makes the group that writes."""
    done = subprocess.run(
        [sys.executable, "-c", HANDLES, str(tmp_path), *sys.path], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    *handles, cycles = done.stdout.split()
    assert cycles == "201"
    assert len(handles) == 1
    assert int(handles[0]) < 100
