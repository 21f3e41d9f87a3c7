"""From named weights to the fused layout the decoder reads.

`WeightSource` is the one way in: a HF folder (loading.FolderSource) and the sharded trainer (hybrid.modes.ShardedSource) are two
of them, so loading from disk and refreshing from the trainer are the same code. Everything is copied; no source tensor is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from inference_v2.head import Head
from inference_v2.kernels import REFERENCE, Kernels
from inference_v2.linear import Linear, Pack, choose_pack, pad_rows, safe_rows
from inference_v2.models.names import NORMS, check_names, head_bias_name, layer_names, layer_shapes
from inference_v2.models.spec import DecoderSpec
from inference_v2.pages import Arena


class WeightSource(Protocol):
    """Weights by *module* name (`model.layers.0.self_attn.q_proj.weight`)."""

    def names(self) -> Iterable[str]:
        """Every name that `get` can serve."""
        ...

    def scope(self, prefix: str) -> AbstractContextManager[None]:
        """Inside it `get` serves the names below `prefix` ("" for those outside the layers); a sharded source gathers here,
        once, and reshards at exit. The same order of scopes on every rank."""
        ...

    def get(self, name: str, rows: slice | None = None) -> Tensor:
        """The whole tensor or some of its rows (dim 0). The caller copies what it keeps. Raises KeyError."""
        ...


@dataclass
class LayerWeights:
    """One layer, merged: qkv rows are q | k | v, gate_up rows are gate | up. None: the family has no such norm."""

    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None
    pre_attention_norm: Tensor | None = None  # [H]
    post_attention_norm: Tensor | None = None
    pre_mlp_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None

    @property
    def nbytes(self) -> int:
        norms = [norm for name in NORMS if (norm := getattr(self, name)) is not None]
        return sum(part.nbytes for part in (self.qkv, self.o, self.gate_up, self.down, *norms))


@dataclass
class FinalWeights:
    norm: Tensor  # [H]
    head: Head


class ModelWeights(Protocol):
    """What the decoder reads. Each part is valid inside its context only."""

    version: int
    stack: Any  # all layers at once (Kernels.bind_layers), or None

    def embed(self) -> AbstractContextManager[Tensor]: ...  # [V, H]
    def layer(self, i: int) -> AbstractContextManager[LayerWeights]: ...
    def final(self) -> AbstractContextManager[FinalWeights]: ...


@dataclass(frozen=True)
class _PaddedHead(Head):
    """A head whose logits do not depend on how many rows are asked for at once."""

    min_rows: int = 1

    def logits(self, hidden: Tensor, into: Tensor | None = None) -> Tensor:
        rows = hidden.flatten(0, -2)
        return pad_rows(super().logits, rows, self.min_rows).unflatten(0, hidden.shape[:-1])


class FusedWeights:
    """The full copy in the compute dtype: projections merged, and packed on CPUs (`linear.choose_pack`; `packed` False: not). The
    head's products are exact: its rounded rows are packed for fp32 sums where `kernels` can, and else held in fp32.

    Layer objects are made once and written over at each `refresh`. `batch_invariant` pads linears and head (linear.Linear).
    `version` is -1 before the first refresh and after `free`. `placement` counts moves: while it stays, so do all addresses.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: torch.dtype,
        device: torch.device | str,
        packed: bool | None = None,
        vocab_limit: int | None = None,
        batch_invariant: bool = False,
        kernels: Kernels = REFERENCE,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.empty(0, device=device).device  # with its index, as tensors say it
        self.version = -1
        self.placement = 0
        self._kernels = kernels
        self._arena = Arena()
        self._pack = None if packed is False else choose_pack(kernels, dtype, self.device, self._arena)
        self._rows = _head_rows(spec, vocab_limit)
        self._probed: dict[tuple[int, ...], int] | None = {} if batch_invariant else None
        self._embed: Tensor | None = None
        self._final: FinalWeights | None = None
        self._layers: list[LayerWeights] = []
        self.stack: Any = None

    def refresh(self, source: WeightSource, version: int) -> None:
        """Copy everything from `source`, one scope at a time ("" first, then each layer). Does nothing when `version` is
        what is held already. Raises ValueError with both lists when names are missing or surplus."""
        self.onload()
        if version == self.version:
            return
        check_names(self.spec, source.names())
        self.version, self.stack = -1, None  # a refresh that fails half-way leaves no usable weights
        if not self._layers:
            self._layers = [_new_layer(self._pack, self._probed) for _ in self.spec.layers]
        with source.scope(""):
            self._embed = _copy(self._embed, _embedding(self.spec, source), self.dtype, self.device)
            self._final = _load_final(
                self._final, self.spec, source, self.dtype, self.device, self._rows, self._embed, self._probed, self._kernels,
                self._arena,
            )  # fmt: skip
        for i, layer in enumerate(self._layers):
            with source.scope(self.spec.names.layer.format(i=i)):
                _load_layer(layer, self.spec, i, source, self.dtype, self.device)
        bind = self._kernels.bind_layers
        self.stack = None if bind is None else bind(self.spec, self._layers)
        self.version = version

    def embed(self) -> AbstractContextManager[Tensor]:
        assert self._embed is not None, "weights used before refresh()"
        return nullcontext(self._embed)

    def layer(self, i: int) -> AbstractContextManager[LayerWeights]:
        return nullcontext(self._layers[i])

    def final(self) -> AbstractContextManager[FinalWeights]:
        assert self._final is not None, "weights used before refresh()"
        return nullcontext(self._final)

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        if self._embed is None or self._final is None:
            return 0
        head = self._final.head
        held = [t for t in (head.weight, head.bias, self._embed, self._final.norm) if t is not None and not t.is_meta]
        tensors = {t.data_ptr(): t.nbytes for t in held}
        packed = 0 if head.product is None else head.weight.nbytes  # with rows of the compute dtype
        return sum(tensors.values()) + packed + sum(layer.nbytes for layer in self._layers)

    def offload(self) -> None:
        """Move the copy to host memory until `onload` or the next `refresh`; on a CPU it is there already."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self._embed is None or self._final is None or self._embed.device == device:
            return
        self.placement += 1
        self.stack = None
        head, shared = self._final.head, self._final.head.weight.data_ptr() == self._embed.data_ptr()
        self._embed = self._embed.to(device)
        weight = self._embed[: head.weight.shape[0]] if shared else head.weight.to(device)
        bias = None if head.bias is None else head.bias.to(device)
        self._final = FinalWeights(self._final.norm.to(device), replace(head, weight=weight, bias=bias))
        for layer in self._layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear.move(device)
            for name in NORMS:
                if (norm := getattr(layer, name)) is not None:
                    setattr(layer, name, norm.to(device))

    def free(self) -> None:
        """Drop everything; the next use needs a refresh."""
        self.version = -1
        self.placement += 1
        self._arena.drop()
        self._embed, self._final, self._layers, self.stack = None, None, [], None


class StreamedWeights:
    """The same layout built inside the source's scope, one layer at a time, nothing kept: for models whose full copy does
    not fit. Every pass enters the scopes "", each layer, "" in this order, so that ranks which gather in them stay in step.
    """

    stack: None = None

    def __init__(
        self,
        spec: DecoderSpec,
        source: WeightSource,
        version: int,
        dtype: torch.dtype,
        device: torch.device | str,
        vocab_limit: int | None = None,
        batch_invariant: bool = False,
        kernels: Kernels = REFERENCE,
    ) -> None:
        check_names(spec, source.names())
        self.spec = spec
        self.version = version
        self._source = source
        self._kernels = kernels
        self._dtype = dtype
        self._device = torch.device(device)
        self._rows = _head_rows(spec, vocab_limit)
        self._probed: dict[tuple[int, ...], int] | None = {} if batch_invariant else None
        self._layer: LayerWeights | None = None  # one layer's buffers, written over by the next

    @contextmanager
    def embed(self) -> Iterator[Tensor]:
        with self._source.scope(""):
            yield _embedding(self.spec, self._source).to(self._device, self._dtype)

    @contextmanager
    def layer(self, i: int) -> Iterator[LayerWeights]:
        if self._layer is None:
            self._layer = _new_layer(None, self._probed)
        with self._source.scope(self.spec.names.layer.format(i=i)):
            _load_layer(self._layer, self.spec, i, self._source, self._dtype, self._device)
            yield self._layer

    @contextmanager
    def final(self) -> Iterator[FinalWeights]:
        with self._source.scope(""):
            yield _load_final(
                None, self.spec, self._source, self._dtype, self._device, self._rows, None, self._probed, self._kernels
            )

    @property
    def nbytes(self) -> int:
        return 0 if self._layer is None else self._layer.nbytes


def _new_layer(pack: Pack | None, probed: dict[tuple[int, ...], int] | None) -> LayerWeights:
    return LayerWeights(Linear(pack, probed), Linear(pack, probed), Linear(pack, probed), Linear(pack, probed))


def _load_layer(
    layer: LayerWeights, spec: DecoderSpec, i: int, source: WeightSource, dtype: torch.dtype, device: torch.device
) -> None:
    names, shapes = layer_names(spec, i), layer_shapes(spec)
    merged = ((layer.qkv, "qkv"), (layer.o, ("o",)), (layer.gate_up, ("gate", "up")), (layer.down, ("down",)))
    for linear, fields in merged:
        biases = [f"{field}.bias" for field in fields if f"{field}.bias" in names]
        linear.load(
            [_fetch(source, names[field], shapes[field]) for field in fields],
            [_fetch(source, names[field], shapes[field]) for field in biases] or None,
            dtype,
            device,
        )
    for field in NORMS:
        if field in names:
            value = _fetch(source, names[field], shapes[field])
            setattr(layer, field, _copy(getattr(layer, field), value, dtype, device))


def _fetch(source: WeightSource, name: str, shape: tuple[int, ...], rows: slice | None = None) -> Tensor:
    value = source.get(name, rows)
    if not value.is_floating_point():
        raise ValueError(f"{name} holds {value.dtype}; allowed: floating-point weights, not quantised ones")
    if value.shape != shape:
        raise ValueError(f"{name} has shape {list(value.shape)}; allowed: {list(shape)}, as the config says")
    return value


def _load_final(
    old: FinalWeights | None,
    spec: DecoderSpec,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    embed: Tensor | None,
    probed: dict[tuple[int, ...], int] | None,
    kernels: Kernels,
    arena: Arena | None = None,
) -> FinalWeights:
    """`embed`: the copy to tie the head to, where one is kept. Head rows are rounded to the compute dtype, as the trainer's
    are, and then packed for products with fp32 sums, or held in fp32."""
    old_head = None if old is None else old.head
    norm = _copy(None if old is None else old.norm, _fetch(source, spec.names.final_norm, (spec.hidden_size,)), dtype, device)
    bias = None
    if spec.head_bias:
        rounded = _fetch(source, head_bias_name(spec), (rows,), slice(0, rows)).to(dtype)
        bias = _copy(None if old_head is None else old_head.bias, rounded, torch.float32, device)
    can_pack_head = dtype == torch.bfloat16 and device.type == "cpu" and kernels.pack_linear is not None
    if spec.tie_word_embeddings and embed is not None and (dtype == torch.float32 or can_pack_head):
        weight = embed[:rows]
    elif can_pack_head:
        name = spec.names.embed if spec.tie_word_embeddings else spec.names.head
        weight = _fetch(source, name, (rows, spec.hidden_size), slice(0, rows)).to(dtype)
    else:
        name = spec.names.embed if spec.tie_word_embeddings else spec.names.head
        rounded = _fetch(source, name, (rows, spec.hidden_size), slice(0, rows)).to(dtype)
        weight = _copy(None if old_head is None else old_head.weight, rounded, torch.float32, device)
    head = Head(weight, bias, rows)
    if can_pack_head:
        return FinalWeights(norm, _detached(head.packed(kernels, old_head, arena), embed))
    if probed is not None:
        if weight.shape not in probed:
            probed[weight.shape] = safe_rows(head.logits, weight.shape[1], torch.float32, device)
        head = _PaddedHead(weight, bias, rows, min_rows=probed[weight.shape])
    return FinalWeights(norm, head)


def _detached(head: Head, embed: Tensor | None) -> Head:
    """A packed head without the rows it was packed from, unless they are the embedding's."""
    return (
        head if embed is not None and head.weight.data_ptr() == embed.data_ptr() else replace(head, weight=head.weight.to("meta"))
    )


def _embedding(spec: DecoderSpec, source: WeightSource) -> Tensor:
    return _fetch(source, spec.names.embed, (spec.vocab_size, spec.hidden_size))


def _copy(into: Tensor | None, value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`value` in storage of our own, that of `into` when there is one."""
    if into is None:
        into = torch.empty(value.shape, dtype=dtype, device=device)
    return into.copy_(value)


def _head_rows(spec: DecoderSpec, vocab_limit: int | None) -> int:
    return spec.vocab_size if vocab_limit is None else min(vocab_limit, spec.vocab_size)
