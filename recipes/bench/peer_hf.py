"""Peer: transformers. Work `rollout`: `generate` on a left-padded batch of prompts x samples. Work `score`: forward passes over
right-padded batches, log-probs of the responses in fp32."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from recipes.bench.peer_job import read_job, timed, write_result

SCORE_ROWS = 16  # sequences of one forward pass


def main() -> None:
    job = read_job()
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # every response has its full length, without a processor that sees to it
    works = {"rollout": rollout, "score": score}
    with torch.inference_mode():
        works[job["work"]](model, job)


def rollout(model: Any, job: dict[str, Any]) -> None:
    ids, mask = padded([prompt for prompt in job["prompts"] for _ in range(job["samples"])], left=True)

    def generate(count: int, rows: slice = slice(None)) -> int:
        made = model.generate(
            input_ids=ids[rows],
            attention_mask=mask[rows],
            max_new_tokens=count,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
        return made[:, ids.shape[1] :].numel()

    generate(1, slice(1))
    first_token_at = time.time()
    runs = timed(lambda: generate(job["new_tokens"]), job["repeats"])
    write_result(("torch", "transformers"), **runs, first_token_at=first_token_at)


def score(model: Any, job: dict[str, Any]) -> None:
    starts, sequences = job["starts"], job["sequences"]
    total = 0.0

    def logprobs(count: int = len(sequences)) -> int:
        nonlocal total
        total, tokens = 0.0, 0
        for first in range(0, count, SCORE_ROWS):
            part, begin = sequences[first : first + SCORE_ROWS], starts[first : first + SCORE_ROWS]
            ids, mask = padded(part, left=False)
            keep = ids.shape[1] - min(begin) + 1  # logits of prompts alone are not made
            logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep, use_cache=False).logits
            for row, sequence, start in zip(logits, part, begin):
                at = slice(start - min(begin), len(sequence) - min(begin))
                targets = torch.tensor(sequence[start:])
                total += row[at].float().log_softmax(-1)[torch.arange(len(targets)), targets].sum().item()
                tokens += len(targets)
        return tokens

    logprobs(1)
    first_token_at = time.time()
    runs = timed(logprobs, job["repeats"])
    mean = total / runs["tokens"]
    write_result(("torch", "transformers"), **runs, first_token_at=first_token_at, mean_logprob=mean)


def padded(sequences: list[list[int]], *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask, each [B, L]."""
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (sequence, number) in enumerate(zip(sequences, map(len, sequences))):
        place = slice(longest - number, longest) if left else slice(number)
        ids[row, place] = torch.tensor(sequence)
        mask[row, place] = 1
    return ids, mask


if __name__ == "__main__":
    main()
