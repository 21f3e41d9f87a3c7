"""Optimizer state and the step in host memory, for parameters that stay on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid.sharding import local

COPY = "hybrid_host_copy"  # attribute of a parameter: its copy, for those who change its value


class HostMirror:
    """Copies of the trained parameters' shards in host memory, on which `optimizer` steps.

    A gradient goes to the host as soon as backward has reduced it, beside the rest of backward (page-locked memory, on CUDA);
    new values come back after the step.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, pin: bool) -> None:
        """pin: page-locked memory; only where the parameters are on CUDA."""
        self._pairs: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                pinned = pin and parameter.device.type == "cuda"
                self._pairs[parameter] = nn.Parameter(_like(parameter, _on_host(local(parameter.detach()), pinned)))
                parameter.__dict__[COPY] = self._pairs[parameter]
        device = next((p.device for p in self._pairs), torch.device("cpu"))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pin = pin and self._stream is not None
        self._copies: dict[
            nn.Parameter, tuple[Tensor, tuple[int, int]]
        ] = {}  # of gradients, on their way; the version of what was copied
        self.armed = False  # whether the next gradients are a step's last
        for parameter in self._pairs:
            if isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(self._note)

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The copy of one; a frozen one is its own."""
        return self._pairs.get(parameter, parameter)

    def named(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {name: self.of(p) for name, p in parameters.items()}

    def _note(self, parameter: nn.Parameter) -> None:
        if self.armed:
            self._send(parameter)

    def _send(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        if self._stream is None:
            self._copies[parameter] = gradient.clone(), _version(parameter.grad)
            return
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            copy = torch.empty_like(gradient, device="cpu", pin_memory=self._pin).copy_(gradient, non_blocking=self._pin)
            self._copies[parameter] = copy, _version(parameter.grad)
            gradient.record_stream(self._stream)

    def pull(self) -> list[Tensor]:
        """Every gradient at its copy, ready to be used there; returns them."""
        for parameter in self._pairs:
            if parameter.grad is None:
                continue
            _, version = self._copies.get(parameter, (None, None))
            if version != _version(parameter.grad):  # not sent yet, or changed since (clipped by the caller, say)
                self._send(parameter)
        if self._stream is not None:
            self._stream.synchronize()
        for parameter, copy in self._pairs.items():
            copy.grad = None if parameter.grad is None else _like(parameter, self._copies[parameter][0])
        self._copies = {}
        return [copy.grad for copy in self._pairs.values() if copy.grad is not None]

    def drop(self) -> None:
        """No gradient."""
        if self._stream is not None:
            self._stream.synchronize()
        self._copies = {}
        for copy in self._pairs.values():
            copy.grad = None

    @torch.no_grad()
    def push(self) -> None:
        """The copies' values to the parameters."""
        for parameter, copy in self._pairs.items():
            local(parameter).copy_(local(copy), non_blocking=self._pin)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer`, made for the parameters, step on their copies."""
        for group in optimizer.param_groups:
            group["params"] = [self.of(p) for p in group["params"]]


def _version(gradient: Tensor) -> tuple[int, int]:
    """Changes with every change in place: of the whole, or of the shard in it."""
    return gradient._version, local(gradient)._version


def _on_host(tensor: Tensor, pin: bool) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=pin).copy_(tensor)


def _like(parameter: nn.Parameter, shard: Tensor) -> Any:
    """`shard`, wherever it is, in the place of the parameter's own. (DTensor.from_local would move it to the mesh's device.)"""
    return DTensor(shard, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else shard
