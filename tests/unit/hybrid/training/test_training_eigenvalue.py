"""The eigenvalue monitor: known Hessians, a network against torch's own Hessian, and training that does not notice."""

from __future__ import annotations

import csv
import logging

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from training_cases import config, loss_of, make_net, micro_batches, open_engine, share, train, weights_of

from hybrid.training.config.top import resolve_training

CPU = {"device": "cpu"}
SPECTRA = {  # by block; what is largest in magnitude, with its sign, and what lies near it
    "terms.0": (4.0, [4.0, 2.0, 1.0, -1.0, 0.5]),
    "terms.1": (-3.0, [-3.0, 1.5, 1.0, 0.25]),
    "terms.2": (0.5, [0.5, -0.49, 0.2, 0.1, 0.0, 0.0]),  # nearly as large on the other side
    "terms.3": (1e-3, [1e-3, 5e-4, -2e-4]),
}


class Term(nn.Module):
    """w A w / 2 times the mean of the input; A symmetric, with a given spectrum."""

    def __init__(self, spectrum: list[float]) -> None:
        super().__init__()
        basis = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), dtype=torch.float64))[0]
        self.register_buffer("matrix", (basis @ torch.tensor(spectrum).double().diag() @ basis.T).float())
        self.low = nn.Parameter(torch.randn(1))
        self.rest = nn.Parameter(torch.randn(len(spectrum) - 1))
        self.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        w = torch.cat([self.low, self.rest])
        return self.scale * x.mean() * (w @ self.matrix @ w) / 2


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.terms = nn.ModuleList(Term(spectrum) for _, spectrum in SPECTRA.values())
        self.short = nn.ModuleList([nn.Linear(2, 2)])
        self.pair = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([term(x) for term in self.terms]).sum()


WEIGHTS = torch.tensor([0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 2.2])  # of samples; their mean is 1, that of each rank is not


def eigenvalues(settings: dict, kind: type[nn.Module] = Quadratic) -> dict:
    engine = open_engine(settings, make_net(kind=kind))
    for _ in range(engine.gradient_accumulation_steps()):
        assert engine.eigenvalues == {}
        engine.backward(engine(share(engine, WEIGHTS)))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    engine.destroy()
    return dict(engine.eigenvalues)


def section(**keys: object) -> dict:
    return {"eigenvalue": {"enabled": True, "layer_name": "terms", **keys}}


def check_quadratic(found: dict) -> None:
    assert list(found) == list(SPECTRA)
    for name, (largest, _) in SPECTRA.items():
        assert found[name] == pytest.approx(largest, rel=1e-2)
        assert found[name] / found["terms.0"] == pytest.approx(largest / 4.0, rel=1e-2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_known_hessians_at_every_stage(pool2, stage):
    check_quadratic(eigenvalues(config(ranks=1, stage=stage, **section())))
    first, second = pool2.run(eigenvalues, config(stage=stage, accumulation=2, **section()))
    check_quadratic(first)
    assert first == second


class Bend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.up(self.norm(x))))


