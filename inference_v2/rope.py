"""Rotary tables: inverse frequencies of every scaling type, computed once per engine.

"dynamic" and "longrope" depend on a length. A paged cache cannot rotate its keys again, so the length is fixed when the table
is made (`max_positions`, prompt + new tokens at most), and `force_table` installs the same table in a Hugging Face module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from inference_v2.models.spec import RopeSpec

MAX_POSITIONS = 2**24  # a table of 64 frequencies takes 8 GiB there
NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
           "attention_factor", "mscale", "mscale_all_dim", "short_factor", "long_factor")  # fmt: skip


def inverse_frequencies(spec: RopeSpec, max_positions: int) -> tuple[Tensor, float]:
    """([rotary_dim / 2] fp32 frequencies in radians per position, factor for cos and sin) of a table of `max_positions`.

    Sources: linear https://kaiokendev.github.io/til, dynamic (NTK) as in transformers, yarn https://arxiv.org/abs/2309.00071,
    longrope https://arxiv.org/abs/2402.13753, llama3 as released with Llama 3.1. Raises ValueError for a parameter that is
    missing or makes no sense.
    """
    if spec.kind not in _KINDS:
        raise ValueError(f"rope_type={spec.kind!r}; allowed: {', '.join(_KINDS)}")
    parameters = {name: value for name, value in spec.parameters if value is not None}  # null in a config: not given
    for name in NUMBERS:
        value = parameters.get(name, 0)
        if not all(_is_size(x) for x in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"rope_parameters: {name}={value!r}; allowed: finite numbers >= 0")
    try:
        inv_freq, factor = _KINDS[spec.kind](spec, parameters, max_positions)
    except KeyError as missing:
        raise ValueError(
            f"rope_parameters of rope_type={spec.kind!r} lack {missing}; add it to the model's config.json"
        ) from None
    except (TypeError, ZeroDivisionError):  # a list for a number, a factor of 0
        inv_freq, factor = torch.zeros(0), math.nan
    if not (math.isfinite(factor) and inv_freq.numel() and bool((inv_freq > 0).all() & inv_freq.isfinite().all())):
        raise ValueError(f"rope_parameters {parameters} of rope_type={spec.kind!r} and theta {spec.theta} make no table")
    return inv_freq, factor


def _is_size(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x < math.inf


@dataclass(frozen=True)
class RopeTable:
    cos: Tensor  # [P, rotary_dim / 2] in the activation dtype
    sin: Tensor

    @classmethod
    def build(cls, spec: RopeSpec, max_positions: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> RopeTable:
        """Angles, cos and sin in fp32 (in bf16, positions beyond a few hundred would be wrong), then cast to the activations'
        dtype as the Hugging Face modules do. Raises ValueError for a length that no table can have."""
        if not 1 <= max_positions <= MAX_POSITIONS:
            raise ValueError(f"a rotary table of {max_positions} positions; allowed: 1 to {MAX_POSITIONS}; set max_model_len")
        inv_freq, factor = inverse_frequencies(spec, max_positions)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
        return cls((angles.cos() * factor).to(device, dtype), (angles.sin() * factor).to(device, dtype))


def force_table(module: nn.Module, spec: RopeSpec, max_positions: int) -> None:
    """Give every text rotary embedding below `module` (a Hugging Face model) this table's frequencies and factor, and stop
    it from switching with the length of its input.

    Also repairs the fp32 buffers that `to_empty()` loses and `.to(bfloat16)` rounds; call it after either. Raises ValueError
    when the model has no rotary embedding of this width.
    """
    inv_freq, factor = inverse_frequencies(spec, max_positions)
    get_decoder = getattr(module, "get_decoder", None)
    decoder: nn.Module = module if get_decoder is None else get_decoder()  # the text model: vision towers keep their own
    found = 0
    rotary: Any
    for rotary in decoder.modules():
        buffer = getattr(rotary, "inv_freq", None)
        if not isinstance(buffer, Tensor) or not hasattr(rotary, "attention_scaling"):
            continue
        if buffer.shape != inv_freq.shape:
            raise ValueError(
                f"{type(rotary).__name__} has {buffer.shape[0]} frequencies, the table {inv_freq.shape[0]}; "
                "allowed: the spec of this very model (partial rotation must be one that the module does too)"
            )
        device = torch.device("cpu") if buffer.is_meta else buffer.device
        for name in ("inv_freq", "original_inv_freq"):
            rotary.register_buffer(name, inv_freq.clone().to(device), persistent=False)
        rotary.attention_scaling = factor
        rotary.rope_type = "default"  # the name transformers' length switches look at
        found += 1
    if not found:
        raise ValueError(f"{type(module).__name__} has no rotary embedding to give a table to; allowed: a model with RoPE")


def _plain(spec: RopeSpec, theta: float | None = None) -> Tensor:
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.int64).float() / spec.rotary_dim
    return 1.0 / ((spec.theta if theta is None else theta) ** exponents)


def _default(spec: RopeSpec, p: dict, max_positions: int) -> tuple[Tensor, float]:
    return _plain(spec), 1.0


def _linear(spec: RopeSpec, p: dict, max_positions: int) -> tuple[Tensor, float]:
    return _plain(spec) / p["factor"], 1.0


def _dynamic(spec: RopeSpec, p: dict, max_positions: int) -> tuple[Tensor, float]:
    original, dim = spec.max_position_embeddings, spec.rotary_dim
    stretch = p["factor"] * max(max_positions, original) / original - (p["factor"] - 1)
    return _plain(spec, spec.theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(spec: RopeSpec, p: dict, max_positions: int) -> tuple[Tensor, float]:
    inv_freq = _plain(spec)
    low, high = p["low_freq_factor"], p["high_freq_factor"]
    turns = _original(spec, p) / (2 * math.pi / inv_freq)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)  # 0: slow, interpolated; 1: fast, left alone
    return (1 - keep) * inv_freq / p["factor"] + keep * inv_freq, 1.0


def _yarn(spec: RopeSpec, p: dict, max_positions: int) -> tuple[Tensor, float]:
    dim, original = spec.rotary_dim, _original(spec, p)
    factor = p.get("factor", spec.max_position_embeddings / original)

    def dimension_of(turns: float) -> float:  # the (fractional) dimension that makes this many turns in the original context
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension_of(p.get("beta_fast") or 32), dimension_of(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    inv_freq = _plain(spec)
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), _yarn_scale(p, factor)


def _yarn_scale(p: dict, factor: float) -> float:
    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if "attention_factor" in p:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return scale(p["mscale"]) / scale(p["mscale_all_dim"])
    return scale(1.0)


def _longrope(spec: RopeSpec, p: dict, max_positions: int) -> tuple[Tensor, float]:
    original = _original(spec, p)
    stretch = torch.tensor(p["long_factor"] if max_positions > original else p["short_factor"], dtype=torch.float32)
    if stretch.shape[0] != spec.rotary_dim // 2:
        raise ValueError(f"longrope has {stretch.shape[0]} factors; allowed: one per rotated pair, {spec.rotary_dim // 2}")
    factor = p.get("factor", spec.max_position_embeddings / original)
    scale = p.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _plain(spec) / stretch, float(scale)


def _original(spec: RopeSpec, p: dict) -> int:
    return p.get("original_max_position_embeddings") or spec.max_position_embeddings


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
