"""Muon: each whole matrix orthogonalized once, from raw gradients, at every layout of ranks; against a reference in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hybrid_cases import cross_entropy, full_weights, hf_module, make_engine, pack, ragged_sequences
from optim_cases import (
    SHAPES,
    MuonReference,
    all_to_alls,
    config_of,
    gradients,
    largest_error,
    mesh_of,
    orthogonal,
    parameters,
    take_steps,
    trained,
    whole,
)
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from torch import Tensor, nn

from hybrid.engine import HybridEngine
from hybrid.optim import state as optim_state
from hybrid.optim.muon import Muon, newton_schulz
from hybrid.optim.owners import plan_rounds
from hybrid.sharding import local, local_rows

SEQUENCES = ragged_sequences(16)  # four micro-batches on each of four ranks
LR, ADAM_LR, DECAY = 0.02, 1e-3, 0.1
EPS = 1e-5  # above the rounding of gradients, of which Adam makes steps of full size


# -- on tensors


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (5, 5), (1, 7), (7, 1)])
def test_newton_schulz_is_that_of_float64_and_evens_out_singular_values(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = newton_schulz(matrix)
    assert largest_error({"x": result}, {"x": orthogonal(matrix.double())}) <= 1e-5
    values = torch.linalg.svdvals(result)
    assert 0.6 < values.min() <= values.max() < 1.3
    assert result.dtype == newton_schulz(matrix.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-16, 1e-30])
def test_newton_schulz_does_not_see_the_scale(scale):
    matrix = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    assert largest_error({"x": newton_schulz(matrix * scale)}, {"x": newton_schulz(matrix)}) <= 1e-5
    assert not newton_schulz(matrix * 0).any()


def reference_errors(kind: str | None, scale: float) -> list[float]:
    """After five steps; and how far gradients that were scaled and unscaled lead from those that never were."""
    config = config_of("muon")
    weights = {n: p.detach().double() for n, p in parameters().items() if p.numel()}
    reference = MuonReference(weights, config.lr, config.adam_lr, config.eps, decay=config.weight_decay)
    for step in range(5):
        reference.step(gradients(step))
    mesh = None if kind is None else mesh_of(kind)
    held, _ = trained(config, mesh, steps=5, scale=scale)
    plain, _ = trained(config, mesh, steps=5)
    return [largest_error(held, weights), max((whole(held[n]) - whole(plain[n])).abs().max().item() for n in weights)]


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_five_steps_are_those_of_the_reference(pool2, pool4, scale):
    found = [reference_errors(None, scale), *pool2.run(reference_errors, "shard", scale)]
    for kind in ("shard", "mixed", "replicate"):
        found += pool4.run(reference_errors, kind, scale)
    assert max(error for error, _ in found) <= 1e-5
    assert {moved for _, moved in found} == {0.0}


# -- what travels


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("limit", [1, 100, 10**6])
def test_each_matrix_has_one_owner_and_work_is_even(ranks, limit):
    generator = torch.Generator().manual_seed(ranks)
    shapes = [tuple(torch.randint(1, 20, (2,), generator=generator).tolist()) for _ in range(23)]
    rounds = plan_rounds(shapes, ranks, limit)
    assert sorted(i for owned in rounds for places in owned for i in places) == list(range(23))
    assert {len(owned) for owned in rounds} == {ranks}
    for owned in rounds:
        assert all(len(places) <= 1 or sum(math.prod(shapes[i]) for i in places) <= limit for places in owned)
    loads = [sum(math.prod(shapes[i]) for owned in rounds for i in owned[rank]) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(math.prod(shape) for shape in shapes)
    if limit == 10**6:
        assert len(rounds) == 1


def bytes_of_a_step(limit: int, kind: str) -> list[int]:
    held = parameters(mesh := mesh_of(kind))
    matrices = [held[n] for n in MATRICES]
    rest = [p for p in held.values() if not any(p is m for m in matrices) and p.numel()]
    optimizer = Muon([{"params": matrices, "use_muon": True}, {"params": rest, "use_muon": False}], round_numel=limit)
    take_steps(optimizer, held, range(1), mesh=mesh)
    with all_to_alls() as calls:
        take_steps(optimizer, held, range(1, 2), mesh=mesh)
    return calls


MATRICES = ("up.weight", "down.weight", "one_row.weight", "experts.weight")


@pytest.mark.parametrize("limit", [1, 2**24])
def test_each_matrix_travels_to_its_owner_and_back(pool4, limit):
    shapes = [(SHAPES[n][0], math.prod(SHAPES[n][1:])) for n in MATRICES]
    rounds = plan_rounds(shapes, 4, limit)
    owners = {i: rank for owned in rounds for rank, places in enumerate(owned) for i in places}
    away = 0
    for place, (rows, columns) in enumerate(shapes):
        own = local_rows(rows, 4, owners[place])
        away += (rows - (own.stop - own.start)) * columns
    sent = pool4.run(bytes_of_a_step, limit, "shard")
    assert {len(calls) for calls in sent} == {2 * len(rounds)}
    assert sum(map(sum, sent)) == 2 * 4 * away  # fp32, there and back
    assert away < sum(rows * columns for rows, columns in shapes)  # less than a gather and a scatter of all
    assert pool4.run(bytes_of_a_step, limit, "replicate") == [[]] * 4


# -- in the engine


def reference_run(folder: str, max_norm: float | None) -> dict[str, Tensor]:
    """The plain module's float64 weights after five steps on all sequences; its raw gradients are clipped, each step anew."""
    hf = hf_module(folder).double()
    reference = MuonReference(dict(hf.named_parameters()), LR, ADAM_LR, EPS, decay=DECAY)
    for _ in range(5):
        hf.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for sequence in SEQUENCES:
            ids = torch.tensor([sequence])
            loss = loss + nn.functional.cross_entropy(hf(ids).logits[0, :-1, :79].double(), ids[0, 1:], reduction="sum")
        (loss / sum(len(s) - 1 for s in SEQUENCES)).backward()
        nn.utils.clip_grad_norm_(hf.parameters(), max_norm or math.inf)
        reference.step({n: p.grad for n, p in hf.named_parameters()})
    return {n: p.detach() for n, p in hf.named_parameters()}


