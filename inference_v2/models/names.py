"""Which weights a spec needs, under which names and in which shapes. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from inference_v2.models.spec import DecoderSpec

NORMS = ("q_norm", "k_norm", "pre_attention_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm")
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


def layer_names(spec: DecoderSpec, i: int) -> dict[str, str]:
    """Field -> name of every weight of layer i: "q" -> "model.layers.0.self_attn.q_proj.weight", "q.bias" -> ..."""
    names, prefix = spec.names, spec.names.layer.format(i=i)
    biased = {"q": spec.qkv_bias, "k": spec.qkv_bias, "v": spec.qkv_bias, "o": spec.o_bias}
    found = {}
    for field in PROJECTIONS:
        found[field] = f"{prefix}.{getattr(names, field)}.weight"
        if biased.get(field, spec.mlp_bias):
            found[f"{field}.bias"] = f"{prefix}.{getattr(names, field)}.bias"
    for field in NORMS:
        if getattr(names, field) is not None:
            found[field] = f"{prefix}.{getattr(names, field)}.weight"
    return found


def layer_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Field, as in `layer_names` -> the shape its weight must have."""
    q, kv, hidden, inner = (
        spec.num_heads * spec.head_dim,
        spec.num_kv_heads * spec.head_dim,
        spec.hidden_size,
        spec.intermediate_size,
    )
    outputs = {"q": q, "k": kv, "v": kv, "o": hidden, "gate": inner, "up": inner, "down": hidden}
    shapes: dict[str, tuple[int, ...]] = {f"{field}.bias": (size,) for field, size in outputs.items()}
    shapes |= {field: (size, {"o": q, "down": inner}.get(field, hidden)) for field, size in outputs.items()}
    return shapes | {norm: (spec.head_dim if norm in ("q_norm", "k_norm") else hidden,) for norm in NORMS}


def root_names(spec: DecoderSpec) -> list[str]:
    """Names of the weights outside the layers; a tied head has none of its own."""
    names = [spec.names.embed, spec.names.final_norm]
    if not spec.tie_word_embeddings:
        names.append(spec.names.head)
    if spec.head_bias:
        names.append(head_bias_name(spec))
    return names


def check_names(spec: DecoderSpec, names: Iterable[str]) -> None:
    """Raises ValueError listing what is missing and what nobody reads. A tied head that is stored all the same, ignored
    prefixes and old checkpoints' `inv_freq` buffers are no surplus."""
    expected = set(root_names(spec)).union(*(layer_names(spec, i).values() for i in range(spec.num_layers)))
    given = {name for name in names if not name.startswith(spec.ignored_prefixes) and not name.endswith("rotary_emb.inv_freq")}
    surplus = given - expected - ({spec.names.head} if spec.tie_word_embeddings else set())
    missing = expected - given
    if missing or surplus:
        raise ValueError(f"weights do not fit model_type={spec.model_type}: missing {_some(missing)}; surplus {_some(surplus)}")


def head_bias_name(spec: DecoderSpec) -> str:
    return spec.names.head.removesuffix("weight") + "bias"


def _some(names: set[str]) -> str:
    """A list for an error line: sorted, cut after eight."""
    shown = ", ".join(sorted(names)[:8])
    return f"[{shown}{f', ... {len(names) - 8} more' if len(names) > 8 else ''}]"
