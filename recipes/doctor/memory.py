"""Bytes of one rank, from shapes alone. Every formula of the plan stands here; plan.py says which model needs which, and when.

A model's parameters are cut along their first dimension into S shards (S ranks; under ZeRO 0 one shard, whole on every rank), of
which the fullest holds ceil(rows / S). m and c are the bytes of a master and of a compute number, V x H the head.

    shards          m x parameters / S; of a frozen model, and of the base below an adapter, c x parameters / S
    gradients       m x trained parameters / S
    optimizer       Adam, AdamW: 2 m x trained parameters / S, and 4 for each tensor's step count; Lion: m x; SGD: m x with
                    momentum, else nothing; Muon: m x of its matrices, the rest as AdamW; Adafactor (in fp32): a number for each
                    row of a shard and each column of a matrix, else one for each number, and the step counts
    fused copy      c x (parameters but for the head), and the head's counted rows: 0 where tied in fp32, c V H where packed (a
                    CPU's bf16), else 4 V H
    KV pool         blocks x bytes of a block, as inference_v2.cache has them
    gathered        c x (what is outside the layers, and of the layers two under ZeRO 0 and 3, all under 1 and 2)
    reduced         gradients of what is gathered, whole, on their way to the shards: c + 4 for each number of the head, embedding
                    and one layer, of which the head's own are 4 V H from the start of the loss on
    activations     tokens x (what each layer keeps for its backward: see `layer_activations`)
    logits          `tensors` x (loss_head.LOGIT_BYTES, or engine.loss_chunk_tokens x V x 4)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from hybrid.config import HybridConfig, OptimizerConfig
from hybrid.lora import inject
from hybrid.loss_head import LOGIT_BYTES
from hybrid.models import build_on_meta, scalar_config
from hybrid.optim.adafactor import is_factored
from hybrid.optim.optimizers import is_orthogonalized
from hybrid.policy import PolicyModule
from hybrid.sharding import local_rows
from inference_v2.cache import block_bytes, pool_sizes
from inference_v2.config import EngineConfig
from inference_v2.loading import LoadedModel
from inference_v2.models import REGISTRY
from inference_v2.models.spec import DecoderSpec, LayerSpec, RopeSpec

OUTSIDE = -1  # the layer of a parameter that is in none
TOWER = -2  # of one that text never runs


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    shape: tuple[int, ...]
    layer: int  # OUTSIDE, TOWER
    is_trained: bool
    is_adapter: bool = False  # A or B of one

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ModelShape:
    """A model as its config describes it; `spec` of an unregistered type is a guess at its attention."""

    parameters: tuple[Parameter, ...]
    head: str  # name of the head's parameter
    spec: DecoderSpec
    is_registered: bool
    num_rows: int  # of the head that count
    is_tied: bool  # the head is the embedding

    def of(self, wanted: Callable[[Parameter], bool]) -> list[Parameter]:
        return [p for p in self.parameters if wanted(p)]

    @property
    def has_adapter(self) -> bool:
        return any(p.is_adapter for p in self.parameters)

    @property
    def exported(self) -> list[Parameter]:
        """Those of the Hugging Face folder, in which an adapter is merged."""
        return self.of(lambda p: not p.is_adapter)

    @property
    def trained(self) -> list[Parameter]:
        return self.of(lambda p: p.is_trained)

    @property
    def largest_layer(self) -> list[Parameter]:
        layers = {p.layer for p in self.parameters if p.layer >= 0}
        by_layer = [[p for p in self.parameters if p.layer == i] for i in layers]
        return max(by_layer, key=sizes, default=[])


def sizes(parameters: Iterable[Parameter]) -> int:
    return sum(p.size for p in parameters)


def read_headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Per tensor of a folder's safetensors its dtype and shape, from the files' headers."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found |= {name: (info["dtype"], tuple(info["shape"])) for name, info in header.items() if name != "__metadata__"}
    return found


def read_shape(loaded: LoadedModel, config: HybridConfig, *, scalar: bool = False, is_trained: bool = True) -> ModelShape:
    """The module of `loaded`'s config, made without memory. `config` says what is frozen, which rows count, and a trained model's
    adapter."""
    hf_config = scalar_config(loaded.hf_config, loaded.tokenizer, loaded.eos_token_ids) if scalar else loaded.hf_config
    hf = build_on_meta(hf_config, config, torch.float32, scalar=scalar)
    adapter = inject(hf, config.lora, torch.float32)[0] if is_trained and config.lora is not None else None
    module = PolicyModule(hf, adapter=adapter)
    registered = hf_config.model_type in REGISTRY
    spec = loaded.spec if registered else _guessed_spec(hf_config.get_text_config())
    layer_of = {id(p): i for i, layer in enumerate(module.layers) for p in layer.parameters()}
    towers = spec.ignored_prefixes
    named = dict(module.named_hf_parameters())

    def parameter(name: str) -> Parameter:
        layer = TOWER if towers and name.startswith(towers) else layer_of.get(id(named[name]), OUTSIDE)
        frozen = layer == TOWER or any(re.search(pattern, name) for pattern in config.freeze)
        frozen |= adapter is not None and name not in adapter.tensors
        low_rank = adapter is not None and name in adapter.low_rank
        return Parameter(name, tuple(named[name].shape), layer, is_trained and not frozen, low_rank)

    weight = module.head_module.weight
    head = next(name for name, p in named.items() if p is weight)
    tied = weight is hf.get_input_embeddings().weight
    rows = 1 if scalar else min(config.vocab_limit or loaded.vocab_limit or spec.vocab_size, spec.vocab_size)
    return ModelShape(tuple(map(parameter, named)), head, spec, registered, rows, tied)


def _guessed_spec(text: object) -> DecoderSpec:
    """Of a type that has no table: grouped-query attention in every layer, under the usual names of its config."""

    def read(*names: str, default: int = 0) -> int:
        return next((int(v) for n in names if isinstance(v := getattr(text, n, None), int)), default)

    hidden, heads = read("hidden_size"), read("num_attention_heads", default=1)
    head_dim = read("head_dim", default=hidden // max(heads, 1))
    return DecoderSpec(
        model_type=getattr(text, "model_type", ""),
        vocab_size=read("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read("intermediate_size", "n_inner", default=4 * hidden),
        num_heads=heads,
        num_kv_heads=read("num_key_value_heads", default=heads),
        head_dim=head_dim,
        norm_eps=0.0,
        layers=(LayerSpec(),) * read("num_hidden_layers"),
        rope=RopeSpec("default", 1.0, head_dim),
        max_position_embeddings=read("max_position_embeddings"),
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
    )


# -- the formulas


def shard_bytes(parameters: Iterable[Parameter], shards: int, itemsize: int, *, rank: int = 0) -> int:
    """Of shard `rank`; shard 0 is the fullest."""
    return sum(_local_size(p.shape, shards, rank) for p in parameters) * itemsize


def held_bytes(shape: ModelShape, shards: int, master: int, compute: int, *, rank: int = 0) -> int:
    """Shards of a model that is trained."""
    below = shape.of(lambda p: shape.has_adapter and not p.is_trained)
    own = shape.of(lambda p: p.is_trained or not shape.has_adapter)
    return shard_bytes(own, shards, master, rank=rank) + shard_bytes(below, shards, compute, rank=rank)


def _local_size(shape: Sequence[int], shards: int, rank: int) -> int:
    rows = local_rows(shape[0], shards, rank)
    return (rows.stop - rows.start) * prod(shape[1:])


def optimizer_bytes(
    parameters: Sequence[Parameter], config: OptimizerConfig, shards: int, itemsize: int, *, rank: int = 0
) -> int:
    """Of trained `parameters`."""
    if config.name == "adafactor":
        return sum(4 + _adafactor_bytes(p, shards, rank) for p in parameters)
    momenta = [p for p in parameters if config.name == "muon" and is_orthogonalized(config, p.name, p.shape)]
    if config.name == "lion" or (config.name == "sgd" and config.momentum):
        momenta = list(parameters)
    held = {p.name for p in momenta}
    rest = [p for p in parameters if p.name not in held] if config.name != "sgd" else []
    moments = shard_bytes(momenta, shards, itemsize, rank=rank) + 2 * shard_bytes(rest, shards, itemsize, rank=rank)
    return moments + 4 * len(rest)


def _adafactor_bytes(parameter: Parameter, shards: int, rank: int) -> int:
    shape = parameter.shape
    if not is_factored(shape):
        return 4 * _local_size(shape, shards, rank)
    columns = (*shape[:-2], 1, shape[-1])
    held = prod(columns) if len(shape) == 2 else _local_size(columns, shards, rank)
    return 4 * (_local_size((*shape[:-1], 1), shards, rank) + held)


def fused_copy_bytes(shape: ModelShape, itemsize: int, *, packs: bool) -> int:
    """`packs`: whether the kernels pack a bf16 head. As hybrid.modes.copy_bytes of the sharded model; an unregistered type's copy
    is its whole module, and its head in fp32 once more."""
    text = [p for p in shape.exported if p.layer != TOWER]
    if not shape.is_registered:
        return sizes(text) * itemsize + (0 if itemsize == 4 else shape.spec.vocab_size * shape.spec.hidden_size * 4)
    head = set() if shape.is_tied else {shape.head}
    per_weight = itemsize if packs and itemsize == 2 else 4
    own_head = 0 if shape.is_tied and itemsize == 4 else shape.num_rows * shape.spec.hidden_size * per_weight
    return sizes(p for p in text if p.name not in head) * itemsize + own_head


def kv_pool_bytes(spec: DecoderSpec, config: EngineConfig, dtype: torch.dtype, max_model_len: int) -> int:
    blocks = pool_sizes(
        spec,
        config.block_size,
        dtype,
        max_model_len=max_model_len,
        max_running=config.max_running,
        cache_bytes=config.cache_bytes,
    )
    return sum(n * size for n, size in zip(blocks, block_bytes(spec, config.block_size, dtype), strict=True))


def gathered_bytes(shape: ModelShape, itemsize: int, zero_stage: int) -> int:
    """Whole weights during a forward and backward."""
    outside = sizes(shape.of(lambda p: p.layer == OUTSIDE))
    if zero_stage in (1, 2):
        return (outside + sizes(shape.of(lambda p: p.layer >= 0))) * itemsize
    return (outside + 2 * sizes(shape.largest_layer)) * itemsize


def reduced_bytes(shape: ModelShape, itemsize: int) -> int:
    """Whole gradients on their way to the shards."""
    outside = shape.of(lambda p: p.layer == OUTSIDE and p.is_trained)
    layer = [p for p in shape.largest_layer if p.is_trained]
    head = sizes(p for p in outside if p.name == shape.head)
    return (sizes(outside) + sizes(layer)) * (itemsize + 4) + head * 4


def layer_activations(spec: DecoderSpec, itemsize: int, *, fused: bool) -> int:
    """Bytes that one layer keeps of a token for its backward.

    fused (a CPU's kernels): inputs and outputs of two norms, queries and keys before and after norm and rotation, values, what
    attention gives (and its log-sum-exp), gate, up and their product. transformers' own modules keep the norms' inputs in fp32
    and before their weight, both factors of the rotation, and the activated gate as well.
    """
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    normed = spec.names.q_norm is not None
    width = 4 * hidden + (3 if normed else 2) * queries + (3 if normed else 2) * keys + 3 * inner
    if fused:
        return width * itemsize + 4 * spec.num_heads
    wide = 2 * hidden + (queries + keys if normed else 0)
    return (width + wide + inner) * itemsize + wide * (4 if itemsize == 2 else 0) + 4 * spec.num_heads


def activation_bytes(spec: DecoderSpec, tokens: int, itemsize: int, *, fused: bool, checkpointing: bool) -> int:
    layer = tokens * layer_activations(spec, itemsize, fused=fused)
    last = tokens * spec.hidden_size * 3 * itemsize  # the last norm's input and output, and the rows that the head reads
    if checkpointing:
        return len(spec.layers) * tokens * spec.hidden_size * itemsize + layer + last
    return len(spec.layers) * layer + last


def forward_bytes(spec: DecoderSpec, tokens: int, itemsize: int) -> int:
    """What one layer holds at once where nothing is kept for a backward."""
    widest = max(2 * spec.intermediate_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    return tokens * (3 * spec.hidden_size + widest) * itemsize


def logit_bytes(num_rows: int, chunk_tokens: int | None, tokens: int, tensors: int) -> int:
    """`tensors` of [chunk, num_rows] in fp32, of `tokens` that count at most."""
    chunk = chunk_tokens or max(1, LOGIT_BYTES // (4 * num_rows))
    return min(chunk, tokens) * num_rows * 4 * tensors
