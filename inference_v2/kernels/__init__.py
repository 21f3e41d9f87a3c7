"""One signature per operation, several backends. `reference` is plain PyTorch, written to be read; a fast backend is another
`Kernels` value with the same contract (shapes and rounding are documented in reference.py and sampling.py)."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inference_v2.kernels import reference
from inference_v2.kernels.cpu import DTYPES as CPU_DTYPES
from inference_v2.kernels.cpu import BuildError, load_kernels
from inference_v2.kernels.cpu.divergence import token_loss
from inference_v2.kernels.cpu.stack import stack_binder
from inference_v2.kernels.sampling import sample
from inference_v2.kernels.triton import TritonMissing
from inference_v2.kernels.triton import load_kernels as load_triton

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """What a decoder needs beside plain matrix products."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    enter_attention: Callable[..., Tensor]
    paged_attention: Callable[..., Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    sample: Callable[..., tuple[Tensor, Tensor, Tensor]]
    pack_linear: Callable[..., Callable[..., Tensor]] | None = None  # None: torch's linear layers
    token_loss: Callable[..., dict[str, Tensor]] | None = None  # cross-entropy and KLs with their gradients (cpu/divergence.py)
    bind_layers: Callable[..., Any] | None = None  # all layers in one call, from spec and weights; gives None where it cannot


REFERENCE = Kernels(
    name="reference",
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    enter_attention=reference.enter_attention,
    paged_attention=reference.paged_attention,
    silu_and_mul=reference.silu_and_mul,
    sample=sample,
)


def cpu_kernels(march: str = "native") -> Kernels:
    """The C++ kernels, compiled on first use. Raises BuildError."""
    cpu = load_kernels(march)
    return Kernels(
        name="cpu",
        rms_norm=cpu.rms_norm,
        add_rms_norm=cpu.add_rms_norm,
        enter_attention=cpu.enter_attention,
        paged_attention=cpu.paged_attention,
        silu_and_mul=cpu.silu_and_mul,
        sample=cpu.sample,
        pack_linear=cpu.pack_linear,
        token_loss=functools.partial(token_loss, march=march),
        bind_layers=stack_binder(march),
    )


def triton_kernels(device: torch.device | str, dtype: torch.dtype = torch.float32) -> Kernels:
    """The Triton kernels, compiled on first use; also on CPU tensors under TRITON_INTERPRET=1. Raises TritonMissing."""
    gpu = load_triton(torch.device(device), dtype)
    return Kernels(
        name="triton",
        rms_norm=gpu.rms_norm,
        add_rms_norm=gpu.add_rms_norm,
        enter_attention=gpu.enter_attention,
        paged_attention=gpu.paged_attention,
        silu_and_mul=gpu.silu_and_mul,
        sample=gpu.sample,
    )


BACKENDS = ("reference", "cpu", "triton")


def get_kernels(
    name: str = "auto",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Kernels:
    """The backend called `name`; "auto" is the fastest one that runs here. Raises ValueError for an unknown name, and for one
    asked for by name that cannot run, with the reason."""
    device = torch.device(device)
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"kernels={name!r}; allowed: auto, {', '.join(BACKENDS)}")
    if name == "reference":
        return REFERENCE
    if name == "triton" or (name == "auto" and device.type == "cuda"):
        try:
            return triton_kernels(device, dtype)
        except TritonMissing as error:
            if name == "triton":
                raise ValueError(f"kernels=triton: {error}; or use kernels=auto") from None
            _say_once(f"the Triton kernels cannot run, so the slow reference kernels do: {error}")
            return REFERENCE
    if device.type != "cpu" or dtype not in CPU_DTYPES:
        if name == "cpu":
            given = f"device={device.type}, dtype={str(dtype).removeprefix('torch.')}"
            raise ValueError(f"kernels=cpu with {given}; allowed: device cpu with float32 or bfloat16, or kernels=auto")
        return REFERENCE
    try:
        return cpu_kernels()
    except BuildError as error:
        if name == "cpu":
            raise ValueError(f"kernels=cpu: {error}; or use kernels=reference") from None
        _say_once(f"the fast CPU kernels cannot be built, so the slow reference kernels run: {error}")
        return REFERENCE


@functools.cache
def _say_once(reason: str) -> None:
    log.warning("%s", reason)