class Bends(nn.Module):
    """Blocks whose gradients flow through each other; the second is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.door = nn.Linear(8, 6)
        self.blocks = nn.ModuleList(Bend() for _ in range(3))
        self.head = nn.Linear(6, 4)
        self.recompute = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.door(x)
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if i == 1 and self.recompute else block(x)
        return self.head(x)


def bends() -> nn.Module:
    return make_net(kind=Bends).eval()  # the drop of one process is not that of two


def of_bends(settings: dict) -> dict:
    engine = open_engine(settings, bends())
    for x, y in micro_batches(1, engine.gradient_accumulation_steps())[0]:
        engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
        engine.step()
    return dict(engine.eigenvalues)


def largest_of_bends(x: Tensor, y: Tensor) -> dict[str, float]:
    """By torch's own Hessian of the whole batch, in float64."""
    net = bends().double()
    net.recompute = False
    found = {}
    for name in ("blocks.0", "blocks.1", "blocks.2"):
        own = {key: value.detach() for key, value in net.named_parameters() if key.startswith(f"{name}.")}
        sizes = [value.numel() for value in own.values()]

        def loss(flat: Tensor, own: dict = own, sizes: list = sizes) -> Tensor:
            pieces = {key: piece.view_as(own[key]) for key, piece in zip(own, flat.split(sizes), strict=True)}
            return (functional_call(net, pieces, (x.double(),)) - y).square().mean()

        hessian = torch.autograd.functional.hessian(loss, torch.cat([value.flatten() for value in own.values()]))
        spectrum = torch.linalg.eigvalsh(hessian)
        found[name] = float(spectrum[spectrum.abs().argmax()])
    return found


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0},
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
        {"stage": 1, "offload_optimizer": CPU},
    ],
    ids=str,
)
def test_a_network_has_the_eigenvalues_of_its_whole_hessian(pool2, zero):
    given = config(zero_optimization=zero, accumulation=2, eigenvalue={"enabled": True, "tol": 1e-3, "max_iter": 1000})
    expected = largest_of_bends(*micro_batches(1, 2)[0][-1])
    for found in pool2.run(of_bends, given):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "zero",
    [{"stage": 1, "mics_shard_size": 2}, {"stage": 3, "mics_shard_size": 2}, {"stage": 3, "zero_hpz_partition_size": 2}],
    ids=str,
)
def test_four_ranks_in_every_layout(pool4, zero):
    given = config(ranks=4, zero_optimization=zero, eigenvalue={"enabled": True, "tol": 1e-3, "max_iter": 1000})
    expected = largest_of_bends(*micro_batches(1, 1)[0][0])
    for found in pool4.run(of_bends, given):
        assert found == pytest.approx(expected, rel=1e-3)


def run(settings: dict, steps: int) -> dict:
    """With dropout, two forwards to a backward, momentum and clipping: whatever the monitor changed would be seen."""
    engine = open_engine(settings, make_net(kind=Bends))
    torch.manual_seed(engine.global_rank)
    losses, gradients = [], []
    for step in micro_batches(steps, 2):
        for x, y in step:
            x, y = share(engine, x), share(engine, y)
            loss = loss_of(engine(x), y) + loss_of(engine(-x), -y)
            engine.backward(loss)
            losses.append(loss.item())
            if engine.is_gradient_accumulation_boundary():
                gradients.append({n: p.grad.full_tensor().clone() for n, p in engine.module.named_parameters()})
            engine.step()
    messages = {name: sum(size["count"] for size in sizes.values()) for name, sizes in engine.comms_logger.summary().items()}
    engine.destroy()  # its logger would see what later tests of this process send
    return {
        "weights": weights_of(engine), "gradients": gradients, "losses": losses, "random": torch.get_rng_state(),
        "norm": engine.get_global_grad_norm(), "found": dict(engine.eigenvalues), "messages": messages,
    }  # fmt: skip


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_does_not_notice(pool2, stage):
    given = config(stage=stage, accumulation=2, gradient_clipping=0.1, comms_logger={"enabled": True})
    given["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    results = zip(
        pool2.run(run, given | {"eigenvalue": {"enabled": True}}, 3),
        pool2.run(run, given | {"eigenvalue": {"enabled": True, "gas_boundary_resolution": 9}}, 3),
        pool2.run(run, given, 3),
        strict=True,
    )
    for on, waiting, off in results:
        assert len(on["found"]) == 3
        assert waiting["found"] == off["found"] == {}
        assert waiting["messages"] == off["messages"] != on["messages"]  # what is not due costs no collective
        for other in (on, waiting):
            for key in ("losses", "norm"):
                assert other[key] == off[key]
            assert torch.equal(other["random"], off["random"])
            for name, weight in off["weights"].items():
                assert torch.equal(other["weights"][name], weight)
            for mine, theirs in zip(other["gradients"], off["gradients"], strict=True):
                assert all(torch.equal(mine[name], gradient) for name, gradient in theirs.items())


def graphs_of_gradients(monkeypatch: pytest.MonkeyPatch, steps: int, **keys: object) -> int:
    """How often torch was asked for the graph of a gradient."""
    asked, plain = [], torch.autograd.grad

    def grad(*args, **kwargs):
        asked.append(bool(kwargs.get("create_graph")))
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    train(open_engine(config(ranks=1, accumulation=2, **keys), bends()), micro_batches(steps, 2))
    monkeypatch.undo()
    return sum(asked)


