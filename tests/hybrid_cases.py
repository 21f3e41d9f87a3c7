"""What several tests of `hybrid` share: ragged batches, engines on tiny models, and what a rank holds in memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from hybrid.batch import Batch
from hybrid.engine import HybridEngine
from hybrid.loss_head import cross_entropy

__all__ = ["cross_entropy"]  # defined elsewhere, used by tests


def ragged_sequences(count: int = 8, *, vocab_size: int = 79, seed: int = 0) -> list[list[int]]:
    """Sequences of 2 to 13 random ids."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 14, (count,), generator=generator).tolist()
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def pack(sequences: Sequence[Sequence[int]], counted_from: int = 1) -> Batch:
    """Every token from `counted_from` on is a target. A large value masks everything."""
    lengths = torch.tensor([len(s) for s in sequences], dtype=torch.long)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = torch.tensor([i for s in sequences for i in s], dtype=torch.long)
    positions = torch.tensor([p for s in sequences for p in range(len(s))], dtype=torch.long)
    rows = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    counted = (positions >= counted_from).nonzero().squeeze(1)
    return Batch(ids, positions, cu_seqlens, counted - 1, ids[counted], rows[counted])


def make_engine(path: str, **config: object) -> HybridEngine:
    """SGD without clipping by default, so that weights move by exactly lr * gradient."""
    optimizer = {"name": "sgd", "lr": 0.1, "max_grad_norm": None} | config.pop("optimizer", {})  # type: ignore[operator]
    return HybridEngine.from_pretrained(path, {"optimizer": optimizer, **config})


def full_weights(engine: HybridEngine) -> dict[str, Tensor]:
    """Every parameter whole, in its own dtype. Collective."""
    return {name: _whole(p.detach()) for name, p in engine.model.parameters().items()}


def full_gradients(engine: HybridEngine) -> dict[str, Tensor]:
    return {name: _whole(p.grad) for name, p in engine.model.parameters().items() if p.grad is not None}


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages behind the local parts of `tensors`."""
    storages = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.is_mkldnn:  # packed by oneDNN: no storage to ask
            storages[id(local)] = local.nbytes
            continue
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    storages.pop(0, None)
    return sum(storages.values())


def live_bytes() -> int:
    """Bytes of all tensors that Python can still reach in this process."""
    gc.collect()
    return bytes_of([t for t in gc.get_objects() if issubclass(type(t), Tensor) and not t.is_meta])


@contextmanager
def collectives() -> Iterator[Counter]:
    """Counts the collectives of this rank by kind."""
    counts: Counter = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield counts
    kinds = {
        "c10d::_allgather_base_": "all_gather",
        "c10d::_reduce_scatter_base_": "reduce_scatter",
        "c10d::allreduce_": "all_reduce",
    }
    counts.update(kinds[e.name] for e in profile.events() if e.name in kinds)


def relative_error(given: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest expected value."""
    return ((given - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def hf_module(folder: str, weights: dict[str, Tensor] | None = None) -> PreTrainedModel:
    """The plain HF module of a folder, with `weights` in place of the folder's."""
    config = AutoConfig.from_pretrained(folder)
    auto = AutoModelForImageTextToText if config.model_type == "exaone4_5" else AutoModelForCausalLM
    module = auto.from_pretrained(folder, dtype=torch.float32).eval()
    return module if weights is None else with_weights(module, weights)


@torch.no_grad()
def with_weights(module: PreTrainedModel, weights: dict[str, Tensor]) -> PreTrainedModel:
    for name, parameter in module.named_parameters():
        parameter.copy_(weights[name])
    return module


@torch.no_grad()
def hf_greedy(module: torch.nn.Module, prompt: Sequence[int], count: int, vocab_limit: int = 79) -> tuple[int, ...]:
    """`count` greedy ids by full HF forwards, without a cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(module(torch.tensor([ids])).logits[0, -1, :vocab_limit].argmax()))
    return tuple(ids[len(prompt) :])
