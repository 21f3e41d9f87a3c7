"""Each optimizer on shards is the same optimizer on whole tensors, and the one its paper describes."""

from __future__ import annotations

import sys

import pytest
import torch
from hybrid_cases import collectives, cross_entropy, full_weights, make_engine, pack, ragged_sequences
from optim_cases import SETTINGS, SHAPES, config_of, gradients, largest_error, mesh_of, parameters, take_steps, trained, whole
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hybrid.checkpoint import load_checkpoint, save_checkpoint
from hybrid.config import OptimizerConfig, resolve
from hybrid.optim.adafactor import Adafactor
from hybrid.optim.muon import Muon
from hybrid.optim.optimizers import make_optimizer
from hybrid.optim.schedules import Schedule

NAMES = tuple(SETTINGS)


# -- shards


def errors_by_mesh(name: str, kinds: tuple[str, ...]) -> dict[str, float]:
    expected, _ = trained(config_of(name))
    return {kind: largest_error(trained(config_of(name), mesh_of(kind))[0], expected) for kind in kinds}


@pytest.mark.parametrize("name", NAMES)
def test_shards_take_the_steps_of_whole_tensors(pool2, pool4, name):
    """Rows that do not divide, ranks without any, a parameter without elements; one copy per group of ranks, and per rank."""
    errors = [*pool2.run(errors_by_mesh, name, ("shard",)), *pool4.run(errors_by_mesh, name, ("shard", "mixed", "replicate"))]
    assert max(max(by_mesh.values()) for by_mesh in errors) <= 1e-5, errors
    before, after = parameters(), trained(config_of(name))[0]
    assert all((before[n] != after[n]).any() for n, shape in SHAPES.items() if 0 not in shape)


def engine_run(folder: str, stage: int, expected: str | None) -> float:
    """Three steps of Adafactor; their error, or the weights to a file where there is none."""
    settings = {"name": "adafactor", "lr": 0.02, "weight_decay": 0.1, "max_grad_norm": 1.0}
    engine = make_engine(folder, zero_stage=stage, optimizer=settings, attn_implementation="sdpa")
    for _ in range(3):
        engine.forward_backward([pack(ragged_sequences(8)[engine.rank :: engine.world_size])], cross_entropy)
        engine.optim_step()
    weights = full_weights(engine)
    engine.close()
    if expected is not None:
        return largest_error(weights, load_file(expected))
    save_file(weights, f"{folder}/expected.st")
    return 0.0


def test_adafactor_in_an_engine_does_not_depend_on_ranks(pool2, pool4, tmp_path):
    save_tiny(tmp_path, "llama", num_hidden_layers=2, vocab_size=97)
    engine_run(str(tmp_path), 3, None)
    runs = [(pool2, 0), (pool2, 1), (pool2, 3), (pool4, 2)]
    errors = [pool.run(engine_run, str(tmp_path), stage, f"{tmp_path}/expected.st") for pool, stage in runs]
    assert max(map(max, errors)) <= 1e-5


def low_precision(name: str) -> tuple[set[str], float]:
    held, optimizer = trained(config_of(name), mesh_of("shard"), dtype=torch.bfloat16)
    expected, _ = trained(config_of(name), dtype=torch.bfloat16)
    state = {
        str(value.dtype)
        for p in held.values()
        for key, value in optimizer.state.get(p, {}).items()
        if key != "step" and value.shape == p.shape
    }
    return state, largest_error(held, expected)


@pytest.mark.parametrize("name", NAMES)
def test_state_is_of_the_shards_dtype(pool2, name):
    """But for Adafactor's, which is small: averages that move by less than bfloat16 resolves must not stand still."""
    _, optimizer = trained(config_of(name), steps=1)
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {torch.float32}
    for dtypes, error in pool2.run(low_precision, name):
        assert dtypes == {"torch.float32" if name == "adafactor" else "torch.bfloat16"}
        assert error <= 2**-6  # one bf16 rounding: kernels fuse products in their vector part only, and lengths differ