def test_graphs_of_gradients_are_made_at_due_steps_only(monkeypatch):
    assert graphs_of_gradients(monkeypatch, 4) == 0
    assert graphs_of_gradients(monkeypatch, 4, eigenvalue={"enabled": True}) == 4
    assert graphs_of_gradients(monkeypatch, 4, eigenvalue={"enabled": True, "gas_boundary_resolution": 2}) == 2
    assert graphs_of_gradients(monkeypatch, 4, eigenvalue={"enabled": True, "gas_boundary_resolution": 5}) == 0


def test_logs_have_each_block_once_under_its_place_and_its_name(tmp_path, caplog):
    out = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    given = config(ranks=1, csv_monitor=out, log_level="info", steps_per_print=2, wall_clock_breakdown=True,
                   **section(gas_boundary_resolution=2, verbose=True))  # fmt: skip
    engine = open_engine(given, make_net(kind=Quadratic))
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            engine.backward(engine(WEIGHTS))
            engine.step()
    assert {p.stem for p in (tmp_path / "job").glob("*Eigenvalues*")} == {
        f"Train_Eigenvalues_{name}" for name in [*SPECTRA, *(f"ModelBlockParam_{i}" for i in range(4))]
    }
    for i, (name, (largest, _)) in enumerate(SPECTRA.items()):
        for own in (name, f"ModelBlockParam_{i}"):
            rows = list(csv.reader((tmp_path / "job" / f"Train_Eigenvalues_{own}.csv").open()))
            assert [int(samples) for samples, _ in rows[1:]] == [16, 32]
            assert [float(value) for _, value in rows[1:]] == pytest.approx([largest] * 2, rel=1e-2)
    lines = [record.getMessage() for record in caplog.records]
    assert sum(line.startswith("step=2, eigenvalues: terms.0 ") and "terms.3" in line for line in lines) == 1
    assert sum(line.startswith("step=4, eigenvalues: ") for line in lines) == 1
    assert any(line.startswith("eigenvalue of terms.1, iteration 2: ") for line in lines)
    assert any(", times: " in line and ", eigenvalue " in line for line in lines)


def logged_lines(settings: dict) -> int:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append
    logging.getLogger("hybrid.training").addHandler(handler)
    eigenvalues(settings)
    logging.getLogger("hybrid.training").removeHandler(handler)
    return sum("eigenvalues:" in line.getMessage() for line in lines)


def test_rank_0_logs(pool2):
    assert pool2.run(logged_lines, config(log_level="info", **section())) == [1, 0]


def test_the_blocks_are_those_of_the_longest_list_or_the_named_one():
    assert list(eigenvalues(config(ranks=1, eigenvalue={"enabled": True}))) == [f"terms.{i}" for i in range(4)]
    assert list(eigenvalues(config(ranks=1, **section(layer_num=2)))) == ["terms.0", "terms.1"]
    assert eigenvalues(config(ranks=1, **section(layer_name="short"))) == {"short.0": 0.0}  # unused: the loss is flat there


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_name": "bert.encoder.layer"}, r"Quadratic: terms \(4\), short \(1\), pair \(2\); name one of them"),
        ({"layer_num": 5}, "layer_num=5; allowed: at most 4, the blocks of terms"),
        ({"layer_name": "pair"}, r"nothing in pair\.1 is trained"),
    ],
)
def test_blocks_that_are_not_there_are_answered_with_those_that_are(keys, message):
    with pytest.raises(ValueError, match=message) as caught:
        eigenvalues(config(ranks=1, **section(**keys)))
    assert "\n" not in str(caught.value)


def test_a_module_without_lists_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no nn\.ModuleList; lists of blocks there are: none"):
        open_engine(config(ranks=1, eigenvalue={"enabled": True}), nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["fp16", "bf16", "torch_autocast", "hybrid_engine"])
