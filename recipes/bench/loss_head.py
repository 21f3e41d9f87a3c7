"""`hybrid bench loss-head`: forward and backward of the chunked loss at full vocabulary, and the memory it takes."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hybrid.batch import Batch
from hybrid.loss_head import TokenLoss, chunked_loss, head_logits, pack_head, tokens_per_chunk
from inference_v2.head import Head
from inference_v2.kernels import get_kernels
from inference_v2.kernels.cpu import PackedLinear
from recipes.bench.machine import machine, versions
from recipes.bench.measure import peak_resident_bytes, reset_peak, resident_bytes, seconds_of, spread, threads
from trainers.config import DistillLoss
from trainers.losses import cross_entropy_token_loss, divergence_token_loss


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The report. `beyond_gradients_bytes` is what resident memory rose by at its highest, less the gradients of hidden states
    and head as they are held while they add up (the head's in fp32). As in a training step, the head is packed first where the
    kernels pack; a teacher's head stands packed before, as it does for all micro-batches of a step."""
    dtype = getattr(torch, args.dtype)
    kernels = get_kernels(args.kernels, "cpu", dtype)
    generator = torch.Generator().manual_seed(0)
    with threads(args.threads):
        hidden = torch.randn(args.tokens, args.hidden, generator=generator).to(dtype).requires_grad_()
        weight = (torch.randn(args.vocab, args.hidden, generator=generator) * args.hidden**-0.5).to(dtype).requires_grad_()
        batch, token_loss = _batch(args, hidden.detach()), _token_loss(args, weight.detach(), kernels)

        def head_of_step() -> Head:
            return pack_head(Head(weight), kernels)

        def forward_backward(rows: torch.Tensor = hidden, batch: Batch = batch) -> None:
            hidden.grad = weight.grad = None
            head = head_of_step()
            loss, _ = chunked_loss(rows, head, batch, token_loss, tokens_per_chunk(head, args.chunk_tokens))
            loss.backward()

        forward_backward(hidden.detach()[:1], batch.select(0, 1))  # what libraries take once is not the loss's
        hidden.grad = weight.grad = None
        before = resident_bytes()  # ahead of the timed runs, after which the allocator holds free memory of its own
        exact = reset_peak()
        forward_backward()
        rose = peak_resident_bytes() - before
        seconds = seconds_of(forward_backward, args.repeats)
        peak = peak_resident_bytes()
        gradients = hidden.nbytes + weight.numel() * 4
        chunk = min(args.tokens, tokens_per_chunk(Head(weight), args.chunk_tokens))
        floor = _floor(args, head_of_step(), hidden.detach(), chunk)
        return {
            "command": "loss-head",
            "tokens": args.tokens,
            "vocab": args.vocab,
            "hidden": args.hidden,
            "dtype": args.dtype,
            "loss": args.loss,
            "chunk_tokens": chunk,
            "kernels": kernels.name,
            "seconds": spread(seconds),
            "tokens_per_s": args.tokens / spread(seconds)["median"],
            "gemm_floor_s": floor,
            "over_floor": spread(seconds)["median"] / floor["median"],
            "memory_rise_bytes": rose,
            "gradient_bytes": gradients,
            "beyond_gradients_bytes": rose - gradients,
            "packed_head_bytes": weight.nbytes if isinstance(head_of_step().product, PackedLinear) else 0,
            "peak_was_reset": exact,
            "peak_memory_bytes": peak,
            "machine": machine(),
            "versions": versions(),
        }


def _batch(args: argparse.Namespace, teacher_hidden: torch.Tensor) -> Batch:
    """One sequence whose every token but the first is counted, and one more."""
    places = torch.arange(args.tokens)
    targets = torch.randint(args.vocab, (args.tokens,), generator=torch.Generator().manual_seed(1))
    return Batch(
        token_ids=targets,
        positions=places,
        cu_seqlens=torch.tensor([0, args.tokens]),
        loss_index=places,
        targets=targets,
        sequence_index=torch.zeros_like(places),
        teacher_hidden=teacher_hidden.roll(1, 0) if args.loss != "cross_entropy" else None,
    )


def _token_loss(args: argparse.Namespace, weight: torch.Tensor, kernels: Any) -> TokenLoss:
    if args.loss == "cross_entropy":
        return cross_entropy_token_loss(1.0, kernels)
    return divergence_token_loss(DistillLoss(divergence=args.loss), pack_head(Head(weight), kernels), 1.0, kernels)


@torch.no_grad()
def _floor(args: argparse.Namespace, head: Head, hidden: torch.Tensor, chunk: int) -> dict[str, Any]:
    """Seconds of the products alone: logits of student and teacher, and the two gradients in fp32, one chunk timed and taken
    as often as there are chunks."""
    rows = hidden[:chunk]
    weight, wide, grad = head.weight.detach().float(), rows.float(), torch.randn(chunk, args.vocab)
    of_weight, of_rows = torch.zeros_like(weight), torch.zeros_like(wide)
    models = 1 if args.loss == "cross_entropy" else 2

    def products() -> None:
        for _ in range(models):
            head_logits(head, rows)
        of_rows.addmm_(grad, weight)
        of_weight.addmm_(grad.T, wide)

    return spread([s * args.tokens / chunk for s in seconds_of(products, 3)])