def strangely_cut(name: str) -> str:
    mesh = init_device_mesh("cpu", (2,))
    held = parameters()
    held["up.weight"] = torch.nn.Parameter(distribute_tensor(held["up.weight"].detach(), mesh, [Shard(1)]))
    try:
        make_optimizer(config_of(name), held)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_a_layout_it_cannot_work_on_is_refused(pool2, name):
    for line in pool2.run(strangely_cut, name):
        assert "(9, 6) lies as (Shard(dim=1),); allowed: Shard(0)" in line
        assert "\n" not in line


# -- checkpoints


def save_after_two(name: str, path: str) -> None:
    held, optimizer = trained(config_of(name), mesh_of("shard"), steps=2)
    save_checkpoint(path, model=_stored(held), optimizer=optimizer)


def error_after_load(name: str, path: str, kind: str | None) -> float:
    """One more step, against a run that was never saved."""
    mesh = None if kind is None else mesh_of(kind)
    held = parameters(mesh)
    for p in held.values():
        torch.nn.init.zeros_(p)
    optimizer = make_optimizer(config_of(name), held)
    load_checkpoint(path, model=_stored(held), optimizer=optimizer)
    take_steps(optimizer, held, range(2, 3), mesh=mesh)
    return largest_error(held, trained(config_of(name), steps=3)[0])


def _stored(held: dict) -> dict:
    return {name: p for name, p in held.items() if p.numel()}


@pytest.mark.parametrize("name", NAMES)
def test_state_saved_by_two_ranks_goes_on_at_one_and_four(pool2, pool4, tmp_path, name):
    path = str(tmp_path / "c")
    pool2.run(save_after_two, name, path)
    assert error_after_load(name, path, None) <= 1e-5
    for kind in ("shard", "mixed"):
        assert max(pool4.run(error_after_load, name, path, kind)) <= 1e-5


def test_muon_does_not_begin_the_state_of_other_patterns_anew(tmp_path):
    held, optimizer = trained(config_of("muon"), steps=1)
    save_checkpoint(tmp_path / "c", model=_stored(held), optimizer=optimizer)
    other = make_optimizer(config_of("muon", muon_exclude=("embed", "down")), held)
    load_checkpoint(tmp_path / "c", model=_stored(held), optimizer=other)
    before = {name: p.detach().clone() for name, p in held.items()}
    with pytest.raises(ValueError, match=r"\(7, 10\) has the state \['momentum_buffer'\]; .* muon_exclude"):
        take_steps(other, held, range(1))
    assert all(torch.equal(before[name], p) for name, p in held.items())


# -- what each of them is


def reference(name: str, steps: int) -> dict[str, torch.Tensor]:
    """Lion by its paper, Adafactor by torch, Adam and AdamW by their papers, in float64."""
    weights = {n: p.detach().double() for n, p in parameters().items() if p.numel()}
    decay = {n: 0.1 if w.ndim > 1 else 0.0 for n, w in weights.items()}
    if name == "adafactor":
        leaves = {n: torch.nn.Parameter(w) for n, w in weights.items()}
        groups = [{"params": [w], "weight_decay": decay[n]} for n, w in leaves.items()]
        optimizer = torch.optim.Adafactor(groups, lr=0.05, eps=(1e-8, 1e-3))
        for step in range(steps):
            for n, w in leaves.items():
                w.grad = gradients(step)[n].double()
            optimizer.step()
        return leaves
    first = {n: torch.zeros_like(w) for n, w in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items()}
    for step in range(steps):
        for n, w in weights.items():
            g = gradients(step)[n].double()
            if name == "lion":
                w -= 0.01 * (torch.sign(0.9 * first[n] + 0.1 * g) + decay[n] * w)
                first[n] = 0.99 * first[n] + 0.01 * g
                continue
            g = g + decay[n] * w if name == "adam" else g
            first[n] = 0.9 * first[n] + 0.1 * g
            second[n] = 0.999 * second[n] + 0.001 * g * g
            mean, square = first[n] / (1 - 0.9 ** (step + 1)), second[n] / (1 - 0.999 ** (step + 1))
            w -= 0.02 * (mean / (square.sqrt() + 1e-8) + (decay[n] * w if name == "adamw" else 0))
    return weights


