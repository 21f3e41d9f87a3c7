"""Optimizer state and the step in host memory, for parameters that stay on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid.sharding import local

_CHUNK = 2**22  # numbers that are compared at a time: what that takes of the device's memory is small


class HostMirror:
    """Copies of the trained parameters' shards in host memory, on which `optimizer` steps.

    A gradient goes to the host as soon as backward has reduced it, beside the rest of backward (page-locked memory, on CUDA);
    new values come back after the step. What the caller changes in between, weights or gradients, by whatever way, counts: it is
    found by value, since a change through `.data` moves no version counter.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, pin: bool) -> None:
        """pin: page-locked memory; only where the parameters are on CUDA."""
        self._pairs: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in parameters:
            if parameter.requires_grad:
                pinned = pin and parameter.device.type == "cuda"
                self._pairs[parameter] = nn.Parameter(_like(parameter, _on_host(local(parameter.detach()), pinned)))
        device = next((p.device for p in self._pairs), torch.device("cpu"))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pin = pin and self._stream is not None
        self._pushed: dict[nn.Parameter, Tensor] = {}  # on CUDA: digests of the parameters as this left them
        self._copies: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}  # of gradients, on their way; the digest, on CUDA
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
            self._copies[parameter] = gradient.clone(), None
            return
        sent = digest(gradient)
        self._stream.wait_stream(torch.cuda.current_stream(gradient.device))
        with torch.cuda.stream(self._stream):
            copy = torch.empty_like(gradient, device="cpu", pin_memory=self._pin).copy_(gradient, non_blocking=self._pin)
            self._copies[parameter] = copy, sent
            gradient.record_stream(self._stream)

    def _is_sent(self, parameter: nn.Parameter) -> bool:
        """Whether the gradient's copy is of its present value (the caller may have clipped it since)."""
        if parameter.grad is None or parameter not in self._copies:
            return False
        copy, sent = self._copies[parameter]
        gradient = local(parameter.grad)
        return same_bits(gradient, copy) if sent is None else torch.equal(sent, digest(gradient))

    @torch.no_grad()
    def take(self) -> None:
        """What the caller has made of the parameters since the last push, to their copies. One pass over them."""
        for parameter, changed in zip(self._pairs, self._changed()):
            if changed:
                local(self.of(parameter)).copy_(local(parameter))

    def _changed(self) -> list[bool]:
        """By parameter, whether it is not what its copy is."""
        if self._stream is None:
            return [not same_bits(local(parameter), local(copy)) for parameter, copy in self._pairs.items()]
        now = {parameter: digest(local(parameter)) for parameter in self._pairs}
        before = [self._pushed.get(parameter, now[parameter] + 1) for parameter in self._pairs]
        self._pushed = now
        return (torch.stack([*now.values()]) != torch.stack(before)).tolist() if now else []  # one wait for the device

    def pull(self) -> list[Tensor]:
        """Parameters as the caller left them and every gradient at the copies, ready for a step; returns the gradients."""
        self.take()
        for parameter in self._pairs:
            if parameter.grad is not None and not self._is_sent(parameter):
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
            if self._stream is not None:
                self._pushed[parameter] = digest(local(parameter))

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer`, made for the parameters, step on their copies."""
        for group in optimizer.param_groups:
            group["params"] = [self.of(p) for p in group["params"]]


@torch.no_grad()
def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are the same to the bit (a NaN is equal to itself); compared where the first is."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    parts = zip(bits(first).split(_CHUNK), bits(second).split(_CHUNK), strict=True)
    return all(torch.equal(one, other.to(one.device)) for one, other in parts)


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """int64 [] on the tensor's device, without waiting for it; another one for other bits or another order of them, short of an
    accident of 1 in 2^64. The sum of each place and its bits, mixed as in SplitMix64 (Steele et al. 2014)."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, part in enumerate(bits(tensor).split(_CHUNK)):
        places = torch.arange(i * _CHUNK + 1, i * _CHUNK + len(part) + 1, device=tensor.device)
        mixed = _mix(places.mul_(0x9E3779B97F4A7C15 - 2**64))
        total += _mix(mixed.add_(part)).sum()
    return total


def _mix(words: Tensor) -> Tensor:
    """In place: a permutation of the 64-bit words, in which each bit of a result depends on all of the word."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        words ^= (words >> shift) & (2 ** (64 - shift) - 1)
        words *= factor - 2**64  # as a signed word
    words ^= (words >> 31) & (2**33 - 1)
    return words


def bits(tensor: Tensor) -> Tensor:
    """Its memory as integers, in one dimension."""
    width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.int64)
    return tensor.detach().reshape(-1).view(width)


def _on_host(tensor: Tensor, pin: bool) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=pin).copy_(tensor)


def _like(parameter: nn.Parameter, shard: Tensor) -> Any:
    """`shard`, wherever it is, in the place of the parameter's own. (DTensor.from_local would move it to the mesh's device.)"""
    return DTensor(shard, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else shard
