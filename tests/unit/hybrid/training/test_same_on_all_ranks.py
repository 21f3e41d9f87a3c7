"""Ranks that were given different things are told on all of them, before a collective mixes them up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiny import tiny_model
from training_cases import config, make_net

from hybrid import HybridEngine, initialize
from hybrid.config import HybridConfig
from hybrid.optim.loss_scale import StaticLossScale


class Counting(torch.nn.Linear):
    def __init__(self, size: int) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros(size))


def apart(what: str) -> str:
    rank = dist.get_rank()
    net, arguments, settings = make_net(), {}, config()
    if what == "dtype":
        net = net if rank else net.bfloat16()
    elif what == "buffer":
        net = Counting(4 + rank)
    elif what == "frozen":
        net.head.requires_grad_(rank == 0)
    elif what == "trained":
        arguments = {"model_parameters": [*net.parameters()][rank:]}
    elif what == "order":
        arguments = {"model_parameters": [*net.parameters()][:: 1 - 2 * rank]}
    elif what == "lr":
        arguments = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1 * (rank + 1))}
    elif what == "function":
        arguments = {"optimizer": lambda groups: (torch.optim.SGD, torch.optim.AdamW)[rank](groups, lr=0.1)}
    elif what == "group":
        settings["optimizer"]["params"]["weight_decay"] = 0.0
        arguments = {"model_parameters": [{"params": [*net.parameters()], "weight_decay": 0.1 * rank}]}
    elif what == "schedule":
        arguments = {"lr_scheduler": (lambda o: torch.optim.lr_scheduler.StepLR(o, 1)) if rank else None}
    elif what == "schedule's numbers":
        arguments = {"lr_scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1 + rank)}
    elif what == "loss scale":
        settings["fp16"] = {"enabled": True}
        arguments = {"loss_scaler": StaticLossScale(2.0 * (rank + 1))}
    elif what == "config":
        settings["gradient_clipping"] = float(rank)
    return refusal(lambda: initialize(model=net, config=settings, **arguments))


def refusal(call: Any) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("dtype", "parameters than rank 0: door.weight: [16, 8] torch.float32, trained, not door.weight: [16, 8] torch.bfloat16"),
        ("buffer", "buffers than rank 0: seen: [5]"),
        ("frozen", "parameters than rank 0: head.weight: [4, 16] torch.float32, frozen"),
        ("trained", "parameter groups than rank 0: door.bias"),
        ("order", "parameter groups than rank 0: head.bias"),
        ("lr", "optimizers than rank 0: group 0: lr=0.2, not group 0: lr=0.1"),
        ("function", "optimizers than rank 0: AdamW, not SGD"),
        ("group", "optimizers than rank 0: group 0: weight_decay=0.1"),
        ("schedule", "optimizers than rank 0: schedule StepLR, not no schedule"),
        ("schedule's numbers", "optimizers than rank 0: schedule: step_size=2, not schedule: step_size=1;"),
        ("loss scale", "optimizers than rank 0: loss scaler: scale=4.0, not loss scaler: scale=2.0;"),
        ("config", 'config than rank 0: "gradient_clipping": 1.0, not "gradient_clipping": 0.0;'),
    ],
)
def test_what_differs_is_named_on_every_rank(pool2, what, said):
    for message in pool2.run(apart, what):
        assert message.startswith("rank 1 was given other " + said), message


def layouts_apart() -> str:
    zero = {"mics_shard_size": 2} if dist.get_rank() == 3 else {}
    return refusal(lambda: initialize(model=make_net(), config=config(ranks=4, zero_optimization=zero)))


def test_layouts_are_compared_before_groups_are_made(pool4):
    for message in pool4.run(layouts_apart):
        assert message.startswith('rank 3 was given other config than rank 0: "mics_shard_size": 2, not'), message


def hf_apart() -> str:
    model = tiny_model("qwen2")
    if dist.get_rank():
        model.bfloat16()
    return refusal(lambda: HybridEngine.from_module(model, HybridConfig(device="cpu")))


def test_a_hybrid_engine_says_it_too(pool2):
    for message in pool2.run(hf_apart):
        assert message.startswith("rank 1 was given other parameters than rank 0: model.embed_tokens.weight"), message
