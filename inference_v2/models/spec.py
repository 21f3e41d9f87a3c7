"""DecoderSpec: everything the generic decoder must know of a family, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary table. `kind` and `parameters` are transformers' `rope_parameters`; the table is computed once per engine from
    `max_positions` (prompt + new tokens at most), and nothing switches on the length of a sequence later."""

    kind: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    theta: float
    rotary_dim: int  # < head_dim for partial rotation
    parameters: tuple[tuple[str, object], ...] = ()  # the factor keys, hashable
    max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    window: int | None = None  # a query at q sees keys k with q - window < k <= q; None: all of them
    rope: bool = True  # False: no positional rotation (NoPE)
    cache_group: int = 0  # layers of one window share block tables


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Module names of the checkpoint. `{i}` is the layer number. None: the family has no such weight."""

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{i}"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    q_norm: str | None = None
    k_norm: str | None = None
    pre_attention_norm: str | None = "input_layernorm"
    post_attention_norm: str | None = None  # on the branch's output, before the residual is added
    pre_mlp_norm: str | None = "post_attention_layernorm"
    post_mlp_norm: str | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    model_type: str
    vocab_size: int  # rows of the embedding; Head.vocab_limit cuts what the tokenizer does not know
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    max_position_embeddings: int
    names: WeightNames = field(default_factory=WeightNames)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    tie_word_embeddings: bool = False
    activation: Literal["silu"] = "silu"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    ignored_prefixes: tuple[str, ...] = ()  # weights of the checkpoint that the decoder rightly does not read (a vision tower)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def scale(self) -> float:
        """What multiplies the attention's scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each cache group, indexed by `LayerSpec.cache_group`."""
        found: dict[int, int | None] = {}
        for layer in self.layers:
            found.setdefault(layer.cache_group, layer.window)
        return tuple(found[g] for g in sorted(found))
