"""One ZeRO-3 model with two modes, training and fused generation; no algorithm lives here.

Rooms:
    config      HybridConfig and its parts (no torch)
    mesh        process group and device mesh
    models      a HF module on meta, streamed from safetensors into shards
    policy      the module that is trained: decoder, and a head that runs the loss
    sharding    fully_shard by layer and dtype; ZeRO stages; the shards as a weight source
    in_flight   what its forwards and backwards have in flight: gathered weights, gradients that wait
    lora        adapters: W + s B A on a frozen base
    batch       packed micro-batches and their padded view
    loss_head   the chunked loss: [B, T, V] never exists
    optim/      optimizers, schedules, loss scales, clipping, their state
    profiling/  operations by module, throughput, collectives
    modes       the swap between training and generation, with its ledger (memory: bytes free and used)
    runner      what `generating()` yields; ranks in lock step
    module_copy rollouts of model types outside the registry
    engine      HybridEngine: generate, score, forward_backward, optim_step, save / load, save_pretrained
    checkpoint  sharded checkpoints without pickles (rng: the generators in them; checkpoint_files: what is checked)
    export      HF folders, tensor by tensor (safetensors_stream: the file format)
    folders     folders that are there whole or not at all, agreed on by all ranks
    training/   the engine behind initialize: any module, DeepSpeed's keys and loop
    comm        process group and collectives under DeepSpeed's names
    zero        GatheredParameters and Init
    checkpointing   parts of a forward that backward runs again
    monitor     progress line, loggers, phase times (records: metrics.jsonl and completions.jsonl)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid import checkpointing as checkpointing
    from hybrid import comm as comm
    from hybrid import zero as zero
    from hybrid.comm import init_distributed
    from hybrid.engine import HybridEngine
    from hybrid.training.engine import TrainingEngine
    from hybrid.training.start import add_config_arguments, initialize

_HOMES = {  # heavy (torch, transformers): imported on first use
    "HybridEngine": "hybrid.engine",
    "TrainingEngine": "hybrid.training.engine",
    "add_config_arguments": "hybrid.training.start",
    "init_distributed": "hybrid.comm",
    "initialize": "hybrid.training.start",
}
_ELSEWHERE = {  # names of DeepSpeed's that are something else here
    "DeepSpeedEngine": "the class is hybrid.TrainingEngine",
    "get_accelerator": "use torch.cuda, or engine.device",
    "init_inference": "use inference_v2.InferenceEngine, or hybrid_engine in the config",
    "ops": "optimizers are named in the config (AdamW is fused there), or torch's are given to initialize",
    "pipe": "there is no pipeline parallelism",
    "runtime": "schedules are named in the config's section `scheduler`, or torch's are given to initialize",
    "utils": "whole tensors: hybrid.zero.GatheredParameters, engine.module_state_dict(); logging is Python's",
}
_MODULES = ("checkpointing", "comm", "zero")  # as attributes too, for scripts that say deepspeed.comm

__all__ = ["HybridEngine", "TrainingEngine", "add_config_arguments", "init_distributed", "initialize"]


if not TYPE_CHECKING:  # a type checker that saw it would let every name pass

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            return import_module(f"hybrid.{name}")
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        hint = _ELSEWHERE.get(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {hint}" if hint else ""))
