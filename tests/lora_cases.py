"""What the tests of adapters share: a base model, an adapter that peft made, and what plain peft computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import peft
import torch
from hybrid_cases import full_weights, ragged_sequences
from safetensors.torch import save_file
from tiny import save_tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hybrid import HybridEngine

SEQUENCES = ragged_sequences(8)
TOKENS = sum(len(s) - 1 for s in SEQUENCES)


def save_base_and_adapter(path: Path, family: str, *, targets: str | list[str] = "all-linear", **overrides: object) -> None:
    """`path/base`; `path/adapter`, peft's folder with random A and B; `path/reference.safetensors`, the gradients and the loss of
    plain autograd on peft's module over all SEQUENCES at once, by our names."""
    hf = save_tiny(path / "base", family, **overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(hf, settings).eval()
    model.save_pretrained(path / "adapter")
    loss = summed_loss(model) / TOKENS
    loss.backward()
    gradients = {our_name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    save_file(gradients | {"loss": loss.detach()}, path / "reference.safetensors")


def our_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default.", ".")


def summed_loss(model: nn.Module, sequences: Sequence[Sequence[int]] = SEQUENCES) -> Tensor:
    """Cross-entropy, sequence by sequence: no padding to get wrong. The character tokenizer knows 79 ids."""
    total = torch.zeros(())
    for sequence in sequences:
        ids = torch.tensor([sequence])
        logits = model(input_ids=ids).logits[0, :-1, :79]
        total = total + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
    return total


@torch.no_grad()
def token_logprobs(model: nn.Module, sequences: Sequence[Sequence[int]]) -> Tensor:
    parts = []
    for sequence in sequences:
        ids = torch.tensor([sequence])
        logits = model(input_ids=ids).logits[0, :-1, :79].float()
        parts.append(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1))
    return torch.cat(parts)


def base_weights(engine: HybridEngine) -> dict[str, Tensor]:
    """Everything but the adapter, whole. Collective."""
    return {name: tensor for name, tensor in full_weights(engine).items() if name not in engine.model.adapter.tensors}


def with_peft(base: str, adapter: str) -> nn.Module:
    """peft's own reading of both folders, in fp32."""
    return peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