@pytest.mark.parametrize("name", ["adamw", "adam", "lion", "adafactor"])
def test_it_is_what_its_paper_says(name):
    assert largest_error(trained(config_of(name), steps=5)[0], reference(name, 5)) <= 1e-5


def test_adafactor_clips_its_update_and_forgets_as_told():
    config = config_of("adafactor", clip_threshold=1.5, beta2_decay=-0.5, weight_decay=0.0)
    held, _ = trained(config, steps=3)
    plain = parameters()
    torch_held = [p for p in plain.values() if p.numel()]
    optimizer = torch.optim.Adafactor(torch_held, lr=0.05, d=1.5, beta2_decay=-0.5, eps=(1e-8, 1e-3))
    for step in range(3):
        for n, g in gradients(step).items():
            plain[n].grad = g if g.numel() else None
        optimizer.step()
    assert largest_error(held, plain) <= 1e-5


def test_adafactor_of_small_gradients_is_that_of_large_ones():
    """torch's floors a mean of squares by eps, not eps^2: its V of gradients below 1e-4 is another."""

    def moved(scale: float) -> dict[str, torch.Tensor]:
        held = parameters()
        optimizer = make_optimizer(config_of("adafactor", clip_threshold=1e9), held)
        for n, g in gradients(0).items():
            held[n].grad = g * scale
        optimizer.step()
        return held

    assert largest_error(moved(2.0**-16), moved(1.0)) <= 1e-5


def sums_of_a_step(kind: str) -> int:
    mesh = mesh_of(kind)
    held, optimizer = trained(config_of("adafactor"), mesh, steps=1)
    for name, gradient in gradients(1).items():
        held[name].grad = distribute_tensor(gradient, mesh, [Replicate(), Shard(0)])
    with collectives() as counts:
        optimizer.step()
    assert counts.keys() <= {"all_reduce"}
    return counts["all_reduce"]


def test_adafactor_adds_up_twice_in_a_step_for_all_tensors_at_once(pool2):
    assert pool2.run(sums_of_a_step, "shard") == [2, 2]
    assert pool2.run(sums_of_a_step, "replicate") == [0, 0]


@pytest.mark.parametrize("kind", [Adafactor, Muon])
def test_a_parameter_without_elements_is_passed_over(kind):
    empty, full = torch.nn.Parameter(torch.zeros(0, 4)), torch.nn.Parameter(torch.ones(3, 4))
    empty.grad, full.grad = torch.zeros(0, 4), torch.ones(3, 4)
    optimizer = kind([{"params": [empty, full], "use_muon": True}])
    optimizer.step()
    assert full.isfinite().all()
    assert (full != 1).all()
    assert not optimizer.state.get(empty)


# -- groups and settings


