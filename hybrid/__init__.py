"""One ZeRO-3 model with two modes, training and fused generation; no algorithm lives here.

Rooms:
    config      HybridConfig and its parts (no torch)
    mesh        process group and device mesh
    models      a HF module on meta, streamed from safetensors into shards
    policy      the module that is trained: decoder, and a head that runs the loss
    sharding    fully_shard by layer and dtype; ZeRO stages; the shards as a weight source
    lora        adapters: W + s B A on a frozen base
    batch       packed micro-batches and their padded view
    loss_head   the chunked loss: [B, T, V] never exists
    optim/      optimizers, schedules, loss scales, clipping, their state
    training/   training as DeepSpeed's users know it
    modes       the swap between training and generation, with its ledger (memory: bytes free and used)
    runner      what `generating()` yields; ranks in lock step
    module_copy rollouts of model types outside the registry
    engine      HybridEngine: generate, score, forward_backward, optim_step, save / load, save_pretrained
    checkpoint  sharded checkpoints without pickles (rng: the generators in them)
    export      HF folders, tensor by tensor (safetensors_stream: the file format)
    folders     folders that are there whole or not at all, agreed on by all ranks
    monitor     progress line, loggers, phase times (records: metrics.jsonl and completions.jsonl)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid.engine import HybridEngine, initialize

__all__ = ["HybridEngine", "initialize"]


def __getattr__(name: str) -> object:
    if name in __all__:  # heavy (torch, transformers): imported on first use
        from hybrid import engine

        return getattr(engine, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
