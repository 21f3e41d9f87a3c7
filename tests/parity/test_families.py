"""Every registered family against the Hugging Face forward, on tiny random configs: the tolerances of the numerics contract."""

from __future__ import annotations

import pytest
import torch
from paged import ModuleSource, Runner
from tiny import FAMILIES, tiny_config, tiny_model
from torch import Tensor

from inference_v2.kernels import get_kernels
from inference_v2.models import spec_of
from inference_v2.models.families import exaone4_layer_types
from inference_v2.rope import force_table
from inference_v2.weights import FusedWeights, StreamedWeights

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
SHAPES = {"9:3x64": (9, 3, 64), "14:2x80": (14, 2, 80), "40:8x96": (40, 8, 96), "3:1x128": (3, 1, 128), "2:2x256": (2, 2, 256)}
WINDOW = 8
SLIDING = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "mistral": {"sliding_window": WINDOW},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": 4},
    "exaone4_5": {"sliding_window": WINDOW, "sliding_window_pattern": 4},
}
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16,
                 "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)]},
}  # fmt: skip


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    allowed = TOLERANCE[dtype] * want.abs().max()
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= allowed
    top = want.topk(2, dim=-1)
    clear = top.values[..., 0] - top.values[..., 1] > allowed
    assert torch.equal(got.argmax(-1)[clear], top.indices[..., 0][clear])


def build(family: str, dtype: torch.dtype = torch.float32, **overrides: object) -> torch.nn.Module:
    """Weights large enough to make attention sharp; in bf16 smaller ones, since there HF's own noise grows with them."""
    overrides = {"initializer_range": 0.15 if dtype == torch.float32 else 0.06} | overrides
    return tiny_model(family, dtype=dtype, **overrides)


def runner(
    model: torch.nn.Module, dtype: torch.dtype = torch.float32, *, batch_invariant: bool = False, **kwargs
) -> Runner:  # fmt: skip
    spec = spec_of(model.config)
    kernels = get_kernels("auto", "cpu", dtype)
    weights = FusedWeights(spec, dtype, "cpu", batch_invariant=batch_invariant, kernels=kernels, **kwargs)
    weights.refresh(ModuleSource(model), version=0)
    return Runner(spec, weights, dtype)


def hf_logits(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0].float()


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(3, 79, (n,), generator=generator) for n in lengths]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
@EVERY_FAMILY
def test_head_counts_and_widths(family: str, shape: str, dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = SHAPES[shape]
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": heads * -(-64 // heads),
    }
    model = build(family, dtype, num_hidden_layers=2, tie_word_embeddings=kv_heads == 3, **sizes)
    (ids,) = sequences(17)
    run = runner(model, dtype)
    (prefill,) = run.step([(0, ids[:16])])
    (decode,) = run.step([(0, ids[16:])])
    close(torch.cat([prefill, decode]), hf_logits(model, ids), dtype)


@DTYPES
@EVERY_FAMILY
def test_prefill_chunks_and_decode_agree_with_the_forward(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype, **SLIDING.get(family, {}))
    first, second, third = sequences(37, 19, 11)
    run = runner(model, dtype)
    whole = run.step([(0, first)])[0]
    chunks = torch.cat([run.step([(1, part)])[0] for part in first.split(7)])
    tokens = torch.cat([run.step([(2, part)])[0] for part in first.split(1)])
    for got in (whole, chunks, tokens):
        close(got, hf_logits(model, first), dtype)
    ragged = [run.step([(3, second[:18]), (4, third[:4])])]  # then a decode, a chunk and a new prompt in one batch
    ragged.append(run.step([(3, second[18:]), (4, third[4:]), (5, first[:10])]))
    close(torch.cat([ragged[0][0], ragged[1][0]]), hf_logits(model, second), dtype)
    close(torch.cat([ragged[0][1], ragged[1][1]]), hf_logits(model, third), dtype)
    close(ragged[1][2], hf_logits(model, first[:10]), dtype)


@DTYPES
@pytest.mark.parametrize("family", SLIDING)
def test_windows_at_their_edges(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype, **SLIDING[family])
    run = runner(model, dtype)
    assert WINDOW in run.spec.windows
    prompts = sequences(WINDOW, WINDOW + 1, WINDOW + 2, 2 * WINDOW + 1, 3 * WINDOW + 5)
    prefill = run.step([(r, ids[:-1]) for r, ids in enumerate(prompts)])
    decode = run.step([(r, ids[-1:]) for r, ids in enumerate(prompts)])
    for r, ids in enumerate(prompts):
        close(torch.cat([prefill[r], decode[r]]), hf_logits(model, ids), dtype)


@DTYPES
@pytest.mark.parametrize("length", [15, 16, 17, 40])
@pytest.mark.parametrize("kind", ROPE)
@EVERY_FAMILY
def test_rope_types(family: str, kind: str, length: int, dtype: torch.dtype) -> None:
    """dynamic and longrope have no oracle of their own in HF: there its forward is given our table."""
    parameters = {"rope_theta": 1e4} | ROPE[kind]
    model = build(family, dtype, num_hidden_layers=2, max_position_embeddings=32, head_dim=16, rope_parameters=parameters)
    run = runner(model, dtype)
    if kind in ("dynamic", "longrope"):
        force_table(model, run.spec.rope, run.max_len)
    (ids,) = sequences(length)
    split = length // 2
    got = torch.cat([run.step([(0, ids[:split])])[0], *(run.step([(0, part)])[0] for part in ids[split:].split(1))])
    close(got, hf_logits(model, ids), dtype)


