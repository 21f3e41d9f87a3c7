"""The dtype of gathered weights, gradients and state, decided for each parameter by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from training_cases import config, loss_of, micro_batches, open_engine, share, whole

from hybrid.sharding import gathered

CPU = {"device": "cpu"}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}}
OFFLOADS = [{}, {"offload_optimizer": CPU}, {"offload_optimizer": CPU, "offload_param": CPU}]


class ThreeDtypes(nn.Module):
    """An fp32 embedding, a bf16 backbone, an fp16 head, in an order of choice."""

    def __init__(self, order: str = "ebh") -> None:
        super().__init__()
        parts = {
            "e": ("embed", nn.Linear(8, 16)),
            "b": ("backbone", nn.ModuleList([nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(2)])),
            "h": ("head", nn.Linear(16, 4, dtype=torch.float16)),
        }
        for key in order:
            self.add_module(*parts[key])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.backbone:
            x = torch.relu(layer(x))
        return self.head(x)


def three(order: str = "ebh") -> ThreeDtypes:
    torch.manual_seed(0)
    made = {name: p.detach().clone() for name, p in ThreeDtypes().named_parameters()}
    module = ThreeDtypes(order)
    for name, p in module.named_parameters():
        p.data.copy_(made[name])
    return module


def seen_in_forward(settings: dict, order: str) -> dict:
    """What each layer's weight is while it runs."""
    module = three(order)
    original = {name: p.detach().clone() for name, p in module.named_parameters()}
    engine = open_engine(settings, module)
    seen: dict[str, Tensor] = {}
    for name, child in engine.module.named_modules():
        if isinstance(child, nn.Linear):
            child.register_forward_pre_hook(lambda m, a, name=name: seen.update({f"{name}.weight": m.weight.detach().clone()}))
    out = engine(share(engine, micro_batches(1, 1)[0][0][0]))
    engine.backward(loss_of(out, torch.zeros(4, 4)))
    return {
        "equal": {name: torch.equal(w, original[name]) for name, w in seen.items()},
        "dtypes": {name: str(w.dtype) for name, w in seen.items()},
        "masters": {str(p.dtype) for p in engine.module.parameters()},
        "gradients": {str(p.grad.dtype) for p in engine.module.parameters()},
        "out": str(out.dtype),
        "left": gathered(engine.module),
    }


@pytest.mark.parametrize("order", ["ebh", "hbe", "bhe"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_weight_is_gathered_in_its_own_dtype(pool2, stage, order):
    for result in pool2.run(seen_in_forward, config(stage=stage, optimizer=ADAMW), order):
        assert all(result["equal"].values())
        assert result["dtypes"] == {
            "embed.weight": "torch.float32",
            "backbone.0.weight": "torch.bfloat16",
            "backbone.1.weight": "torch.bfloat16",
            "head.weight": "torch.float16",
        }
        assert result["masters"] == result["gradients"] == {"torch.float32"}
        assert result["out"] == "torch.float16"


def adamw_run(settings: dict, steps: int) -> dict:
    engine = open_engine(settings, three())
    fed: list[dict[str, Tensor]] = []
    named = {n: p if engine._update.mirror is None else engine._update.mirror.of(p) for n, p in engine.module.named_parameters()}

    def record(optimizer, args, kwargs) -> None:
        fed.append({name: whole(p.grad) for name, p in named.items()})

    start = whole(engine.module.embed.weight)
    engine.optimizer.register_step_pre_hook(record)
    for ((x, y),) in micro_batches(steps, 1):
        engine.backward(loss_of(engine(share(engine, x)), share(engine, y)))
        engine.step()
    plain = nn.Parameter(start)
    reference = torch.optim.AdamW([plain], lr=1e-3, eps=1e-6, weight_decay=0.1, fused=True)
    for gradients in fed:
        plain.grad = gradients["embed.weight"]
        reference.step()
    state = {n: engine.optimizer.state[p] for n, p in named.items()}
    return {
        "bit equal": torch.equal(whole(engine.module.embed.weight), plain),
        "states": {n: {str(v.dtype) for v in s.values() if v.ndim} for n, s in state.items()},
        "devices": {v.device.type for s in state.values() for v in s.values()},
        "masters": {n: str(p.dtype) for n, p in engine.module.named_parameters()},
        "weights": {n: whole(p).float() for n, p in engine.module.named_parameters()},
    }


def plain_adamw(steps: int) -> dict[str, Tensor]:
    """The same module in one process: fp32 masters, each layer in its own dtype."""
    module, masters = three(), {}
    for name, p in module.named_parameters():
        masters[name] = nn.Parameter(p.detach().float())
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3, eps=1e-6, weight_decay=0.1)
    for child in module.modules():
        if isinstance(child, nn.Linear):
            child.register_forward_pre_hook(lambda m, args: tuple(a.to(m.weight.dtype) for a in args))
    for ((x, y),) in micro_batches(steps, 1):
        loss_of(module(x), y).backward()
        for name, p in module.named_parameters():
            masters[name].grad, p.grad = p.grad.float(), None
        optimizer.step()
        for name, p in module.named_parameters():
            p.data.copy_(masters[name])
    return {name: p.detach() for name, p in masters.items()}


@pytest.mark.parametrize("policy", ["fp32", "param"])
@pytest.mark.parametrize("offload", OFFLOADS, ids=str)
def test_state_has_the_dtype_that_the_policy_gives_its_parameter(pool2, offload, policy):
    settings = config(optimizer=ADAMW, zero_optimization=offload, data_types={"optimizer_dtype": policy})
    low = "torch.bfloat16" if policy == "param" else "torch.float32"
    expected = plain_adamw(4)
    for result in pool2.run(adamw_run, settings, 4):
        for name, dtype in result["masters"].items():
            assert dtype == (low if name.startswith("backbone") else "torch.float32")
            assert result["states"][name] == {dtype}
        assert result["devices"] == {"cpu"}
        assert result["bit equal"]
        if policy == "fp32":
            moved = max((result["weights"][n] - expected[n]).abs().max().item() for n in expected)
            assert moved < 1e-2 * max(w.abs().max().item() for w in expected.values())


def test_one_dtype_for_all_would_differ(pool2):
    """What the policy is for: the fp32 embedding does not survive bf16 masters."""
    low = config(optimizer=ADAMW, bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True})
    (each, _), (all_low, _) = pool2.run(adamw_run, config(optimizer=ADAMW), 4), pool2.run(adamw_run, low, 4)
    assert set(all_low["masters"].values()) == {"torch.bfloat16"}
    assert not torch.equal(each["weights"]["embed.weight"], all_low["weights"]["embed.weight"])
