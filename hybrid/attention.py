"""Attention of the forwards that train and score: sequences packed one behind the other, without padding and without a mask.

The packed function stands among transformers' attention functions under its own name, and reads the sequences' bounds from a
keyword of the module's forward. On a CPU it is the rollout's own attention (C++), with a backward; on CUDA torch's varlen
attention. Whether a model uses it is decided once, when it is opened.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from hybrid.batch import Batch
from hybrid.config import HybridConfig
from hybrid.mesh import Mesh
from inference_v2.kernels.cpu import BuildError, load_kernels
from inference_v2.kernels.cpu.varlen import token_tables, varlen_backward, varlen_forward
from inference_v2.models.spec import DecoderSpec

log = logging.getLogger(__name__)

PACKED = "hybrid_packed"  # name of our entry among transformers' attention functions
UNKNOWN_FEATURES = ("s_aux", "position_bias", "alibi", "head_mask", "block_mask")
PROBE_LENGTHS = (5, 1, 24)


@dataclass(frozen=True)
class Packing:
    """Where the sequences of a [1, T] input begin and end; travels through the module's forward as a keyword."""

    cu_seqlens: Tensor  # [B + 1] int32
    longest: int
    tables: Tensor | None  # token_tables(cu_seqlens), which the CPU kernel reads


def packing(cu_seqlens: Tensor) -> Packing:
    longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    return Packing(cu_seqlens.int(), longest, token_tables(cu_seqlens) if cu_seqlens.device.type == "cpu" else None)


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        assert packed.tables is not None
        out, lse = varlen_forward(q, k, v, packed.cu_seqlens, packed.tables, scale, window, softcap)
        ctx.save_for_backward(q, k, v, out, lse, packed.cu_seqlens)
        ctx.features = (scale, window, softcap)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        return *varlen_backward(d_out, *ctx.saved_tensors, *ctx.features), None, None, None, None


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, Hq, T, D]
    key: Tensor,  # [1, Hk, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, T, Hq, D]. Each sequence of `packed` is causal on its own. Raises ValueError for
    what it would get wrong."""
    unknown = [name for name in UNKNOWN_FEATURES if kwargs.get(name) is not None]
    if packed is None or attention_mask is not None or unknown or not getattr(module, "is_causal", True):
        why = f"it passes {unknown[0]}" if unknown else "it hands on no packing, has a mask of its own, or is not causal"
        raise ValueError(f"{type(module).__name__} cannot run packed: {why}; use attn_implementation=sdpa")
    if not query.dtype == key.dtype == value.dtype or key.shape[-1] != value.shape[-1]:
        raise ValueError(f"{type(module).__name__} cannot run packed: its keys and values differ in dtype or size of a head; "
                         "use attn_implementation=sdpa")  # fmt: skip
    if dropout:
        raise ValueError(f"attention dropout {dropout} with packed attention, which has none; use attn_implementation=sdpa")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.device.type == "cpu":
        return _CpuAttention.apply(q, k, v, packed, scale, sliding_window, softcap)[None], None
    if softcap is not None:
        raise ValueError(f"{type(module).__name__} cannot run packed on {query.device.type}: it has a soft-cap; use "
                         "attn_implementation=sdpa")  # fmt: skip
    return _cuda_attention(q, k, v, packed, scale, sliding_window)[None], None


def _cuda_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packing, scale: float, window: int | None) -> Tensor:
    """torch's own; its window counts the keys before the query, ours the query too. Not yet run on a GPU."""
    from torch.nn.attention.varlen import varlen_attn

    bounds = (packed.cu_seqlens, packed.cu_seqlens, packed.longest, packed.longest)
    left = -1 if window is None else window - 1
    grouped = q.shape[1] != k.shape[1]
    out = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), *bounds, scale=scale, window_size=(left, 0),
                      enable_gqa=grouped)  # fmt: skip
    assert isinstance(out, Tensor)  # nothing beside it was asked for
    return out


