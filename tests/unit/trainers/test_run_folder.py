"""config.yaml comes first; a resumed run must be the same run."""

from __future__ import annotations

import pytest
import yaml

from trainers.config import EvalConfig, OPSDConfig, SelfTeacher, SFTConfig
from trainers.run_folder import check_same_config, write_config


def sft(tmp_path, **changes) -> SFTConfig:
    settings = {"output_dir": str(tmp_path), "model": {"path": "m"}, "data": {"train": "d.jsonl"}, "max_steps": 10}
    return SFTConfig.model_validate({"recipe": "sft", **settings, **changes})


def test_the_file_reads_back_as_the_same_config(tmp_path):
    config = sft(tmp_path, engine={"optimizer": {"lr": 1e-5, "betas": [0.8, 0.9]}, "freeze": ["embed"]})
    write_config(config, tmp_path)
    assert SFTConfig.model_validate(yaml.safe_load((tmp_path / "config.yaml").read_text())) == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]


def test_what_does_not_change_the_training_may_change(tmp_path):
    decaying = {"optimizer": {"schedule": "cosine", "total_steps": 10}}
    write_config(sft(tmp_path, engine=decaying), tmp_path)
    longer = {"optimizer": {"schedule": "cosine", "total_steps": 20}}
    free = {"log": {"console": False}, "checkpoint": {"every": 3}, "eval": {"every": 2}, "max_steps": 20, "output_dir": "moved",
            "certificate": {"action": "warn"}, "train": {"micro_batch_tokens": 64}}  # fmt: skip
    longer |= {
        "zero_stage": 2,
        "activation_checkpointing": True,
        "rollout": {"engine": {"max_running": 3}},
    }  # after a lack of memory
    check_same_config(sft(tmp_path, **free, engine=longer), tmp_path)


def test_every_differing_key_is_named_in_one_line(tmp_path):
    write_config(sft(tmp_path), tmp_path)
    other = sft(tmp_path, seed=1, engine={"optimizer": {"lr": 3e-4}})
    with pytest.raises(ValueError, match=r"seed \(was 0, now 1\)") as error:
        check_same_config(other, tmp_path)
    assert "engine.optimizer.lr (was 1e-05, now 0.0003)" in str(error.value)
    assert "max_steps" not in str(error.value)
    assert "\n" not in str(error.value)


def test_another_decay_or_another_recipe_is_another_run(tmp_path):
    write_config(sft(tmp_path, engine={"optimizer": {"total_steps": 50}}), tmp_path)
    with pytest.raises(ValueError, match="total_steps"):
        check_same_config(sft(tmp_path, engine={"optimizer": {"total_steps": 60}}), tmp_path)
    opsd = OPSDConfig.model_validate(
        {"recipe": "opsd", "output_dir": "x", "model": {"path": "m"}, "data": {"train": "d.jsonl"}, "teacher": {"path": "t"}}
    )
    with pytest.raises(ValueError, match="recipe"):
        check_same_config(opsd, tmp_path)


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no readable config"):
        check_same_config(sft(tmp_path), tmp_path)
    (tmp_path / "config.yaml").write_text("3")
    with pytest.raises(ValueError, match="is no config"):
        check_same_config(sft(tmp_path), tmp_path)


def test_sft_keeps_dropout_unless_told_otherwise(tmp_path):
    assert sft(tmp_path).engine.dropout
    assert sft(tmp_path, engine={"zero_stage": 2}).engine.dropout
    assert not sft(tmp_path, engine={"dropout": False}).engine.dropout


def test_what_a_section_cannot_use_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="non-empty strings"):
        EvalConfig(stop=("",))
    for setting in ({"offload": True}, {"compute_dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="leave out offload and compute_dtype"):
            SelfTeacher(kind="self", weights="live", **setting)


@pytest.mark.parametrize(
    ("loss", "rollout", "expected"),
    [
        ({"divergence": "sampled_token"}, {"given_fraction": 0.5}, "needs tokens drawn from the policy"),
        ({"cross_entropy": 0.1}, {}, "acts on given responses"),
        ({}, {"sampling": {"min_new_tokens": 500}}, "min_new_tokens=500"),
        ({}, {"sampling": {"stop": [""]}}, "non-empty strings"),
    ],
)
def test_losses_that_the_rollouts_cannot_feed_are_refused(loss, rollout, expected):
    settings = {"output_dir": "x", "model": {"path": "m"}, "data": {"train": "d"}, "teacher": {"path": "t"}}
    with pytest.raises(ValueError, match=expected):
        OPSDConfig.model_validate({"recipe": "opsd", **settings, "loss": loss, "rollout": rollout})
