"""Fused and streamed weights: layout, names, refresh, scopes, and linears whose bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from paged import ModuleSource, Runner
from tiny import FAMILIES, tiny_model

from inference_v2.kernels import get_kernels
from inference_v2.linear import PROBED_ROWS, Linear, can_pack, packed_product, pad_rows, safe_rows
from inference_v2.models import spec_of
from inference_v2.models.names import check_names
from inference_v2.weights import FusedWeights, StreamedWeights

CPU = torch.device("cpu")


class RecordingSource(ModuleSource):
    """Serves a name only inside the scope it belongs to, as a sharded source does."""

    def __init__(self, module: torch.nn.Module, layer_prefixes: list[str]) -> None:
        super().__init__(module)
        self.scopes: list[str] = []
        self._prefixes = layer_prefixes
        self._open: str | None = None

    @contextmanager
    def scope(self, prefix: str) -> Iterator[None]:
        assert self._open is None, "scopes do not nest"
        self.scopes.append(prefix)
        self._open = prefix
        yield
        self._open = None

    def get(self, name: str, rows: slice | None = None) -> torch.Tensor:
        owner = next((p for p in self._prefixes if name.startswith(p + ".")), "")
        assert self._open == owner, f"{name} asked for in scope {self._open!r}"
        return super().get(name, rows)


def source_of(model: torch.nn.Module) -> RecordingSource:
    spec = spec_of(model.config)
    return RecordingSource(model, [spec.names.layer.format(i=i) for i in range(spec.num_layers)])


def fused(model: torch.nn.Module, dtype: torch.dtype = torch.float32, **kwargs) -> FusedWeights:
    weights = FusedWeights(spec_of(model.config), dtype, "cpu", **kwargs)
    weights.refresh(ModuleSource(model), version=0)
    return weights


@pytest.mark.parametrize("packed", [False, True])
def test_projections_are_merged_in_order(packed: bool) -> None:
    model = tiny_model("qwen2")
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), fused(model, packed=packed and can_pack(torch.float32)).layer(1) as layer:
        want_qkv = torch.cat([attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)], dim=-1)
        want_mlp = torch.cat([mlp.gate_proj(x), mlp.up_proj(x)], dim=-1)
        torch.testing.assert_close(layer.qkv(x), want_qkv, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.gate_up(x), want_mlp, rtol=1e-5, atol=1e-5)


def test_scopes_are_entered_once_in_order_and_names_asked_for_inside() -> None:
    model = tiny_model("exaone4_5")
    layers = [f"model.language_model.layers.{i}" for i in range(4)]
    source = source_of(model)
    FusedWeights(spec_of(model.config), torch.float32, "cpu").refresh(source, 0)
    assert source.scopes == ["", *layers]
    source = source_of(model)
    streamed = StreamedWeights(spec_of(model.config), source, 0, torch.float32, "cpu")
    with streamed.embed():
        pass
    for i in range(4):
        with streamed.layer(i):
            pass
    with streamed.final():
        pass
    assert source.scopes == ["", *layers, ""]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_finds_its_names(family: str) -> None:
    for tied in (False, True):
        model = tiny_model(family, tie_word_embeddings=tied)
        check_names(spec_of(model.config), ModuleSource(model).names())


def test_missing_and_surplus_names_are_both_listed() -> None:
    model = tiny_model("qwen3")
    names = set(ModuleSource(model).names()) - {"model.norm.weight", "lm_head.weight"} | {"model.layers.9.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"missing \[lm_head.weight, model.norm.weight\]; surplus \[model.layers.9.mlp.up"):
        check_names(spec_of(model.config), names)


def test_surplus_alone_is_refused() -> None:
    model = tiny_model("llama")
    names = {*ModuleSource(model).names(), "model.layers.0.self_attn.q_norm.weight"}
    with pytest.raises(ValueError, match=r"missing \[\]; surplus \[model.layers.0.self_attn.q_norm.weight\]"):
        check_names(spec_of(model.config), names)


def test_a_forward_without_tokens_enters_every_scope() -> None:
    model = tiny_model("qwen3")
    source = source_of(model)
    spec = spec_of(model.config)
    run = Runner(spec, StreamedWeights(spec, source, 0, torch.float32, "cpu"))
    assert run.step([(0, torch.empty(0, dtype=torch.long))])[0].shape == (0, 96)
    assert source.scopes == ["", *(f"model.layers.{i}" for i in range(4)), ""]


def test_a_stored_tied_head_and_old_buffers_are_no_surplus() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    names = {*ModuleSource(model).names(), "lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}
    check_names(spec_of(model.config), names)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refresh_brings_new_values_into_the_same_objects(dtype: torch.dtype, tied: bool) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    weights = fused(model, dtype)
    with weights.layer(0) as layer, weights.final() as final, weights.embed() as embed:
        before = (layer, final.norm.data_ptr(), final.head.weight.data_ptr(), embed.data_ptr())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    weights.refresh(ModuleSource(model), version=1)
    other = fused(model, dtype)
    x = torch.ones(3, 64, dtype=dtype)
    with weights.layer(0) as layer, weights.final() as final, weights.embed() as embed:
        assert (layer, final.norm.data_ptr(), final.head.weight.data_ptr(), embed.data_ptr()) == before
        with other.layer(0) as fresh, other.final() as fresh_final, other.embed() as fresh_embed:
            assert torch.equal(layer.down(x.repeat(1, 2)[:, :96]), fresh.down(x.repeat(1, 2)[:, :96]))
            assert torch.equal(layer.pre_mlp_norm, fresh.pre_mlp_norm)
            assert torch.equal(final.head.logits(x), fresh_final.head.logits(x))
            assert torch.equal(embed, fresh_embed)


def test_an_equal_version_is_not_copied_again() -> None:
    model = tiny_model("llama")
    source = source_of(model)
    weights = FusedWeights(spec_of(model.config), torch.float32, "cpu")
    weights.refresh(source, 3)
    source.scopes.clear()
    weights.refresh(source, 3)
    assert (weights.version, source.scopes) == (3, [])


@pytest.mark.parametrize("name", ["model.layers.3.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_of_another_shape_is_refused_and_leaves_no_version(name: str) -> None:
    model = tiny_model("llama")
    weights = fused(model)
    source = ModuleSource(model)
    source._tensors[name] = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=rf"{name} has shape \[1, 1\]; allowed: \["):
        weights.refresh(source, 1)
    assert weights.version == -1


def test_copies_only() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    weights = fused(model, packed=False)
    x = torch.ones(2, 64)
    with torch.no_grad(), weights.layer(0) as layer, weights.final() as final:
        before = layer.qkv(x), final.head.logits(x), final.norm.clone()
        for parameter in model.parameters():
            parameter.zero_()
        assert all(torch.equal(a, b) for a, b in zip(before, (layer.qkv(x), final.head.logits(x), final.norm)))


def test_head_is_fp32_of_the_rounded_weights_and_cut_to_the_tokenizer() -> None:
    model = tiny_model("llama")
    weights = fused(model, torch.bfloat16, vocab_limit=79)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with weights.final() as final:
        assert final.head.weight.dtype == torch.float32
        assert final.head.weight.shape[0] == 79
        want = x.float() @ model.lm_head.weight.detach().bfloat16().float()[:79].T
        torch.testing.assert_close(final.head.logits(x), want, rtol=1e-5, atol=1e-5)


def test_nbytes_counts_everything_once() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    parameters = sum(p.numel() for p in model.parameters())
    assert fused(model).nbytes == 4 * parameters  # the head shares the embedding
    assert fused(model, torch.bfloat16).nbytes == 2 * parameters + 4 * 96 * 64  # and has fp32 rows of its own in bf16


def test_free_drops_all_and_offload_keeps_the_values() -> None:
    model = tiny_model("llama")
    weights = fused(model)
    weights.offload()
    weights.onload()
    assert (weights.version, weights.nbytes > 0) == (0, True)
    weights.free()
    assert (weights.version, weights.nbytes) == (-1, 0)
    weights.refresh(ModuleSource(model), 0)
    assert weights.nbytes > 0


def test_streamed_weights_keep_one_layer() -> None:
    model = tiny_model("llama")
    spec = spec_of(model.config)
    weights = StreamedWeights(spec, ModuleSource(model), 0, torch.float32, "cpu")
    for i in range(spec.num_layers):
        with weights.layer(i):
            pass
    one_layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    assert weights.nbytes == one_layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "onednn", "cpu"])
def test_batch_invariant_linear_rows_have_one_value(kind: str, dtype: torch.dtype) -> None:
    own = get_kernels("auto", "cpu", dtype).pack_linear if dtype == torch.bfloat16 else None
    pack = {"plain": None, "onednn": packed_product if can_pack(dtype) else None, "cpu": own}[kind]
    if pack is None and kind != "plain":
        pytest.skip("no packed linear for this dtype on this CPU")
    generator = torch.Generator().manual_seed(0)
    linear = Linear(pack, {})
    linear.load([torch.randn(48, 64, generator=generator)], [torch.randn(48, generator=generator)], dtype, CPU)
    x = torch.randn(150, 64, generator=generator).to(dtype)
    want = linear(x)
    for rows in (1, 2, 3, 5, 7, 8, 31, 33, 64, 100):
        for start in (0, 17):
            assert torch.equal(linear(x[start : start + rows]), want[start : start + rows])


def test_safe_rows_is_the_last_change_of_bits() -> None:
    def product(x: torch.Tensor) -> torch.Tensor:  # bits differ at 1, 2 and 7 rows
        return x + (1e-3 if x.shape[0] in (1, 2, 7) else 0.0)

    rows = safe_rows(product, 4, torch.float32)
    assert rows == 8
    x = torch.randn(7, 4)
    assert torch.equal(pad_rows(product, x, rows), x)
    assert safe_rows(lambda x: x + x.shape[0], 4, torch.float32) == PROBED_ROWS[-1]
    assert pad_rows(product, x[:0], rows).shape == (0, 4)
