"""Modules that pass on what they do not know to a module they wrap: sharded, gathered and freed as any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from training_cases import (
    Block,
    Net,
    config,
    loss_of,
    make_net,
    micro_batches,
    open_engine,
    plain_sgd,
    share,
    train,
    weights_of,
    worst,
)
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid import TrainingEngine, sharding
from hybrid.mesh import open_mesh
from hybrid.sharding import gathered
from hybrid.training.config.top import TrainingConfig


class Delegate(nn.Module):
    """Has a parameter of its own; every other attribute is the wrapped module's."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.wrapped = wrapped

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.gain * self.wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)


class Wrapped(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Delegate(Block()), Delegate(Delegate(Block()))])
        self.head = Delegate(self.head)


def trained(settings: dict[str, Any]) -> dict[str, Any]:
    engine = open_engine(settings, make_net(kind=Wrapped))
    left = []
    for step in micro_batches(2, 1):
        train(engine, [step])
        left += gathered(engine.module)
    return {
        "weights": weights_of(engine),
        "left": left,
        "units": [name for name, m in engine.module.named_modules() if isinstance(m, FSDPModule)],
        "norm": engine.module.blocks[0].norm.normalized_shape,  # through the wrapper
    }


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_delegating_wrapper_trains_as_in_one_process(pool2, stage, layers):
    expected = plain_sgd(micro_batches(2, 1), module=make_net(kind=Wrapped))
    for result in pool2.run(trained, config(stage=stage, activation_checkpointing={"layers": layers})):
        assert worst(result["weights"], expected) < 1e-5
        assert result["left"] == []
        assert result["units"] == ["", "blocks.0", "blocks.1"]
        assert result["norm"] == (16,)


def apart() -> dict[str, Any]:
    """Wrapper and wrapped as two units, one inside the other."""
    net = make_net(kind=Wrapped)
    mesh = open_mesh(TrainingConfig())
    pairs = [(d, d.wrapped) for d in net.blocks]
    layout = sharding.Layout(stage=3, gather_dtype=lambda module: torch.float32)
    sharding.shard(net, layers=[unit for pair in pairs for unit in reversed(pair)], mesh=mesh, layout=layout)
    states = [(outer._get_fsdp_state(), inner._get_fsdp_state()) for outer, inner in pairs]
    (x, y), inside = micro_batches(1, 1)[0][0], []
    pairs[0][1].register_forward_hook(lambda *_: inside.append(sorted(gathered(net.blocks[0]))))
    loss_of(net(x.chunk(2)[mesh.rank]), y.chunk(2)[mesh.rank]).backward()
    return {
        "distinct": all(a is not b and a._fsdp_param_groups[0] is not b._fsdp_param_groups[0] for a, b in states),
        "held": [len(group.fsdp_params) for pair in states for state in pair for group in state._fsdp_param_groups],
        "idle": all(g._training_state.name == s._training_state.name == "IDLE" for pair in states for s in pair
                    for g in s._fsdp_param_groups),
        "inside": inside,
        "left": gathered(net),
        "gradients": {name: p.grad.full_tensor() / 2 for name, p in net.named_parameters()},
    }  # fmt: skip


def test_hooks_of_wrapper_and_wrapped_are_apart(pool2):
    net = make_net(kind=Wrapped)
    x, y = micro_batches(1, 1)[0][0]
    loss_of(net(x), y).backward()
    for result in pool2.run(apart):
        assert result["distinct"]
        assert result["idle"]
        assert result["held"] == [1, 4, 1, 5]  # a gain each, and what is wrapped
        assert result["inside"] == [["gain"]]  # after the wrapped ran, only the wrapper's is whole
        assert result["left"] == []
        assert worst(result["gradients"], {name: p.grad for name, p in net.named_parameters()}) < 1e-5


def adapted() -> nn.Module:
    """A small Llama with adapters, whose head and last norm peft wraps in ModulesToSaveWrapper."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=2, max_position_embeddings=32)
    )  # fmt: skip
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False,
                      modules_to_save=["lm_head", "post_attention_layernorm"])  # fmt: skip
    return get_peft_model(llama, lora)


IDS = torch.randint(0, 16, (2, 4, 6), generator=torch.Generator().manual_seed(1))  # two steps of four sequences


def cross_entropy(module: nn.Module, ids: Tensor) -> Tensor:
    logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def peft_trained(stage: int, layers: bool) -> dict[str, Any]:
    engine: TrainingEngine = open_engine(config(stage=stage, ranks=4, activation_checkpointing={"layers": layers}), adapted())
    left = []
    for ids in IDS:
        engine.backward(cross_entropy(engine, share(engine, ids)))
        engine.step()
        left += gathered(engine.module)
    return {"weights": weights_of(engine), "left": left}


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_pefts_modules_to_save_train_as_in_one_process(pool2, stage, layers):
    module = adapted()
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert any("modules_to_save" in name and "layernorm" in name for name in trainable)
    optimizer = torch.optim.SGD(trainable.values(), lr=0.1)
    for ids in IDS:
        optimizer.zero_grad()
        cross_entropy(module, ids).backward()
        optimizer.step()
    for result in pool2.run(peft_trained, stage, layers):
        assert worst(result["weights"], {name: p.detach() for name, p in module.named_parameters()}) < 1e-5
        assert result["left"] == []
