"""The weights that an engine trains, whole: as one safetensors file, or in host memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybrid import sharding
from hybrid.export import save_weights
from hybrid.mesh import raise_together
from hybrid.training import engine_state

if TYPE_CHECKING:
    from hybrid.training.engine import TrainingEngine

FLAG = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def save_16bit_model(
    engine: TrainingEngine, save_dir: str | os.PathLike[str] | None, save_filename: str, exclude_frozen_parameters: bool
) -> bool:
    """See TrainingEngine.save_16bit_model."""
    error: ValueError | None = None
    if not isinstance(save_dir, str | os.PathLike) or not os.fspath(save_dir):
        error = ValueError(f"save_dir={save_dir!r}; allowed: the path of a folder")
    elif Path(save_filename).name != save_filename:
        error = ValueError(f"save_filename={save_filename!r}; allowed: a file's name")
    raise_together(error)
    if not save_filename.endswith(".safetensors"):  # the end of a long run is no place to refuse
        given, save_filename = save_filename, f"{save_filename.rpartition('.')[0] or save_filename}.safetensors"
        if engine.mesh.rank == 0:
            engine._log.warning("save_16bit_model writes %s in place of %s: no pickles are written here", save_filename, given)
    assert save_dir is not None
    zero = engine.config.zero_optimization
    if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save:
        if engine.mesh.rank == 0:
            engine._log.warning("save_16bit_model wrote nothing: at stage 3 it needs %s: true", FLAG)
        return False
    engine.stored_weights()
    gathered_in = sharding.gather_dtypes(engine.root)
    dtypes = {name: gathered_in[p] for name, p in engine._update.parameters.items() if p in gathered_in}
    tensors = engine_state.named_tensors(engine, exclude_frozen=exclude_frozen_parameters)
    save_weights(Path(save_dir) / save_filename, tensors.items(), dtypes=dtypes)
    return True


def guard_state_dict(module: nn.Module) -> None:
    """A sharded module's own state dict, or that of a part, holds this rank's rows under whole shapes, which torch.save would
    write as they are: let it name the verbs that gather instead."""

    def refuse_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        raise ValueError(
            "state_dict of a sharded module; use engine.module_state_dict() (whole, on every rank; transformers' save_pretrained "
            "takes it as state_dict=), save_16bit_model or save_checkpoint"
        )

    def refuse_load(*_: object) -> None:
        raise ValueError(
            "load_state_dict of a sharded module; use engine.load_module_state_dict(state), or load it before initialize"
        )

    for part in module.modules():
        part.register_state_dict_pre_hook(refuse_save)
        part.register_load_state_dict_pre_hook(refuse_load)


@torch.no_grad()
def load_module_state_dict(engine: TrainingEngine, state: Mapping[str, Tensor]) -> None:
    """See TrainingEngine.load_module_state_dict."""
    sharding.reshard(engine.root)
    held = engine_state.named_tensors(engine)
    tied = {name for name, _ in engine.module.named_parameters(remove_duplicate=False)} - held.keys()
    missing, surplus = sorted(held.keys() - state.keys()), sorted(state.keys() - held.keys() - tied)
    error = ValueError(f"the state does not fit: missing {missing[:3]}, surplus {surplus[:3]}") if missing or surplus else None
    wrong = [name for name in held.keys() & state.keys() if tuple(held[name].shape) != tuple(state[name].shape)]
    if error is None and wrong:
        error = ValueError(
            f"the state does not fit: {wrong[0]} is {list(state[wrong[0]].shape)}, not {list(held[wrong[0]].shape)}"
        )
    raise_together(error)
    for name, tensor in held.items():
        sharding.local(tensor).copy_(state[name][sharding.own_rows(tensor)] if isinstance(tensor, DTensor) else state[name])
    engine.weights_were_loaded()


@torch.no_grad()
def module_state_dict(engine: TrainingEngine, exclude_frozen_parameters: bool) -> dict[str, Tensor]:
    """See TrainingEngine.module_state_dict."""
    engine.stored_weights()
    names: dict[int, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = {group[0]: group for group in names.values()}
    state: dict[str, Tensor] = {}
    for name, tensor in engine_state.named_tensors(engine, exclude_frozen=exclude_frozen_parameters).items():
        held = tensor.detach()
        whole = held.full_tensor() if isinstance(held, DTensor) else held
        value = whole.to("cpu", copy=whole is held)
        state |= dict.fromkeys(tied.get(name, [name]), value)
    return state