def test_less_than_fp32_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"eigenvalue with {name}"):
        resolve_training({"eigenvalue": {"enabled": True}, name: {"enabled": True}})
    resolve_training({"eigenvalue": {"enabled": False}, name: {"enabled": True}})


def test_a_module_in_less_than_fp32_is_refused():
    rule = {"match": "name:blocks.0.up", "dtype": "bf16"}
    with pytest.raises(ValueError, match=r"blocks\.0\.up computes in torch\.bfloat16"):
        open_engine(config(ranks=1, eigenvalue={"enabled": True}, module_precision=[rule]))
    with pytest.raises(ValueError, match=r"door computes in torch\.bfloat16"):
        open_engine(config(ranks=1, eigenvalue={"enabled": True}), make_net().bfloat16())


TECHNIQUES = {
    "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"g": {"params": {"start_bits": 8}}}},
    "layer_reduction": {"enabled": False},
}


def test_a_config_with_compression_alone_says_nothing_of_eigenvalues():
    assert not resolve_training({"compression_training": TECHNIQUES})[0].eigenvalue.enabled
    for asks in (
        TECHNIQUES | {"layer_reduction": {"enabled": True}},
        TECHNIQUES | {"weight_quantization": {"shared_parameters": {"enabled": True}, "different_groups": {}}},
        {"weight_quantization": {"different_groups": {"g": {"params": {"start_bits": 8}}}}},
    ):
        with pytest.raises(ValueError, match="compression_training: there is no compression") as caught:
            resolve_training({"compression_training": asks})
        assert "eigenvalue" not in str(caught.value)
    both, _ = resolve_training({"compression_training": TECHNIQUES, "eigenvalue": {"enabled": True, "max_iter": 7}})
    assert (both.eigenvalue.enabled, both.eigenvalue.max_iter) == (True, 7)


class OnceOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0] ** 2


class Forgetful(OnceOnly):
    """Its backward hides from autograd what it depends on."""

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient * ctx.saved_tensors[0].detach() ** 2


class Cubes(nn.Module):
    operation: type[torch.autograd.Function] = OnceOnly

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 3), nn.Linear(3, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.operation.apply(self.layers[0](x)))


class ForgetfulCubes(Cubes):
    operation = Forgetful


def test_a_loss_that_cannot_be_differentiated_twice_is_told():
    engine = open_engine(config(ranks=1, eigenvalue={"enabled": True}), make_net(kind=Cubes))
    x, y = micro_batches(1, 1)[0][0]
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice \(.*once_differentiable"):
        engine.backward(loss_of(engine(x), y))
    assert all(p.grad is None for p in engine.parameters())
    model = tiny_model("llama")
    ids = torch.randint(3, 79, (8, 6), generator=torch.Generator().manual_seed(0))
    engine = open_engine(config(ranks=1, eigenvalue={"enabled": True}), model)
    model.set_attn_implementation("sdpa")
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice \(derivative for .*; use .*eager"):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
    model.set_attn_implementation("eager")
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    assert all(value != 0 for value in engine.eigenvalues.values())
    assert list(engine.eigenvalues) == [f"model.layers.{i}" for i in range(len(model.model.layers))]


def test_functions_whose_second_derivative_is_trusted_are_named_once(caplog):
    engine = open_engine(config(ranks=1, eigenvalue={"enabled": True}), make_net(kind=ForgetfulCubes))
    train(engine, micro_batches(2, 1))
    told = [r.getMessage() for r in caplog.records if "can be differentiated" in r.getMessage()]
    assert told == ["eigenvalues are right only if the backward of Forgetful can be differentiated"]
    caplog.clear()
    train(open_engine(config(ranks=1, eigenvalue={"enabled": True}), bends()), micro_batches(1, 1))
    assert not caplog.records


def test_the_profiled_step_counts_its_own_operations():
    given = config(ranks=1, flops_profiler={"enabled": True, "profile_step": 2, "output_file": "/dev/null"})
    counts = []
    for keys in ({}, {"eigenvalue": {"enabled": True}}):
        engine = open_engine(given | keys)
        train(engine, micro_batches(3, 1))
        counts.append(engine.flops_profiler.get_total_flops())
    assert counts[0] == counts[1] > 0
