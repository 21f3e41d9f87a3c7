"""Which parameters the backwards of a step reach, on this rank and on any; whether all ranks ran the same layers; and whether
weights were changed where the change is lost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hybrid import in_flight, sharding
from hybrid.mesh import Mesh
from hybrid.optim.gradients import in_words

_BASE, _MODULUS = 1_000_003, 2**31 - 1  # products stay exact, in Python and as float64


class Usage:
    """Lets a gradient that only some ranks have be reduced with zeros from the others, and remembers who had one: what no rank
    has used is not to be stepped on, with zeros, by weight decay and momentum.

    That is inside of layers. Those themselves are gathered and reduced one by one by all ranks together, each taking part when
    it runs them: ranks that run different ones would mix one layer's gradient with another's, which is noticed at the step.
    """

    def __init__(self, module: nn.Module, parameters: Mapping[str, nn.Parameter], mesh: Mesh) -> None:
        """Of a sharded module; to be made once. parameters: its own, by the names that errors say."""
        self._mesh, self._module, self._all = mesh, module, parameters
        self._altered: dict[nn.Parameter, Tensor] = {}
        self._reached: set[str] = set()
        self._order = 0  # a digest of the runs of this step
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        names = {id(p): name for name, p in self._parameters.items()}
        cast(FSDPModule, module).set_reduce_scatter_unused_params(True)
        units = {path: unit for path, unit in module.named_modules() if isinstance(unit, FSDPModule) and unit is not module}
        self._runs = dict.fromkeys(units, 0)
        for number, (path, unit) in enumerate(units.items()):
            unit.register_forward_pre_hook(self._counting(number + 1, path, unit), prepend=True)  # type: ignore[attr-defined]
        grouped = [*sharding.parameter_groups(module)]
        for group in grouped:
            group.post_backward = self._noting(group, group.post_backward, names)  # type: ignore[method-assign]
        held = {id(p.sharded_param) for group in grouped for p in group.fsdp_params}
        self._copies = [name for name, p in self._parameters.items() if id(p) not in held]

    def _counting(self, number: int, path: str, unit: FSDPModule) -> Callable[..., None]:
        """Of runs in which ranks talk: those that gather, and those whose backward reduces."""
        held = unit._get_fsdp_state()._fsdp_param_groups
        cut = self._mesh.device_mesh.size(1) > 1

        def hook(*_: Any) -> None:
            if torch.is_grad_enabled() and any(group.reduce_grads or (cut and group.is_sharded) for group in held):
                self._runs[path] += 1
                self._order = (self._order * _BASE + number) % _MODULUS

        return hook

    def _noting(self, group: Any, plain: Callable[..., None], names: Mapping[int, str]) -> Callable[..., None]:
        """The group's reduction, which notes first what it has of this rank."""
        trained = {names[id(p.sharded_param)]: p for p in group.fsdp_params if id(p.sharded_param) in names}

        def post_backward(*_: Any) -> None:
            for name, p in trained.items():
                whole = getattr(p, "_unsharded_param", None)
                if p.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None):
                    self._reached.add(name)
            plain()

        return post_backward

    def nowhere(self, said: str = "") -> list[str]:
        """Collective: the trained parameters that no rank's backward has reached since `clear`. Raises ValueError, on every rank,
        where ranks ran different layers, where they say different things of the step, and as `refuse_altered`."""
        reached = self._reached.union(name for name in self._copies if self._parameters[name].grad is not None)
        digest = int.from_bytes(hashlib.sha256(said.encode()).digest()[:6])  # exact as a float
        runs = [float(count) for count in (digest, self._order, *self._runs.values())]
        flags = self._flags()
        found = self._mesh.max(
            [*flags, *(float(name in reached) for name in self._parameters), *runs, *(-count for count in runs)]
        )
        altered, used = found[: len(flags)], found[len(flags) : len(flags) + len(self._parameters)]
        (of_said, *most), (of_other, *least) = found[-2 * len(runs) : -len(runs)], found[-len(runs) :]
        self._refuse(altered)
        if of_said != -of_other:
            raise ValueError(
                f"ranks give step different lr_kwargs, this one {said}; give all the same (a metric's mean over ranks)"
            )
        if most[0] != -least[0]:
            different = [path for path, a, b in zip(self._runs, most[1:], least[1:], strict=True) if a != -b]
            raise ValueError(
                f"ranks ran different layers ({in_words(different) or 'in different orders'}), whose gradients are mixed; let "
                "every rank run each layer, or put those that take turns into one module of a list"
            )
        return [name for name, each in zip(self._parameters, used, strict=True) if not each]

    def note_altered(self) -> None:
        """Compare what is gathered at the moment with its shards, before it is freed. No rank and no device is waited for."""
        for parameter, flag in in_flight.altered(self._module).items():
            before = self._altered.get(parameter)
            self._altered[parameter] = flag if before is None else flag | before

    def refuse_altered(self) -> None:
        """Collective: ValueError, on every rank, where any has noted a changed weight that was not refused or forgotten yet."""
        self._refuse(self._mesh.max(self._flags()))

    def forget_altered(self) -> None:
        self._altered.clear()

    def _flags(self) -> list[float]:
        """By parameter, whether a change was noted; from here on none is."""
        flags = [self._altered.get(p) for p in self._all.values()]
        noted = [flag for flag in flags if flag is not None]
        values = iter(torch.stack(noted).tolist() if noted else [])
        self._altered.clear()
        return [0.0 if flag is None else float(next(values)) for flag in flags]

    def _refuse(self, altered: list[float]) -> None:
        if names := [name for name, is_altered in zip(self._all, altered, strict=True) if is_altered]:
            raise ValueError(
                f"{in_words(names)} changed while gathered by a forward, where changes of the weight or of its shard are lost; "
                "change weights after the step, or before the first forward of the next, or after engine(...) under no_grad"
            )

    def clear(self) -> None:
        """Of a step; what was noted of changes stays for the next."""
        self._reached.clear()
        self._order = 0
        self._runs = dict.fromkeys(self._runs, 0)
