"""The registered families: each is a table of names and flags read off its Hugging Face config. No torch.

`config.rope_parameters` is where transformers 5 keeps theta; `head_dim` may be missing or None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from inference_v2.models.spec import DecoderSpec, LayerSpec, RopeSpec, WeightNames

QK_NORM = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
EXAONE4_NAMES = WeightNames(
    **QK_NORM,
    pre_attention_norm=None,
    post_attention_norm="post_attention_layernorm",
    pre_mlp_norm=None,
    post_mlp_norm="post_feedforward_layernorm",
)


def llama(config: Any) -> DecoderSpec:
    return replace(
        _spec(config, [None] * config.num_hidden_layers),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )


def qwen2(config: Any) -> DecoderSpec:
    return replace(_spec(config, _typed_windows(config)), qkv_bias=True)


def qwen3(config: Any) -> DecoderSpec:
    return replace(
        _spec(config, _typed_windows(config)),
        names=WeightNames(**QK_NORM),
        qkv_bias=config.attention_bias,
        o_bias=config.attention_bias,
    )


def mistral(config: Any) -> DecoderSpec:
    return _spec(config, [config.sliding_window] * config.num_hidden_layers)


def exaone4(config: Any) -> DecoderSpec:
    """Norms after each branch, and no rotation on global layers of a model that has a window (HF modeling_exaone4)."""
    windows = _typed_windows(config)
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    rope = [config.sliding_window is None or slides for slides in sliding]
    return replace(_spec(config, windows, rope), names=EXAONE4_NAMES)


def exaone4_5(config: Any) -> DecoderSpec:
    """The text model; the vision tower and the multi-token-prediction layers of the checkpoint are not read."""
    prefix = "model.language_model"
    return replace(
        exaone4(config.text_config),
        model_type="exaone4_5",
        names=replace(
            EXAONE4_NAMES,
            embed=f"{prefix}.embed_tokens.weight",
            final_norm=f"{prefix}.norm.weight",
            layer=f"{prefix}.layers.{{i}}",
        ),
        tie_word_embeddings=config.tie_word_embeddings,
        ignored_prefixes=("model.visual.", "mtp."),
    )


def exaone4_layer_types(num_layers: int, sliding_window: int | None, pattern: int | str | None) -> list[str]:
    """Expand `sliding_window_pattern`: None or 0: all full; n: every n-th layer full; "LLLG": repeated letters, L local and
    G global, with the last layer always global. transformers itself fails on None and on letters.

    Raises ValueError for anything else.
    """
    if sliding_window is None or pattern is None or pattern == 0:
        local = [False] * num_layers
    elif isinstance(pattern, int) and pattern > 0:
        local = [(i + 1) % pattern != 0 for i in range(num_layers)]
    elif isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
        local = [pattern[i % len(pattern)] == "L" and i != num_layers - 1 for i in range(num_layers)]
    else:
        raise ValueError(f"sliding_window_pattern={pattern!r}; allowed: None, an integer >= 0, or letters L and G such as 'LLLG'")
    return ["sliding_attention" if is_local else "full_attention" for is_local in local]


def _spec(config: Any, windows: Sequence[int | None], rope: Sequence[bool] | None = None) -> DecoderSpec:
    """What all families share: names of Llama, one cache group per distinct window. Raises ValueError for sizes that no model
    can have."""
    _check_sizes(config, windows)
    if config.hidden_act != "silu":
        raise ValueError(f"{config.model_type}: hidden_act={config.hidden_act!r}; allowed: silu")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % num_kv_heads:
        raise ValueError(f"{config.num_attention_heads} heads over {num_kv_heads} kv heads; allowed: a multiple")
    _refuse_partial_rotation(config)
    groups = list(dict.fromkeys(windows))
    rope = rope or [True] * len(windows)
    return DecoderSpec(
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_eps=config.rms_norm_eps,
        layers=tuple(LayerSpec(window, rotates, groups.index(window)) for window, rotates in zip(windows, rope, strict=True)),
        rope=rope_spec(config, head_dim),
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _check_sizes(config: Any, windows: Sequence[int | None]) -> None:
    sizes = [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ]
    sizes += [name for name in ("num_key_value_heads", "head_dim") if getattr(config, name, None) is not None]
    for name in sizes:
        if not getattr(config, name) >= 1:
            raise ValueError(f"{config.model_type}: {name}={getattr(config, name)}; allowed: >= 1")
    if not all(window is None or window >= 1 for window in windows):
        raise ValueError(f"{config.model_type}: sliding_window={config.sliding_window}; allowed: >= 1, or null for none")
    if not 0 <= config.rms_norm_eps < math.inf:
        raise ValueError(f"{config.model_type}: rms_norm_eps={config.rms_norm_eps}; allowed: finite and >= 0")


def rope_spec(config: Any, rotary_dim: int) -> RopeSpec:
    """The flat `rope_parameters` of a config. Raises ValueError where there is none (a table per layer type, or no theta)."""
    parameters = dict(config.rope_parameters or {})
    kind = parameters.pop("rope_type", "default")
    theta = parameters.pop("rope_theta", None)
    if not (isinstance(kind, str) and isinstance(theta, (int, float)) and 0 < theta < math.inf):
        given = config.rope_parameters
        raise ValueError(f"{config.model_type}: rope_parameters={given!r}; allowed: one flat table with rope_theta > 0")
    parameters.pop("partial_rotary_factor", None)  # its effect is rotary_dim
    frozen = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(parameters.items()))
    return RopeSpec(cast(Any, kind), float(theta), rotary_dim, frozen, config.max_position_embeddings)


def _refuse_partial_rotation(config: Any) -> None:
    """The Hugging Face modules of these families ignore `partial_rotary_factor` under the default type (so do we), and fail
    under the others."""
    parameters = config.rope_parameters or {}
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 and parameters.get("rope_type", "default") != "default":
        kind = parameters["rope_type"]
        raise ValueError(
            f"{config.model_type}: partial_rotary_factor with rope_type={kind!r}; allowed: 1.0, as in its training module"
        )


def _typed_windows(config: Any) -> list[int | None]:
    if unknown := set(config.layer_types) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"{config.model_type}: layer_types hold {min(unknown)!r}; allowed: sliding_attention, full_attention")
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
