"""Fine-tuning a Hugging Face causal LM: a torch optimizer with two groups, a torch scheduler, accumulation, a saved model."""

import json
import sys

import deepspeed
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, LlamaConfig

ds_config = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 1.0,
    "steps_per_print": 1000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def batches(rank, world_size, count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        starts = torch.randint(0, 64, (4 * world_size, 1), generator=g)
        ids = (starts + torch.arange(12)) % 64
        yield ids[4 * rank : 4 * rank + 4]


def main(out):
    deepspeed.init_distributed(dist_backend="gloo")
    rank, world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=ds_config):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        )
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    lr_scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    engine, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=lr_scheduler, config=ds_config
    )
    engine.train()
    losses, boundaries = [], 0
    for ids in batches(rank, world_size, 40):
        outputs = engine(input_ids=ids, labels=ids)
        engine.backward(outputs.loss)
        boundaries += engine.is_gradient_accumulation_boundary()
        engine.step()
        losses.append(outputs.loss.item())
    with deepspeed.zero.GatheredParameters(engine.module.model.norm.weight, modifier_rank=0):
        shape = list(engine.module.model.norm.weight.shape)
        if rank == 0:
            engine.module.model.norm.weight.data.fill_(1.0)
    engine.eval()
    with torch.no_grad():
        held_out = engine(input_ids=ids, labels=ids).loss.item()
    saved = engine.save_16bit_model(out)
    deepspeed.comm.barrier()
    if rank == 0:
        print(json.dumps({
            "first": losses[0], "last": losses[-1], "held_out": held_out, "shape": shape, "saved": saved,
            "boundaries": boundaries, "steps": engine.global_steps, "lr": lr_scheduler.get_last_lr(),
            "accumulation": engine.gradient_accumulation_steps(), "norm": engine.get_global_grad_norm() > 0,
        }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
