"""On-policy distillation on the hybrid engine alone, to read from top to bottom. `recipes/opsd/*.yaml` do the same with
evaluation, checkpoints, micro-batches and the other divergences.

    python -m recipes.minimal_opsd STUDENT TEACHER PROMPTS.jsonl OUT --steps 100
    torchrun --nproc_per_node 2 -m recipes.minimal_opsd STUDENT TEACHER PROMPTS.jsonl OUT

The student answers a few prompts; the teacher reads each answer and says, at every token of it, what it would have said there;
the student's distribution is pulled towards that. Its own mistakes are what it learns from: no answer is ever given to it.
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
from hybrid.loss_head import TokenLoss
from hybrid.models import ShardedModel
from inference_v2 import Completion, SamplingParams
from inference_v2.head import Head


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, write a Hugging Face folder, and return the loss of each step."""
    args = arguments(argv)
    config = HybridConfig(compute_dtype=args.dtype, optimizer=OptimizerConfig(lr=args.lr))

    # Both models are sharded over the ranks. The student can train and generate; the teacher is only ever read.
    student = HybridEngine.from_pretrained(args.student, config)
    teacher = ShardedModel.from_pretrained(args.teacher, config, student.mesh, trainable=False)
    rows = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    prompts = [tuple(student.tokenizer(row["prompt"])["input_ids"]) for row in rows]

    losses = []
    for step in range(args.steps):
        # 1. Every rank draws the same prompts and answers its share of them with the weights that are being trained.
        drawn = random.Random(step).sample(range(len(prompts)), min(args.prompts_per_step, len(prompts)))
        mine = drawn[student.rank :: student.world_size]
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=1.0, seed=step)
        answers = student.generate([prompts[i] for i in mine], sampling, keys=mine)

        # 2. The teacher reads the answers. Its hidden states are kept, not its logits: those are V / H times larger.
        batch = pack([completion for samples in answers for completion in samples])
        batch = replace(batch, teacher_hidden=teacher.hidden_states(batch))

        # 3. The loss runs inside the student's head, chunk by chunk, so that no [tokens, vocabulary] tensor exists. The engine
        #    divides by the number of answered tokens over all ranks.
        with teacher.head() as head:
            metrics = student.forward_backward([batch], forward_kl(head))
        metrics |= student.optim_step()

        losses.append(metrics["loss"])
        if student.rank == 0:
            print(f"step {step + 1}/{args.steps}  loss {metrics['loss']:.4f}  tokens {metrics['tokens']:.0f}", flush=True)

    student.save_pretrained(args.out)
    student.close()
    return losses


def forward_kl(teacher_head: Head) -> TokenLoss:
    """KL(teacher || student) at each answered token, all logits in fp32."""

    def token_loss(logits: Tensor, chunk: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        assert chunk.teacher_hidden is not None
        with torch.no_grad():
            log_t = teacher_head.logits(chunk.teacher_hidden).log_softmax(-1)  # [C, V]
        log_s = logits.log_softmax(-1)  # [C, V]
        return (log_t.exp() * (log_t - log_s)).sum(-1), {}

    return token_loss


def pack(completions: Sequence[Completion]) -> Batch:
    """All prompts with their answers in one row of tokens. Counted are the answers' tokens, the end of sequence included; the
    logits that predict token t come from token t - 1. Ids are those that were sampled: nothing is decoded and encoded again."""
    token_ids: list[int] = []
    positions: list[int] = []
    cu_seqlens: list[int] = [0]
    loss_index: list[int] = []
    sequence_index: list[int] = []
    for number, completion in enumerate(completions):
        ids = completion.prompt_ids + completion.token_ids
        first = len(token_ids) + len(completion.prompt_ids)
        loss_index += range(first - 1, len(token_ids) + len(ids) - 1)
        sequence_index += [number] * len(completion.token_ids)
        token_ids += ids
        positions += range(len(ids))
        cu_seqlens.append(len(token_ids))
    tokens, index = torch.tensor(token_ids, dtype=torch.long), torch.tensor(loss_index, dtype=torch.long)
    return Batch(
        token_ids=tokens,
        positions=torch.tensor(positions, dtype=torch.long),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.long),
        loss_index=index,
        targets=tokens[index + 1],
        sequence_index=torch.tensor(sequence_index, dtype=torch.long),
    )


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="On-policy distillation, as short as it gets.")
    parser.add_argument("student", help="a Hugging Face folder or hub name")
    parser.add_argument("teacher", help="another one, with the same tokenizer")
    parser.add_argument("prompts", type=Path, help='JSONL, each line {"prompt": text}')
    parser.add_argument("out", help="the folder for the trained student")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