def tiny_engine(folder: str, stage: int, max_norm: float | None = None) -> HybridEngine:
    settings = {"name": "muon", "lr": LR, "adam_lr": ADAM_LR, "weight_decay": DECAY, "eps": EPS, "max_grad_norm": max_norm}
    return make_engine(folder, zero_stage=stage, optimizer=settings, attn_implementation="sdpa")


def run_backward(engine: HybridEngine, accumulation: int = 1) -> None:
    """On this rank's micro-batches of the sequences."""
    mine = SEQUENCES[engine.rank :: engine.world_size]
    engine.forward_backward([pack(mine[i::accumulation]) for i in range(accumulation)], cross_entropy)


def engine_error(folder: str, expected: str, stage: int, accumulation: int, max_norm: float | None, scale: float = 1.0) -> float:
    engine = tiny_engine(folder, stage, max_norm)
    for _ in range(5):
        run_backward(engine, accumulation)
        for p in engine.model.parameters().values():
            p.grad.mul_(scale).div_(scale)
        engine.optim_step()
    error = largest_error(full_weights(engine), load_file(expected))
    engine.close()
    return error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama", num_hidden_layers=2, vocab_size=97)
    for name, max_norm in (("raw", None), ("clipped", 0.5)):
        save_file(reference_run(str(path), max_norm), path / f"expected_{name}.st")
    return str(path)


@pytest.mark.parametrize(
    ("world", "stage", "accumulation"),
    [(1, 2, 1), (1, 3, 4), (2, 0, 1), (2, 3, 4), (4, 1, 1), (4, 2, 4), (4, 3, 4)],
)
def test_an_engine_at_any_stage_takes_the_steps_of_the_reference(request, folder, world, stage, accumulation):
    """Orthogonalized once per step, after the last micro-batch."""
    arguments = (folder, f"{folder}/expected_raw.st", stage, accumulation, None)
    run = request.getfixturevalue(f"pool{world}").run if world > 1 else lambda function, *args: [function(*args)]
    errors = run(engine_error, *arguments)
    assert max(errors) <= 1e-5


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_clipped_and_unscaled_before_momentum(pool2, folder, stage):
    """The reference clips raw gradients, by another factor in each step. A clipped update would be 10 times smaller."""
    raw, clipped = (load_file(f"{folder}/expected_{name}.st") for name in ("raw", "clipped"))
    assert largest_error(raw, clipped) > 1e-3
    assert max(pool2.run(engine_error, folder, f"{folder}/expected_clipped.st", stage, 1, 0.5, 2.0**16)) <= 1e-5


def first_updates(folder: str, max_norm: float | None) -> dict[str, list[float]]:
    engine = tiny_engine(folder, 3, max_norm)
    run_backward(engine)
    engine.optim_step()
    name = "model.layers.0.mlp.up_proj.weight"
    momentum = engine.optimizer.state[engine.model.parameters()[name]]["momentum_buffer"]
    found = {"weight": full_weights(engine)[name].flatten().tolist(), "momentum": whole(momentum).flatten().tolist()}
    engine.close()
    return found


def test_clipping_reaches_a_matrix_through_its_momentum_alone(pool2, folder):
    raw, clipped = (pool2.run(first_updates, folder, max_norm)[0] for max_norm in (None, 1e-3))
    assert clipped["weight"] == pytest.approx(raw["weight"], abs=1e-6)
    assert max(map(abs, clipped["momentum"])) < 1e-2 * max(map(abs, raw["momentum"]))


def everything(engine: HybridEngine) -> dict[str, Tensor]:
    model = engine.model.parameters()
    found = optim_state.tensors(engine.optimizer, model) | dict(model)
    return {name: whole(tensor).clone() for name, tensor in found.items()}


def around_an_overflow(folder: str, stage: int, bad: float) -> dict[str, object]:
    """A clean step, one whose gradient is not finite on one rank, and a clean one; beside a run without the second."""
    engine, other = tiny_engine(folder, stage), tiny_engine(folder, stage)
    for one in (engine, other):
        run_backward(one)
        one.optim_step()
    before = everything(engine)
    run_backward(engine)
    if engine.rank == 0 or stage == 0:  # where every rank has the same sums
        local(engine.model.parameters()["model.layers.1.self_attn.q_proj.weight"].grad)[0, 0] = bad
    try:
        engine.optim_step()
        message = ""
    except FloatingPointError as error:
        message = str(error)
    found: dict[str, object] = {"message": message, "unchanged": _same(before, everything(engine)), "steps": engine.step_count}
    for one in (engine, other):
        run_backward(one)
        one.optim_step()
    found["equal"] = _same(everything(engine), everything(other))
    found["moved"] = not _same(before, everything(engine))
    for one in (engine, other):
        one.close()
    return found


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(("stage", "bad"), [(0, math.inf), (2, -math.inf), (3, math.nan)])
def test_a_gradient_that_is_not_finite_leaves_no_trace(pool2, folder, stage, bad):
    for found in pool2.run(around_an_overflow, folder, stage, bad):
        assert found.pop("message").startswith("step 2: gradient of model.layers.1.self_attn.q_proj.weight is not finite")
        assert found == {"unchanged": True, "steps": 1, "equal": True, "moved": True}
