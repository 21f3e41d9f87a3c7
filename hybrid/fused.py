"""The rollout's kernels inside the module that trains: products, norms and the gated activation, with a backward.

On a CPU they are faster than the module's own, and training and rollout then round alike. What is replaced is the forward of
single submodules, so parameters, their names and the hooks that gather them stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from inference_v2.kernels import Kernels
from inference_v2.kernels.cpu import DTYPES, CpuKernels, load_kernels
from inference_v2.linear import can_pack


class _Product(torch.autograd.Function):
    """x [*, in] @ weight.T + bias, as the rollout's layers compute it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kernels: CpuKernels) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen weight needs no activations
        ctx.bias_dtype = None if bias is None else bias.dtype
        return kernels.pack_linear(weight.detach(), bias)(x.flatten(0, -2)).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        dx = _matmul(rows, weight).view(*dy.shape[:-1], weight.shape[1]) if ctx.needs_input_grad[0] else None
        d_weight = _matmul(rows.t(), x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        d_bias = rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, d_weight, d_bias, None


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with fp32 sums. Where the CPU has no product of bf16, torch's is many times slower than its fp32 one, which is the
    same up to the order of the sums."""
    return a @ b if can_pack(a.dtype) else (a.float() @ b.float()).to(a.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: CpuKernels) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.kernels = eps, kernels
        return kernels.rms_norm(x, weight.detach(), eps)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, d_weight = ctx.kernels.rms_norm_backward(x, weight, dy, ctx.eps)
        return dx, d_weight.to(weight.dtype), None, None


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: CpuKernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.silu_mul(gate.flatten(0, -2), up.flatten(0, -2)).view(gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = ctx.kernels.silu_mul_backward(*(t.flatten(0, -2) for t in (gate, up, dy)))
        return d_gate.view(gate.shape), d_up.view(up.shape), None


def fuse(decoder: nn.Module, layers: Iterable[nn.Module], kernels: Kernels) -> None:
    """Let the decoder of a registered family run `kernels` where these are the C++ ones. What is not transformers' own, or has a
    forward of its own already, is left alone."""
    if kernels.name != "cpu":
        return
    cpu = load_kernels()
    for module in decoder.modules():
        if _is_plain(module) and type(module).__name__.endswith("RMSNorm"):
            _replace(module, _norm_forward(cpu))
    for layer in layers:
        for module in filter(_is_plain, layer.modules()):
            if type(module) is nn.Linear:
                _replace(module, _linear_forward(cpu))
            elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                _replace(module, _mlp_forward(cpu))


def _is_plain(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.nn.", "transformers.models.")) and "forward" not in vars(module)


def _replace(module: nn.Module, forward: Any) -> None:
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _linear_forward(kernels: CpuKernels) -> Any:
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype or x.dtype not in DTYPES:
            return F.linear(x, self.weight, self.bias)
        return _Product.apply(x, self.weight, self.bias, kernels)

    return forward


def _norm_forward(kernels: CpuKernels) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.variance_epsilon, kernels)

    return forward


def _mlp_forward(kernels: CpuKernels) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(_SiluMul.apply(self.gate_proj(x), self.up_proj(x), kernels))

    return forward
