"""A training loop as it is written for DeepSpeed, on this project's engine: only the import is another.

    python -m recipes.deepspeed.train recipes/deepspeed/zero3_offload.json
    torchrun --nproc_per_node 2 -m recipes.deepspeed.train recipes/deepspeed/fp16.json --model models/smollm2 --steps 20

Prints what every key of the config does, the loss of each step, and the dtype and device of what is held. --mixed: the backbone
in bf16, the embedding in fp32, the head in fp16 (for mixed_dtypes.json).
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hybrid as deepspeed


def make_model(path: str | None) -> nn.Module:
    """A folder's model in fp32, or a small random one."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def mix_dtypes(model: nn.Module) -> None:
    """Backbone bf16, embedding fp32, head fp16. Buffers (rotary tables) stay as they are."""
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if "embed" in name else torch.float16 if "lm_head" in name else torch.bfloat16
        parameter.data = parameter.data.to(dtype)


class Counting(torch.utils.data.Dataset[Tensor]):
    """Sequences that count upwards from a random number: a model that reads the last id knows the next."""

    def __init__(self, num_samples: int = 4096, length: int = 16, vocab_size: int = 128) -> None:
        starts = torch.randint(0, vocab_size, (num_samples, 1), generator=torch.Generator().manual_seed(0))
        self.ids = (starts + torch.arange(length)) % vocab_size

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a DeepSpeed config")
    parser.add_argument("--model", help="a Hugging Face folder; without, a small random model")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--mixed", action="store_true", help="a model of three dtypes")
    args = parser.parse_args()

    deepspeed.init_distributed()
    model = make_model(args.model)
    if args.mixed:
        mix_dtypes(model)
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Counting(), config=args.config
    )
    assert loader is not None, "data were given"
    assert optimizer is not None, "the config has one"
    is_first = engine.global_rank == 0
    if is_first:
        print(engine.describe(), flush=True)
    while engine.global_steps < args.steps:
        for ids in loader:
            ids = ids.to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            before = engine.global_steps
            engine.step()
            if engine.global_steps > before and is_first:
                note = " (skipped)" if engine.overflow else ""
                print(f"step {engine.global_steps}: loss {loss.item():.4f}, loss scale {engine.loss_scale:g}{note}", flush=True)
            if engine.global_steps >= args.steps:
                break
    if is_first:
        held = {"masters": Counter(_kind(p) for p in engine.module.parameters())}
        held["optimizer state"] = Counter(_kind(v) for s in optimizer.state.values() for v in s.values() if v.ndim)
        for name, kinds in held.items():
            print(f"{name}: " + ", ".join(f"{number} x {kind}" for kind, number in kinds.items()))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device.type}"


if __name__ == "__main__":
    main()