@DTYPES
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": None}),
        ("mistral", {"sliding_window": None}),
        ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
        ("exaone4", {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"]}),
        ("exaone4_5", {"tie_word_embeddings": True, "rope_parameters": ROPE["llama3"]}),
    ],
)
def test_flags(family: str, overrides: dict, dtype: torch.dtype) -> None:
    model = build(family, dtype, **overrides)
    (ids,) = sequences(29)
    close(runner(model, dtype).step([(0, ids)])[0], hf_logits(model, ids), dtype)


@EVERY_FAMILY
def test_lone_tokens_are_bit_equal_to_the_module_in_bf16(family: str) -> None:
    """Attention over one key is exact, so the roundings of norms, rope, silu and residuals must be the module's own. BLAS may sum
    a merged projection in another order than its parts, which shows in one token of many; a wrong dialect shows in all."""
    model = build(family, torch.bfloat16)
    run = runner(model, torch.bfloat16, packed=False)
    equal = 0
    for ids in torch.arange(3, 35).split(1):
        run.computed.clear()
        with torch.no_grad():
            hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0]
        with run.weights.final() as final:
            equal += torch.equal(run.step([(0, ids)])[0], final.head.logits(hidden))
    assert equal >= 24


@EVERY_FAMILY
def test_logits_do_not_depend_on_the_batch(family: str) -> None:
    model = build(family, **SLIDING.get(family, {}))
    prompts = sequences(9, 23, 30, 14)
    together = runner(model)
    batched = together.step(list(enumerate(prompts)))
    for r, ids in enumerate(prompts):
        alone = runner(model)
        got = torch.cat([alone.step([(0, part)])[0] for part in ids.split(1)])
        assert torch.equal(got.argmax(-1), batched[r].argmax(-1))
        assert (got.log_softmax(-1) - batched[r].log_softmax(-1)).abs().max() <= 1e-5


@DTYPES
@EVERY_FAMILY
def test_batch_invariant_logits_are_bit_equal_however_batched(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype, **SLIDING.get(family, {}))
    prompts = sequences(9, 23, 30, 14)
    together = runner(model, dtype, batch_invariant=True)
    batched = together.step(list(enumerate(prompts)))
    alone = runner(model, dtype, batch_invariant=True)
    for r, ids in enumerate(prompts):
        for parts in (ids.split(1), ids.split(5)):
            alone.computed.clear()
            assert torch.equal(torch.cat([alone.step([(0, part)])[0] for part in parts]), batched[r])


@EVERY_FAMILY
def test_streamed_weights_give_the_fused_logits(family: str) -> None:
    model = build(family)
    (ids,) = sequences(13)
    fused = runner(model, packed=False)
    streamed = Runner(fused.spec, StreamedWeights(fused.spec, ModuleSource(model), 0, torch.float32, "cpu"))
    assert torch.equal(streamed.step([(0, ids)])[0], fused.step([(0, ids)])[0])


@EVERY_FAMILY
def test_a_later_token_does_not_change_earlier_logits(family: str) -> None:
    model = build(family)
    (ids,) = sequences(12)
    changed = ids.clone()
    changed[-1] = 80
    first, second = runner(model).step([(0, ids), (1, changed)])
    assert torch.equal(first[:-1], second[:-1])
    assert not torch.equal(first[-1], second[-1])


@pytest.mark.parametrize(
    ("layers", "window", "pattern", "want"),
    [
        (4, None, 4, "GGGG"),
        (4, 8, None, "GGGG"),
        (8, 8, 4, "LLLGLLLG"),
        (6, 8, 4, "LLLGLL"),
        (6, 8, "LLLG", "LLLGLG"),  # letters: the last layer is always global
        (8, 8, "LLLG", "LLLGLLLG"),
    ],
)
def test_exaone4_pattern_forms(layers: int, window: int | None, pattern: int | str | None, want: str) -> None:
    letters = {"sliding_attention": "L", "full_attention": "G"}
    assert "".join(letters[kind] for kind in exaone4_layer_types(layers, window, pattern)) == want


@pytest.mark.parametrize("pattern", ["LLXG", "", -1, 1.5])
def test_exaone4_pattern_refused(pattern: object) -> None:
    with pytest.raises(ValueError, match=r"sliding_window_pattern=.*allowed"):
        exaone4_layer_types(4, 8, pattern)


def test_exaone4_rotates_on_sliding_layers_only_when_there_is_a_window() -> None:
    assert [layer.rope for layer in spec_of(tiny_config("exaone4")).layers] == [True, True, True, False]
    no_window = tiny_config("exaone4", sliding_window=None, layer_types=["full_attention"] * 4)
    assert all(layer.rope for layer in spec_of(no_window).layers)


def test_max_window_layers_is_where_the_window_begins() -> None:
    config = tiny_config("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=3)
    assert [layer.window for layer in spec_of(config).layers] == [None, None, None, 8]


def test_unregistered_type_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"'qwen3_moe' is not registered; nearest: qwen3.*allowed: llama"):
        spec_of(tiny_config("qwen3_moe"))