def use(hf: PreTrainedModel, name: str) -> None:
    """Let the text decoder of `hf` run attention function `name`, one of transformers' or PACKED."""
    if name == PACKED and PACKED not in AttentionInterface().valid_keys():
        AttentionInterface.register(PACKED, packed_attention)
    hf.get_decoder().set_attn_implementation(name)


def choose(
    hf: PreTrainedModel,
    spec: DecoderSpec | None,
    config: HybridConfig,
    mesh: Mesh,
    hidden_states: Callable[[str, Batch], Tensor],
) -> str:
    """The attention function that this model trains and scores with; logged. Collective.

    A model without `spec` is packed only if its packed `hidden_states(function, batch)` are its own eager ones. Raises ValueError
    where packed attention was asked for by name and cannot be had.
    """
    if config.attn_implementation in ("sdpa", "eager"):
        return config.attn_implementation
    otherwise = hf.get_decoder().config._attn_implementation  # what transformers chose: sdpa, or eager where there is none
    reason = _obstacle(hf, spec, config, mesh.device)
    if reason is None and spec is None:
        reason = _probe(hf, config, mesh, hidden_states)
    if reason is not None and config.attn_implementation == "packed":
        raise ValueError(f"attn_implementation=packed for {type(hf).__name__}: {reason}; allowed here: auto, sdpa, eager")
    if mesh.rank == 0:
        why = "" if reason is None else f", not packed: {reason}"
        log.info("%s trains with %s attention%s", type(hf).__name__, "packed" if reason is None else otherwise, why)
    return PACKED if reason is None else otherwise


def _obstacle(hf: PreTrainedModel, spec: DecoderSpec | None, config: HybridConfig, device: torch.device) -> str | None:
    """Why this model cannot train packed here, as far as can be told without running it; None: nothing known."""
    dtype = getattr(torch, config.compute_dtype)
    if device.type == "cpu":
        try:
            load_kernels()
        except BuildError as error:
            return str(error)
    elif dtype != torch.bfloat16 or importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch's varlen attention on {device.type} is for bfloat16, in torch 2.10 and later"
    settings = hf.config.get_text_config().to_dict()
    dropped = [key for key, value in settings.items() if "att" in key and "drop" in key and value]
    if config.dropout and dropped:
        return f"dropout is on and the model has {dropped[0]}={settings[dropped[0]]}"
    if spec is None and not hf.get_decoder()._can_set_attn_implementation():
        return "it does not call transformers' attention functions"
    return None


def _probe(hf: PreTrainedModel, config: HybridConfig, mesh: Mesh, hidden_states: Callable[[str, Batch], Tensor]) -> str | None:
    """Why packed hidden states are not the module's own; None: they are, up to 1e-4 (fp32) or 5e-2 of their root mean square."""
    batch = probe_batch(hf)
    try:
        packed = hidden_states(PACKED, batch).float()
    except (ValueError, TypeError) as error:  # of the attention function, or of a forward that hands on no keywords
        return str(error)
    eager = hidden_states("eager", batch).float()
    difference = float((packed - eager).norm() / eager.norm())
    (worst,) = mesh.max([difference if math.isfinite(difference) else math.inf])
    allowed = 1e-4 if config.compute_dtype == "float32" else 5e-2  # HF's own noise in bf16 is about a third of it
    if worst <= allowed:
        return None
    return f"packed and eager hidden states differ by {worst:.1e} (allowed {allowed:.0e}), so it has a feature unknown to us"


def probe_batch(hf: PreTrainedModel) -> Batch:
    """Ragged sequences of random ids that show whether one sequence sees another, and whether a window is kept."""
    config = hf.config.get_text_config()
    window, limit = getattr(config, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    lengths = list(PROBE_LENGTHS)
    if isinstance(window, int) and window < 256:
        lengths.append(window + 3)
    lengths = [min(n, limit) if isinstance(limit, int) else n for n in lengths]
    ids = torch.randint(config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return Batch(
        token_ids=ids,
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=cu_seqlens,
        loss_index=torch.arange(len(ids)),
        targets=torch.zeros_like(ids),
        sequence_index=torch.repeat_interleave(torch.arange(len(lengths)), cu_seqlens.diff()),
    )
