"""One signature per operation, several backends. `reference` is plain PyTorch, written to be read; a fast backend is another
`Kernels` value with the same contract (shapes and rounding are documented in reference.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from inference_v2.kernels import reference


@dataclass(frozen=True)
class Kernels:
    """The operations of a decoder layer that are not matrix products."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[..., Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]


REFERENCE = Kernels(
    name="reference",
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    rope=reference.rope,
    write_kv=reference.write_kv,
    paged_attention=reference.paged_attention,
    silu_and_mul=reference.silu_and_mul,
)

BACKENDS: dict[str, Kernels] = {"reference": REFERENCE}


def get_kernels(name: str = "auto") -> Kernels:
    """The backend called `name`; "auto" is the fastest one that runs here. Raises ValueError for an unknown name."""
    if name == "auto":
        return REFERENCE
    if name not in BACKENDS:
        raise ValueError(f"kernels={name!r}; allowed: auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]
