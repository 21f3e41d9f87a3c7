"""PPO on the hybrid engine alone, to read from top to bottom. `recipes/ppo/*.yaml` do the same with evaluation, checkpoints,
mini-batches, adaptive KL, reward models and everything else that a run needs.

    python -m recipes.minimal_ppo POLICY PROMPTS.jsonl OUT --steps 100
    torchrun --nproc_per_node 2 -m recipes.minimal_ppo POLICY PROMPTS.jsonl OUT

Four roles: the policy answers; a reward function scores each answer; the reference (the policy as it was) says how far the policy
has moved; the critic says what it expected. What came out better than expected is made likelier.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hybrid import HybridEngine
from hybrid.batch import Batch
from hybrid.config import HybridConfig, OptimizerConfig
from hybrid.models import ShardedModel
from inference_v2 import SamplingParams
from recipes.minimal_opsd import pack

BETA, LAMBDA, CLIP = 0.05, 0.95, 0.2  # weight of the KL in the reward, of GAE, and how far a ratio may go in one step


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, write a Hugging Face folder, and return the mean reward of each step."""
    args = arguments(argv)
    config = HybridConfig(compute_dtype=args.dtype, optimizer=OptimizerConfig(lr=args.lr))

    # Three models, sharded over the ranks: the critic is the same backbone with a head of one row.
    policy = HybridEngine.from_pretrained(args.policy, config)
    critic = HybridEngine.from_pretrained(args.policy, config, scalar=True)
    reference = ShardedModel.from_pretrained(args.policy, config, policy.mesh, trainable=False)
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [tuple(policy.tokenizer(row["prompt"])["input_ids"]) for row in rows]

    means = []
    for step in range(args.steps):
        # 1. Every rank draws the same prompts and answers its share of them with the weights that are being trained.
        drawn = random.Random(step).sample(range(len(prompts)), min(args.prompts_per_step, len(prompts)))
        mine = drawn[policy.rank :: policy.world_size]
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=1.0, num_samples=args.samples, seed=step)
        answers = policy.generate([prompts[i] for i in mine], sampling, keys=mine)
        completions = [completion for samples in answers for completion in samples]
        rewards = [reward(c.text or "", rows[i]["answer"]) for i, samples in zip(mine, answers, strict=True) for c in samples]

        # 2. At each answered token: the log-probs of policy and reference, and the value, read at the token before it.
        batch = pack(completions)
        old, ref, values = policy.score(batch), reference.token_logprobs(batch), critic.model.scores(batch)
        advantages, returns = experience(rewards, old - ref, values, batch)
        total, squares, count = policy.mesh.sum([advantages.sum().item(), advantages.square().sum().item(), len(advantages)])
        mean, deviation = total / count, max(squares / count - (total / count) ** 2, 1e-8) ** 0.5
        batch = replace(batch, old_logprobs=old, values=values, returns=returns, advantages=(advantages - mean) / deviation)

        # 3. Two looks at the same answers. The losses run inside the heads, chunk by chunk; the engine divides by the number of
        #    answered tokens over all ranks.
        for _ in range(2):
            policy.forward_backward([batch], policy_loss)
            policy.optim_step()
            critic.forward_backward([batch], value_loss)
            critic.optim_step()

        summed, number = policy.mesh.sum([sum(rewards), len(rewards)])
        means.append(summed / number)
        if policy.rank == 0:
            print(f"step {step + 1}/{args.steps}  reward {means[-1]:.3f}  tokens {count:.0f}", flush=True)

    policy.save_pretrained(args.out)
    policy.close()
    return means


def reward(text: str, answer: str) -> float:
    return float(text.strip() == answer)


def experience(rewards: Sequence[float], kl: Tensor, values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016) of each answer, from its last token to its first: advantages and
    returns [N]. An answer that the length limit cut counts as ended (the recipes go on with the value at its last token)."""
    advantages = torch.zeros_like(values)
    for number, score in enumerate(rewards):
        places = (batch.sequence_index == number).nonzero().squeeze(1).tolist()
        later = next_value = 0.0
        for place in reversed(places):
            gained = -BETA * float(kl[place]) + (score if place == places[-1] else 0.0)
            later = gained + next_value - float(values[place]) + LAMBDA * later
            advantages[place], next_value = later, float(values[place])
    return advantages, advantages + values


def policy_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate (Schulman et al. 2017, eq. 7), per token."""
    assert chunk.old_logprobs is not None
    assert chunk.advantages is not None
    logprobs = logits.log_softmax(-1).gather(1, chunk.targets[:, None]).squeeze(1)
    ratio = (logprobs - chunk.old_logprobs).exp()
    return torch.maximum(-chunk.advantages * ratio, -chunk.advantages * ratio.clamp(1 - CLIP, 1 + CLIP)), {}


def value_loss(scores: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error, per token; the critic's "logits" are its scores [C, 1]."""
    assert chunk.returns is not None
    return (scores.squeeze(1) - chunk.returns).square() / 2, {}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO, as short as it gets.")
    parser.add_argument("policy", help="a Hugging Face folder or hub name")
    parser.add_argument("prompts", type=Path, help='JSONL, each line {"prompt": text, "answer": text}')
    parser.add_argument("out", help="the folder for the trained policy")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
