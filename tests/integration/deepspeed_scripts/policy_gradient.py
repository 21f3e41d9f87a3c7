"""RLHF as DeepSpeed-Chat writes it: an actor with the hybrid engine, a frozen reference with a config of its own."""

import copy
import json

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROMPTS = torch.tensor([[0, 3, 4], [5, 6, 7], [0, 0, 8], [9, 10, 11]])
MASK = (PROMPTS != 0).long()
GOOD = 13  # the reward is how often it is said


def get_train_ds_config(stage=3, max_out_tokens=32):
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 1000,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_param": {"device": "none"},
            "offload_optimizer": {"device": "none"},
            "memory_efficient_linear": False,
            "stage3_param_persistence_threshold": 1e4,
            "stage3_max_live_parameters": 3e7,
            "stage3_prefetch_bucket_size": 3e7,
        },
        "optimizer": {"type": "Adam", "params": {"lr": 2e-2, "betas": [0.9, 0.95]}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 2e-2, "warmup_num_steps": 2, "warmup_type": "linear"}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
        "hybrid_engine": {
            "enabled": True,
            "max_out_tokens": max_out_tokens,
            "inference_tp_size": 1,
            "release_inference_cache": False,
            "pin_parameters": True,
            "tp_gather_partition_size": 8,
        },
    }


def get_eval_ds_config():
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "steps_per_print": 1000,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1e4},
        "bf16": {"enabled": True},
    }


def gather_log_probs(logits, labels):
    return torch.log_softmax(logits.float(), -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def main():
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    reference = copy.deepcopy(model)
    actor, *_ = deepspeed.initialize(model=model, config=get_train_ds_config())
    ref, *_ = deepspeed.initialize(model=reference, config=get_eval_ds_config())
    ref.eval()
    rewards, kls = [], []
    for step in range(12):
        actor.eval()
        with torch.no_grad():
            seq = actor.module.generate(
                PROMPTS.repeat(2, 1), attention_mask=MASK.repeat(2, 1), max_length=11, do_sample=True, pad_token_id=0,
                eos_token_id=15, synced_gpus=True, seed=step,
            )  # fmt: skip
            mask = torch.cat([MASK.repeat(2, 1), (seq[:, 3:] != 0).long()], 1)
            ref_log_probs = gather_log_probs(ref(seq, attention_mask=mask).logits[:, :-1], seq[:, 1:])
        actor.train()
        log_probs = gather_log_probs(actor(seq, attention_mask=mask, use_cache=False).logits[:, :-1], seq[:, 1:])
        answer = mask[:, 1:].clone()
        answer[:, :2] = 0
        reward = ((seq[:, 3:] == GOOD).sum(1) / 8).float()
        kl = ((log_probs - ref_log_probs) * answer).sum(1)
        advantage = reward - reward.mean()
        loss = -((advantage[:, None] * log_probs) * answer).sum() / answer.sum()
        actor.backward(loss)
        actor.step()
        rewards.append(reward.mean().item())
        kls.append(kl.mean().item())
    if torch.distributed.get_rank() == 0:
        print(json.dumps({
            "first": sum(rewards[:3]) / 3, "last": sum(rewards[-3:]) / 3, "kl_first": abs(kls[0]), "kl_last": kls[-1],
            "steps": actor.global_steps, "ref_dtype": str(next(ref.module.parameters()).dtype),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
