"""Rotary tables against transformers, and the table forced into its modules."""

from __future__ import annotations

import pytest
import torch
from tiny import FAMILIES, tiny_config, tiny_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inference_v2.models import spec_of
from inference_v2.models.families import rope_spec
from inference_v2.rope import RopeTable, force_table, inverse_frequencies

ORIGINAL = {"original_max_position_embeddings": 16}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)]}
SCALED = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL,
    "yarn": {"rope_type": "yarn", "factor": 4.0} | ORIGINAL,
    "yarn, betas": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5} | ORIGINAL,
    "yarn, not truncated": {"rope_type": "yarn", "factor": 32.0, "truncate": False} | ORIGINAL,
    "yarn, mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3} | ORIGINAL,
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25} | ORIGINAL,
    "longrope": {"rope_type": "longrope", "factor": 4.0} | LONG | ORIGINAL,
    "longrope, attention factor": {"rope_type": "longrope", "factor": 4.0, "attention_factor": 1.5} | LONG | ORIGINAL,
}


def config_of(parameters: dict, family: str = "llama", **overrides: object):
    return tiny_config(
        family, head_dim=16, max_position_embeddings=64, rope_parameters={"rope_theta": 5e5} | parameters, **overrides
    )


@pytest.mark.parametrize("length", [15, 16, 17, 200])
@pytest.mark.parametrize("name", SCALED)
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    config = config_of(SCALED[name])
    got, factor = inverse_frequencies(rope_spec(config, 16), length)
    want, want_factor = ROPE_INIT_FUNCTIONS[SCALED[name]["rope_type"]](config, seq_len=length)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    assert factor == pytest.approx(want_factor, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_theta_comes_from_rope_parameters(family: str) -> None:
    model = tiny_model(family, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    spec = spec_of(model.config).rope
    assert spec.theta == 5e5
    assert torch.equal(inverse_frequencies(spec, 8)[0], model.get_decoder().rotary_emb.inv_freq)


def test_old_style_scaling_is_read() -> None:
    config = tiny_config("llama", rope_theta=7e4, rope_scaling={"type": "linear", "factor": 2.0})
    spec = spec_of(config).rope
    assert (spec.kind, spec.theta, dict(spec.parameters)["factor"]) == ("linear", 7e4, 2.0)


def test_longrope_switches_with_the_table_and_not_with_the_sequence() -> None:
    spec = rope_spec(config_of(SCALED["longrope"]), 16)
    short, at_limit, beyond = (inverse_frequencies(spec, n)[0] for n in (3, 16, 17))
    assert torch.equal(short, at_limit)
    assert not torch.equal(at_limit, beyond)


def test_partial_rotation_has_frequencies_of_its_width() -> None:
    config = config_of({"rope_type": "default"})
    got, _ = inverse_frequencies(rope_spec(config, 8), 32)
    assert got.shape == (4,)
    torch.testing.assert_close(got, 5e5 ** (-torch.arange(0, 8, 2) / 8), rtol=1e-6, atol=0)


def test_partial_rotation_follows_the_training_module() -> None:
    """transformers' module of these families rotates the whole head under the default type, and fails under the others."""
    assert spec_of(config_of({"rope_type": "default", "partial_rotary_factor": 0.5})).rope.rotary_dim == 16
    with pytest.raises(ValueError, match=r"partial_rotary_factor with rope_type='linear'"):
        spec_of(config_of({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}))


def test_table_is_computed_in_fp32_and_then_rounded() -> None:
    spec = rope_spec(config_of(SCALED["yarn"]), 16)
    inv_freq, factor = inverse_frequencies(spec, 5000)
    table = RopeTable.build(spec, 5000, torch.bfloat16)
    want = (torch.arange(5000).float()[:, None] * inv_freq).cos() * factor
    assert torch.equal(table.cos, want.bfloat16())


@pytest.mark.parametrize("family", ["llama", "exaone4_5"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_forced_table_ignores_the_length(kind: str, family: str) -> None:
    model = tiny_model(config_of(SCALED[kind], family))
    spec = spec_of(model.config).rope
    force_table(model, spec, 200)
    rotary = model.get_decoder().rotary_emb
    want, factor = inverse_frequencies(spec, 200)
    for length in (4, 15, 17, 150, 5):
        cos, _ = rotary(torch.zeros(1), torch.arange(length)[None])
        angles = torch.arange(length).float()[:, None] * want
        assert torch.equal(cos[0, :, :8], angles.cos() * factor)


def test_forced_table_repairs_what_meta_and_bf16_lose() -> None:
    source = tiny_model("exaone4_5")
    with torch.device("meta"):
        module = type(source)(source.config)
    module.to_empty(device="cpu").to(torch.bfloat16)
    vision = module.model.visual.rotary_pos_emb.inv_freq.clone()
    force_table(module, spec_of(source.config).rope, 64)
    rotary = module.get_decoder().rotary_emb
    for name in ("inv_freq", "original_inv_freq"):
        assert getattr(rotary, name).dtype == torch.float32
        assert torch.equal(getattr(rotary, name), source.get_decoder().rotary_emb.inv_freq)
    assert "rotary_emb.inv_freq" not in "".join(module.state_dict())
    assert torch.equal(module.model.visual.rotary_pos_emb.inv_freq.view(torch.int16), vision.view(torch.int16))  # not the text's


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "lack 'factor'"),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]} | ORIGINAL, "allowed: one per"),
    ],
)
def test_bad_parameters_are_refused(parameters: dict, message: str) -> None:
    config = config_of({"rope_type": "default"})
    config.rope_parameters = {"rope_theta": 1e4} | parameters
    with pytest.raises(ValueError, match=message):
        inverse_frequencies(rope_spec(config, 16), 8)


def test_unknown_kind_and_nested_tables_are_refused() -> None:
    config = config_of({"rope_type": "default"})
    config.rope_parameters = {"rope_type": "spiral", "rope_theta": 1e4}
    with pytest.raises(ValueError, match=r"rope_type='spiral'; allowed: default, linear"):
        inverse_frequencies(rope_spec(config, 16), 8)
    config.rope_parameters = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    with pytest.raises(ValueError, match="allowed: one flat table"):
        rope_spec(config, 16)


def test_a_module_without_rope_is_refused() -> None:
    with pytest.raises(ValueError, match="has no rotary embedding"):
        force_table(torch.nn.Linear(2, 2), rope_spec(config_of({"rope_type": "default"}), 16), 8)