@pytest.mark.parametrize("name", NAMES)
def test_each_parameter_with_elements_is_in_one_group_and_vectors_do_not_decay(name):
    held = parameters()
    optimizer = make_optimizer(config_of(name), held)
    names = {id(p): n for n, p in held.items()}
    decay = [(names[id(p)], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(decay) == sorted((n, 0.1 if len(s) > 1 else 0.0) for n, s in SHAPES.items() if 0 not in s)


def test_muon_takes_matrices_beside_the_excluded_at_a_rate_of_their_own():
    held = parameters()
    config = OptimizerConfig(name="muon", lr=1.0, muon_lr=2.0, warmup_steps=2, muon_exclude=("embed", r"^down\.w"))
    optimizer = make_optimizer(config, held)
    schedule = Schedule(config, optimizer)
    names = {id(p): n for n, p in held.items()}

    def rates() -> dict[str, tuple[bool, float]]:
        return {names[id(p)]: (g["use_muon"], g["lr"]) for g in optimizer.param_groups for p in g["params"]}

    matrices = {"up.weight", "one_row.weight", "experts.weight"}
    expected = {n: (n in matrices, 2.0 if n in matrices else 1.0) for n, shape in SHAPES.items() if 0 not in shape}
    assert rates() == {n: (is_matrix, rate / 2) for n, (is_matrix, rate) in expected.items()}
    schedule.step()
    assert rates() == expected


def test_muon_without_a_matrix_is_refused():
    vectors = {n: p for n, p in parameters().items() if p.ndim < 2 or n.startswith("embed")}
    with pytest.raises(ValueError, match="muon finds no matrix to train beside muon_exclude"):
        make_optimizer(OptimizerConfig(name="muon"), vectors)


def test_lion_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lion_pytorch", None)
    with pytest.raises(ValueError, match="pip install lion-pytorch"):
        make_optimizer(config_of("lion"), parameters())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"name": "lion", "eps": 1e-6}, "eps=1e-06 with name=lion; allowed: name=adamw, adam, adafactor, muon"),
        ({"name": "sgd", "betas": [0.9, 0.9]}, "betas=(0.9, 0.9) with name=sgd; allowed: name=adamw, adam, lion, muon"),
        ({"name": "adafactor", "momentum": 0.9}, "momentum=0.9 with name=adafactor; allowed: name=sgd, muon"),
        ({"nesterov": True}, "nesterov=True with name=adamw; allowed: name=sgd, muon"),
        ({"name": "adam", "clip_threshold": 2.0}, "clip_threshold=2.0 with name=adam; allowed: name=adafactor"),
        ({"name": "adam", "beta2_decay": -0.5}, "beta2_decay=-0.5 with name=adam; allowed: name=adafactor"),
        ({"name": "sgd", "ns_steps": 6}, "ns_steps=6 with name=sgd; allowed: name=muon"),
        ({"muon_lr": 0.1}, "muon_lr=0.1 with name=adamw; allowed: name=muon"),
        ({"adam_lr": 0.1}, "adam_lr=0.1 with name=adamw; allowed: name=muon"),
        ({"muon_exclude": []}, "muon_exclude=() with name=adamw; allowed: name=muon"),
        ({"name": "muon", "muon_exclude": ["("]}, "optimizer.muon_exclude: '(' is no regular expression"),
        ({"name": "sgd", "nesterov": True}, "nesterov=true with momentum=0; allowed: momentum above 0"),
        ({"name": "muons"}, "optimizer.name: Input should be 'adamw', 'adam', 'sgd', 'lion', 'adafactor' or 'muon'"),
    ],
)
def test_a_field_that_the_optimizer_does_not_have_is_refused_by_name(given, line):
    with pytest.raises(ValueError) as caught:
        resolve({"optimizer": given})
    assert line in str(caught.value)
    assert "default factory" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_the_optimizer_and_survive_a_file(name):
    config = OptimizerConfig(name=name)
    assert config.betas == ((0.9, 0.99) if name == "lion" else (0.9, 0.999))
    assert (config.momentum, config.nesterov) == ((0.95, True) if name == "muon" else (0.0, False))
    assert OptimizerConfig.model_validate(config.model_dump(mode="json")) == config


def sharded_state(name: str) -> set[str]:
    held, optimizer = trained(config_of(name), mesh_of("shard"), steps=1)
    return {key for p in held.values() for key, v in optimizer.state.get(p, {}).items() if isinstance(v, DTensor)}


@pytest.mark.parametrize(
    ("name", "sharded"),
    [
        ("adafactor", {"row_var", "variance", "col_var"}),
        ("muon", {"momentum_buffer", "exp_avg", "exp_avg_sq"}),
        ("lion", {"exp_avg"}),
    ],
)
def test_state_lies_as_its_parameter(pool2, name, sharded):
    assert pool2.run(sharded_state, name) == [sharded] * 2
    held, _ = trained(config_of(name), steps=1)
    assert all(whole(p).isfinite().all() for p in held.values())
