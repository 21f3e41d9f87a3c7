"""What forwards and backwards of a sharded module have in flight: weights that are gathered, gradients that wait for their
reduction, a forward that has not ended. FSDP2 keeps all this to itself; the looks inside it are here and in hybrid.sharding."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hybrid.optim.host import bits
from hybrid.sharding import groups, local, outside_inference_mode, own_rows, parameter_groups, reshard


def abandon(module: nn.Module) -> None:
    """After a forward or backward that raised: end what is in flight, free what is gathered, ready for the next. Gradients of
    earlier backwards stay."""
    root = cast(FSDPModule, module)
    if root._get_fsdp_state()._is_root:  # None before the first forward: nothing can be in flight
        root.reset_iter_state()
    reshard(module)


def is_running(module: nn.Module) -> bool:
    """Whether a forward has begun and not ended: inside of one, or after one that raised."""
    return cast(FSDPModule, module)._get_fsdp_state()._state_ctx.iter_forward_root is not None


def is_waiting(module: nn.Module) -> bool:
    """Whether there are gradients that wait for their reduction, which no shard's `grad` shows."""
    for parameters in parameter_groups(module):
        for held in parameters.fsdp_params:
            gathered = getattr(held, "_unsharded_param", None)
            if held.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None):
                return True
    return False


def discard_waiting(module: nn.Module) -> None:
    """Drop gradients that wait for their reduction (stages 0 and 1, before the last micro-batch), which no shard's `grad` shows.
    FSDP2 has no call for it: its own reset keeps them, and adds them to whatever comes next."""
    for parameters in parameter_groups(module):
        parameters._partial_reduce_output = None
        for held in parameters.fsdp_params:
            held.unsharded_accumulated_grad = None
            if hasattr(held, "_unsharded_param"):
                held._unsharded_param.grad = None


@torch.no_grad()
def altered(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """By shard, for what is gathered at the moment: whether (bool [], for which nothing waits) it is not what the shard is, in
    this rank's rows: somebody has changed one of the two, and the gathered one will be thrown away."""
    found: dict[nn.Parameter, Tensor] = {}
    for parameters in parameter_groups(module):
        for held in parameters.fsdp_params if parameters.is_unsharded else ():
            gathered_rows = held._unsharded_param.detach()[own_rows(held.sharded_param)]
            found[held.sharded_param] = _differ(gathered_rows, local(held.sharded_param))
    return found


def _differ(gathered_rows: Tensor, shard: Tensor) -> Tensor:
    """bool []: anywhere, but where a gathered value is a NaN."""
    on_host = gathered_rows.device.type == "cpu"
    size = 2**19 if on_host else 2**24  # what stays in the cache; what is small beside the gathered weight
    found = torch.zeros((), dtype=torch.bool, device=gathered_rows.device)
    for one, other in zip(gathered_rows.reshape(-1).split(size), shard.reshape(-1).split(size), strict=True):
        other = other.to(one, non_blocking=True)
        if not (on_host and torch.equal(bits(one), bits(other))):  # a third of the time
            found |= ((one != other) & (one == one)).any()
    return found


def mark_gathered(module: nn.Module, attribute: str) -> None:
    """Give `attribute` (True) to every whole parameter that a forward puts in the place of a shard. FSDP2 makes one for each
    shard, at the first gather, and keeps it: one look, after the first gather of each group, is enough."""
    handles: dict[FSDPModule, RemovableHandle] = {}
    for group in groups(module):

        def mark(unit: nn.Module, args: object, group: FSDPModule = group) -> None:
            held = [p for parameters in group._get_fsdp_state()._fsdp_param_groups for p in parameters.fsdp_params]
            if all(hasattr(p, "_unsharded_param") for p in held):
                for p in held:
                    setattr(p._unsharded_param, attribute, True)
                handles.pop(group).remove()

        handles[group] = cast(nn.Module, group).register_forward_pre_hook(mark)


def root_parts(module: nn.Module) -> list[nn.Module]:
    """The parts whose weights the module itself gathers: embedding, final norm, head."""
    state = cast(FSDPModule, module)._get_fsdp_state()
    held = [p._module_info.module for parameters in state._fsdp_param_groups for p in parameters.fsdp_params]
    return [part for part in dict.fromkeys(held) if part is not module]


def let_parts_be_called(module: nn.Module) -> None:
    """Of a sharded module that has not run yet: its parts may be called before it is, and `root_parts`, by all ranks together
    and without gradients, outside of its forward. With gradients that is a RuntimeError: no backward would find the weights."""
    root = cast(FSDPModule, module)
    root._get_fsdp_state()._lazy_init()  # else the first part that is called takes itself for the root
    paths = {child: path for path, child in module.named_modules()}
    open_for: list[nn.Module] = []

    def enter(part: nn.Module, args: Any, kwargs: Any) -> None:
        weights = [p for p in part._parameters.values() if p is not None]
        if not any(isinstance(p, DTensor) for p in weights):  # inside of the module's forward
            return
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in [*weights, *inputs]):
            raise RuntimeError(
                f"{paths[part]} was called outside of the module's own forward, where its weights are shards; call engine(...), "
                "whose forward may call any part, or use torch.no_grad()"
            )
        with outside_inference_mode(), torch.no_grad():
            root.unshard()
        open_for.append(part)

    def leave(part: nn.Module, args: Any, result: Any) -> None:
        if open_for and open_for[-1] is part:
            open_for.pop()
            root.reshard()

    for part in root_parts(module):
        part.register_forward_pre_hook(enter, with_kwargs=True)
        part.register_forward_hook(leave, always_call=True)
