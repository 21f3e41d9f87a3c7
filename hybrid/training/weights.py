"""The weights that an engine trains, whole: as one safetensors file, or in host memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybrid import sharding
from hybrid.export import save_weights
from hybrid.mesh import raise_together
from hybrid.training import engine_state
from hybrid.training.config.dtypes import TORCH_NAMES

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
    elif not save_filename.endswith(".safetensors") or Path(save_filename).name != save_filename:
        error = ValueError(
            f"save_filename={save_filename!r}; allowed: a file's name that ends in .safetensors, since no pickles are written; "
            "from_pretrained and load_state_dict(safetensors.torch.load_file(...)) read it"
        )
    raise_together(error)
    assert save_dir is not None
    zero = engine.config.zero_optimization
    if zero.stage == 3 and not zero.gather_16bit_weights_on_model_save:
        if engine.mesh.rank == 0:
            engine._log.warning("save_16bit_model wrote nothing: at stage 3 it needs %s: true", FLAG)
        return False
    sharding.reshard(engine.root)
    compute = engine.config.precision().compute
    dtype = None if compute is None else getattr(torch, TORCH_NAMES[compute])
    tensors = engine_state.named_tensors(engine, exclude_frozen=exclude_frozen_parameters)
    save_weights(Path(save_dir) / save_filename, tensors.items(), dtype=dtype)
    return True


@torch.no_grad()
def module_state_dict(engine: TrainingEngine, exclude_frozen_parameters: bool) -> dict[str, Tensor]:
    """See TrainingEngine.module_state_dict."""
    sharding.reshard(engine.root)
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
