"""Rollouts of model types outside the registry: a plain HF module on every rank, filled from the shards at each swap."""

from __future__ import annotations

from dataclasses import replace

import torch

from hybrid.models import ShardedModel
from hybrid.sharding import ShardedSource
from inference_v2.models.fallback import ModuleDecoder, ModuleWeights, open_module


class ModuleCopy(ModuleWeights):
    """`module` and `head` with the verbs of FusedWeights."""

    def __init__(self, weights: ModuleWeights, device: torch.device) -> None:
        super().__init__(weights.module, weights.head, version=-1)
        self._device = device
        self._shapes: dict[str, torch.Size] = {}  # of parameters that `free` has emptied

    @torch.no_grad()
    def refresh(self, source: ShardedSource, version: int) -> None:
        """Copy every weight, one scope at a time. Does nothing when `version` is what is held already."""
        self.onload()
        if version == self.version:
            return
        self.version = -1  # a refresh that fails half-way leaves no usable weights
        parameters = dict(self.module.named_parameters())
        left = set(source.names())
        for prefix in (*source.prefixes, ""):
            with source.scope(prefix):
                for name in sorted(n for n in left if n.startswith(f"{prefix}." if prefix else "")):
                    parameter = parameters[name]
                    if name in self._shapes:
                        parameter.data = parameter.new_empty(self._shapes.pop(name))
                    parameter.copy_(source.get(name))
                    left.remove(name)
        head = self.module.get_output_embeddings()
        bias = None if head.bias is None else head.bias.float()
        self.head = replace(self.head, weight=head.weight.float(), bias=bias)
        self.version = version

    def offload(self) -> None:
        self.module.to("cpu")  # type: ignore[arg-type]

    def onload(self) -> None:
        self.module.to(self._device)  # type: ignore[arg-type]

    def free(self) -> None:
        """Drop the weights; the next use needs a refresh."""
        self.version = -1
        for name, parameter in self.module.named_parameters():
            self._shapes.setdefault(name, parameter.shape)
            parameter.data = parameter.new_empty(0)
        self.head = replace(self.head, weight=self.head.weight.new_empty(0), bias=None)


def open_module_copy(model: ShardedModel) -> tuple[ModuleDecoder, ModuleCopy]:
    """Raises ValueError for a module that paged attention cannot serve, or that did not come from a folder."""
    kind = model.hf_config.model_type
    if model.path is None:
        raise ValueError(
            f"model_type={kind!r} is not registered and the module came from memory; to generate, load it from a folder"
        )
    decoder, weights = open_module(
        model.path,
        model.kernels,
        dtype=getattr(torch, model.config.compute_dtype),
        device=model.mesh.device,
        max_positions=model.max_positions,
        vocab_limit=model.vocab_limit,
        trust_remote_code=model.config.trust_remote_code,
    )
    copy = ModuleCopy(weights, model.mesh.device)
    copy.free()  # the folder's weights are not the trained ones
    return decoder, copy
