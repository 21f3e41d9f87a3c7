"""Groups, ZeRO stages, and what each rank holds."""

from __future__ import annotations

import pytest
import torch
from hybrid_cases import bytes_of, collectives, cross_entropy, make_engine, pack, ragged_sequences
from tiny import save_tiny
from torch import nn
from torch.distributed.tensor import DTensor

from hybrid import sharding
from hybrid.config import HybridConfig
from hybrid.mesh import open_mesh

LAYERS, ROUNDS = 2, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama", num_hidden_layers=LAYERS, vocab_size=97)  # odd: padding on any number of ranks
    return str(path)


def _micro_batches(rank: int) -> list:
    return [pack(ragged_sequences(2, seed=10 * rank + i)) for i in range(ROUNDS)]


def train_and_count(folder: str, stage: int) -> dict:
    engine = make_engine(folder, zero_stage=stage, optimizer={"name": "adamw", "lr": 1e-3})
    module = engine.model.module
    with collectives() as counts:
        engine.forward_backward(_micro_batches(engine.rank), cross_entropy)
    between = sharding.gathered(module)
    parameters = list(engine.model.parameters().values())
    gradients = [p.grad for p in parameters]
    engine.optim_step()
    state = [v for values in engine.optimizer.state.values() for v in values.values()]
    return {
        "counts": dict(counts),
        "gathered before step": len(between),
        "gathered after step": len(sharding.gathered(module)),
        "parameters": bytes_of(parameters),
        "gradients": bytes_of(gradients),
        "optimizer": bytes_of(state),
        "numel": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "row bytes": sum(4 * p[:1].numel() for p in parameters),
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_what_it_holds_and_what_it_sends(request, folder, ranks, stage):
    groups = LAYERS + 2  # the layers, the head, the rest
    sends = {
        0: {"all_gather": 0, "reduce_scatter": 0},
        1: {"all_gather": groups, "reduce_scatter": groups},
        2: {"all_gather": groups, "reduce_scatter": groups * ROUNDS},
        3: {"all_gather": (2 * LAYERS + 2) * ROUNDS, "reduce_scatter": groups * ROUNDS},
    }[stage]
    for held in request.getfixturevalue(f"pool{ranks}").run(train_and_count, folder, stage):
        counts = held["counts"]
        assert {kind: counts.get(kind, 0) for kind in sends} == sends
        agreements = 2  # the token counts before, the metrics after
        assert counts["all_reduce"] == agreements + (groups if stage == 0 else 0)
        assert (held["gathered before step"] > 0) == (stage in (1, 2))
        assert held["gathered after step"] == 0
        parts = 1 if stage == 0 else ranks
        padding = held["row bytes"]  # at most a row a tensor
        for kind, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
            bound = copies * (4 * held["numel"] / parts + padding) + 8 * held["tensors"]  # and Adam's step counts
            assert 0.9 * copies * 4 * held["numel"] / parts <= held[kind] <= bound, kind


class Mixed(nn.Module):
    """Two dtypes in one layer: fp32 weights, bf16 adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down = nn.Linear(8, 2, bias=False, dtype=torch.bfloat16)
        self.up = nn.Linear(2, 8, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def train_two_dtypes() -> dict:
    config = HybridConfig()
    mesh = open_mesh(config)
    torch.manual_seed(0)
    module = nn.Sequential(Mixed(), Mixed())
    plain = nn.Sequential(Mixed(), Mixed())
    plain.load_state_dict(module.state_dict())
    sharding.shard(module, layers=list(module), mesh=mesh, layout=sharding.Layout.of(config))
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    x = torch.randn(6, 8)
    with collectives() as counts:
        module(x[3 * mesh.rank : 3 * mesh.rank + 3]).sum().backward()
    plain.float()(x).sum().backward()
    errors = [
        (p.grad.full_tensor().float() - q.grad).abs().max().item()
        for p, q in zip(module.parameters(), plain.parameters(), strict=True)
    ]
    kept = all(p.grad.dtype == dtypes[name] for name, p in module.named_parameters())
    return {"reduce_scatter": counts["reduce_scatter"], "error": max(errors), "dtype kept": kept}


def test_two_dtypes_in_a_layer_are_one_group_each(pool2):
    for result in pool2.run(train_two_dtypes):
        assert result["reduce_scatter"] == 4  # two layers, two dtypes; the root has no parameters of its own
        assert result["dtype kept"]
        assert result["error"] < 0.1  # the adapters' gradients are bf16


def test_a_module_of_two_dtypes_is_refused():
    module = nn.Linear(4, 4)
    module.bias = nn.Parameter(module.bias.detach().bfloat16())
    config = HybridConfig()
    with pytest.raises(ValueError, match="one dtype per module"):
        sharding.shard(module, layers=[], mesh=open_mesh(config), layout=sharding.Layout.of(config))


def rows_by_rank(rows: int) -> tuple:
    mesh = open_mesh(HybridConfig())
    module = nn.Linear(3, rows, bias=False)
    sharding.shard(module, layers=[], mesh=mesh, layout=sharding.Layout.of(HybridConfig()))
    assert isinstance(module.weight, DTensor)
    cut = sharding.local_rows(rows, mesh.world_size, mesh.rank)
    return cut.stop - cut.start, sharding.local(module.weight).shape[0]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_rows_of_a_shard_are_those_that_fsdp_gives(pool4, rows):
    expected, given = zip(*pool4.run(rows_by_rank, rows))
    assert expected == given
    assert sum(expected) == rows
