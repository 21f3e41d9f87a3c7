"""Keys, the batch triangle, "auto", twice-given keys, and what each key is said to do."""

from __future__ import annotations

import base64
import json
import logging
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from torch import nn
from training_cases import config, make_net, open_engine

from hybrid import initialize
from hybrid.training.config.foreign import KNOBS, ONLY, REFUSED
from hybrid.training.config.optimizers import TYPES
from hybrid.training.config.schedulers import SCHEDULES
from hybrid.training.config.top import TrainingConfig, resolve_training

SGD = {"type": "SGD", "params": {"lr": 0.1}}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def resolved(given: dict) -> TrainingConfig:
    return resolve_training(given)[0]


# -- the batch triangle


@pytest.mark.parametrize(
    ("given", "world", "expected"),
    [
        ((32, 4, 2), 4, (32, 4, 2)),
        ((32, 4, None), 4, (32, 4, 2)),
        ((32, None, 2), 4, (32, 4, 2)),
        ((None, 4, 2), 4, (32, 4, 2)),
        ((32, None, None), 4, (32, 8, 1)),
        ((None, 4, None), 4, (16, 4, 1)),
        ((7, None, None), 7, (7, 1, 1)),
    ],
)
def test_two_of_three_batch_sizes_give_the_third(given, world, expected):
    settled = resolved(dict(zip(BATCH, given, strict=True))).with_batch(world)
    assert tuple(getattr(settled, name) for name in BATCH) == expected


@pytest.mark.parametrize(
    ("given", "world", "message"),
    [
        ((32, 4, 3), 4, r"train_batch_size=32 is not .*=4 x gradient_accumulation_steps=3 x 4 ranks = 48; leave one"),
        ((30, 4, None), 4, "cannot be divided by train_micro_batch_size_per_gpu=4 x 4 ranks = 16; nearest: 16 or 32"),
        ((3, None, 2), 4, r"nearest: 8"),
        ((None, None, 2), 4, r"give train_batch_size or train_micro_batch_size_per_gpu"),
        ((None, None, None), 1, r"give train_batch_size"),
    ],
)  # fmt: skip
def test_batch_sizes_that_do_not_fit_are_refused(given, world, message):
    with pytest.raises(ValueError, match=message):
        resolved(dict(zip(BATCH, given, strict=True))).with_batch(world)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "4", float("nan")])
def test_a_batch_size_is_a_whole_number_above_0(value):
    with pytest.raises(ValueError, match="train_batch_size"):
        resolved({"train_batch_size": value})


# -- unknown, twice, auto


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping is unknown; nearest: gradient_clipping"),
        ({"zero_optimization": {"stages": 3}}, "zero_optimization.stages is unknown; nearest: stage"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "offload_param.devise is unknown; nearest: device"),
        ({"fp16": {"loss_scal": 0}}, "loss_scal is unknown; nearest: loss_scale"),
        ({"optimizer": {"type": "AdmW"}}, "type='AdmW'; nearest: adamw"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": [0.9, 0.9]}}}, "params.beta is unknown to AdamW; nearest: betas"),
        ({"scheduler": {"type": "WarmupLr", "params": {}}}, "nearest: WarmupLR"),
        ({"activation_checkpointing": {"cpu_checkpoint": True}}, "nearest: cpu_checkpointing"),
        ({"hybrid_engine": {"max_out_token": 5}}, "nearest: max_out_tokens"),
        ({"module_precision": [{"match": "norms", "dtyp": "fp32"}]}, "dtyp is unknown; nearest: dtype"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "offload_param needs stage 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "no off-load to NVMe"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer needs stage 1, 2 or 3"),
        ({"zero_optimization": {"stage": 3, "elastic_checkpoint": True}}, "elastic_checkpoint: a checkpoint loads at any number"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights: "),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 are both enabled"),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "torch_autocast together with bf16"),
        ({"hybrid_engine": {"inference_tp_size": 2}}, "allowed: 1, until there is tensor-parallel decoding"),
        ({"gradient_predivide_factor": 2.0, "prescale_gradients": True}, "divides by the ranks first; keep one"),
        ({"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "bf16"}, "grad_accum_dtype=fp32 with"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bfloat16 is the old name of bf16, and both are given"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {}}}, "cpu_offload is the old name"),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
        ({"gradient_clipping": float("nan")}, "gradient_clipping"),
        ({"gradient_clipping": "1.0"}, "gradient_clipping"),
        ({"log_level": "loud"}, "log_level: 'loud'; allowed: debug, info"),
        ({"amp": {"enabled": True}}, "amp: apex is not supported"),
        ({"pipeline": {"stages": 2}}, "pipeline: one model"),
        ({"optimizer": {"type": "SGD", "params": {"lr": -1}}}, "optimizer"),
        ({"optimizer": {"type": "SGD", "params": {"lr": "1e-3"}}}, "optimizer"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_by_name(given, message):
    with pytest.raises(ValueError) as caught:
        resolved(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_are_named_at_once():
    with pytest.raises(ValueError) as caught:
        resolved({"gradient_cliping": 1.0, "zero_optimization": {"stage": 9}, "amp": {"enabled": True}, "steps_per_print": 0})
    for part in ("gradient_cliping", "zero_optimization.stage", "amp", "steps_per_print"):
        assert part in str(caught.value)


def test_what_is_refused_passes_when_it_asks_for_nothing():
    for path in REFUSED:
        *sections, name = path.split(".")
        for nothing in (False, None, "auto", {"enabled": False}):
            given: dict = {name: nothing}
            for section in reversed(sections):
                given = {section: given}
            resolved(given)


def test_a_key_that_stands_twice_is_refused(tmp_path):
    (tmp_path / "c.json").write_text('{"train_batch_size": 8, "bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ValueError, match=r"c\.json: 'enabled' stands more than once"):
        resolve_training(tmp_path / "c.json")


def test_a_config_is_a_mapping_a_file_or_base64(tmp_path):
    given = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    (tmp_path / "c.json").write_text(json.dumps(given))
    coded = base64.urlsafe_b64encode(json.dumps(given).encode()).decode()
    for source in (given, tmp_path / "c.json", str(tmp_path / "c.json"), coded):
        assert resolve_training(source)[0] == resolved(given)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[1]", "holds a list"), ("{", "is not JSON"), (None, "No such file or directory; allowed: a mapping, a JSON file")],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / "c.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        resolve_training(tmp_path / "c.json")


def test_auto_is_the_same_as_not_given():
    auto = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": "auto", "hysteresis": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "offload_param": {"device": "auto", "pin_memory": "auto"},
        },
        "steps_per_print": "auto",
    }
    plain = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {}}}
    assert resolved(auto).with_batch(2) == resolved(plain).with_batch(2)


def _keys(section, path=()):
    """Every key of a section and of those in it."""
    for name, field in section.model_fields.items():
        yield (here := (*path, field.alias or name))
        if hasattr(type(field.default), "model_fields"):
            yield from _keys(type(field.default), here)


def test_auto_is_not_given_at_every_key_but_the_rate():
    keys = list(_keys(TrainingConfig))
    assert len(keys) > 100
    assert ("zero_optimization", "offload_param", "device") in keys
    for *sections, name in keys:
        given: dict = {name: "auto"}
        for section in reversed(sections):
            given = {section: given}
        assert resolved(given) == resolved({}), (*sections, name)
    for kind, names in TYPES.items():
        plain = resolved({"optimizer": {"type": kind, "params": {"lr": 0.5}}})
        for name in {*names} - {"lr"}:
            assert resolved({"optimizer": {"type": kind, "params": {"lr": 0.5, name: "auto"}}}) == plain, (kind, name)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_auto_in_a_schedule_is_not_given_or_is_to_be_filled_in(kind):
    fields = SCHEDULES[kind].model_fields
    needed = {name: 9 if name == "total_num_steps" else 0.5 for name, field in fields.items() if field.is_required()}
    filled_in = {"total_num_steps", "warmup_max_lr"}  # null: by the engine, from the optimizer's own rates
    plain = resolved({"scheduler": {"type": kind, "params": needed}}).scheduler.params
    for name in fields:
        given = {"scheduler": {"type": kind, "params": {**needed, name: "auto"}}}
        if name in needed and name not in filled_in:
            with pytest.raises(ValueError, match=f"params of {kind}: {name}: Field required"):
                resolved(given)
        else:
            expected = plain.model_copy(update={name: None} if name in filled_in else {})
            assert resolved(given).scheduler.params == expected, name


def test_auto_says_what_is_taken_and_a_rate_is_asked_for():
    _, effects = resolve_training({"gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"betas": "auto"}}})
    said = {effect.key: effect.text for effect in effects}
    assert said["gradient_clipping"] == "not given: 1.0"
    assert said["optimizer.params.betas"] == "not given: (0.9, 0.999)"
    with pytest.raises(ValueError, match=r'optimizer\.params\.lr is "auto", which a trainer fills in; give the number'):
        resolved({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}
    with pytest.raises(ValueError, match="give the number of optimizer steps"):
        open_engine(config(ranks=1, scheduler=decay))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, "lr: Input should be a valid number; given: '1e-3'"),
        ({"zero_optimization": {"stage": "3"}}, "'3' is given; allowed: a whole number"),
        ({"bf16": {"enabled": "true"}}, "given: 'true'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "is not offered: gradients are compressed by gradient_compression"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "give it as gradient_clipping"),
    ],
    ids=str,
)
def test_a_wrong_value_is_shown(given, message):
    with pytest.raises(ValueError) as caught:
        resolved(given)
    assert message in str(caught.value)
    assert "default factory" not in str(caught.value)


CPU = {"device": "cpu"}
BF16_SECTION = {"enabled": True, "check_grad_overflow": False}


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ({"bfloat16": BF16_SECTION}, {"bf16": BF16_SECTION}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"zero_optimization": {"stage": 2, "offload_optimizer": CPU}}),
        (
            {"zero_optimization": {"stage": 3, "cpu_offload_params": True}},
            {"zero_optimization": {"stage": 3, "offload_param": CPU}},
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
            {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        ),
    ],
    ids=str,
)
def test_old_names_of_keys_are_taken(old, today):
    assert resolved(old) == resolved(today) != resolved({"zero_optimization": {"stage": 3}})
    assert any("the old name of" in effect.text for effect in resolve_training({"train_batch_size": 8, **old})[1])


def test_an_old_name_that_asks_for_nothing_is_off():
    assert resolved({"bfloat16": None}) == resolved({"bfloat16": "auto"}) == resolved({})
    both = {"stage": 2, "cpu_offload": False, "offload_optimizer": CPU}
    assert resolved({"zero_optimization": both}) == resolved({"zero_optimization": {"stage": 2, "offload_optimizer": CPU}})
    with pytest.raises(ValueError, match="offload_optimizer"):
        resolved({"zero_optimization": {"stage": 2, "cpu_offload": "true"}})
    assert resolved({"zero_optimization": {"stage": 2, "cpu_offload": False}}) == resolved({"zero_optimization": {"stage": 2}})


def test_what_others_write_is_taken(tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"train_batch_size": 8}).encode())  # a byte order mark
    assert resolve_training(path)[0].train_batch_size == 8
    assert resolved({"steps_per_print": float("inf")}).steps_per_print is None  # accelerate
    off = resolved({"zero_optimization": {"stage": 3, "offload_optimizer": None}})
    assert off == resolved({"zero_optimization": {"stage": 3}})
    assert resolved({"optimizer": {"type": "FusedAdam", "params": {"lr": 1e-3}}}).optimizer.settings().name == "adamw"


# -- what is said of each key


def sections(section: type[BaseModel]) -> dict[type[BaseModel], None]:
    """It and all that are below it."""
    found = dict.fromkeys([section])
    for field in section.model_fields.values():
        for kind in sections_of(field):
            found |= sections(kind)
    return found


def test_every_key_there_is_has_a_line_that_says_what_it_does():
    every = sections(TrainingConfig)
    assert {*SCHEDULES.values()} < every.keys()
    shown = [
        (kind.__name__, name)
        for kind in every
        for name, f in kind.model_fields.items()
        if not f.description and not sections_of(f)
    ]
    assert shown == [("SchedulerConfig", "type")]


def sections_of(field: Any) -> list[type[BaseModel]]:
    kinds = [field.annotation, *get_args(field.annotation)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]


@pytest.mark.parametrize(
    "section",
    [
        {"wandb": {"enabled": False, "group": "a", "team": "b"}},
        {"comms_logger": {"enabled": False, "prof_all": True, "prof_ops": ["all_reduce"]}},
    ],
    ids=str,
)
def test_a_section_that_is_off_may_say_anything(section):
    assert resolved(section)
    with pytest.raises(ValueError, match=next(iter(section))):
        resolved({name: {**keys, "enabled": True} for name, keys in section.items()})


def test_every_given_key_is_said_to_do_something():
    given = config(ranks=1, bf16={"enabled": True, "check_grad_overflow": False}, gradient_accumulation_steps="auto",
                   zero_optimization={"overlap_comm": True, "sub_group_size": 1e9, "stage3_prefetch_bucket_size": 5e7},
                   hybrid_engine={"enabled": False}, steps_per_print=5)  # fmt: skip
    engine = open_engine(given)
    said = {effect.key: effect.text for effect in engine.effects}
    assert said.keys() == set(_leaves(given))
    assert all(said.values())
    assert said["zero_optimization.overlap_comm"].startswith("no effect here: ")
    assert said["gradient_accumulation_steps"] == "1, from the other two"
    assert [line.split()[0] for line in engine.describe().splitlines()] == list(_leaves(given))  # in the config's order


def _leaves(given: dict, path: str = ""):
    for key, value in given.items():
        if isinstance(value, dict) and f"{path}{key}" != "optimizer.params":
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


def test_every_knob_is_taken_and_named():
    for path, why in KNOBS.items():
        *sections, name = path.split(".")
        given: dict = {name: 7}
        for section in reversed(sections):
            given = {section: given}
        if sections == ["optimizer", "params"] or sections == ["optimizer"]:
            given["optimizer"]["type"] = "AdamW"
        _, effects = resolve_training(given)
        assert [e.text for e in effects if e.key == path] == [f"no effect here: {why}"]


def test_a_key_with_one_allowed_value():
    for path, (value, _) in ONLY.items():
        name = path.split(".")[-1]
        resolved({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", name: value}}})
        with pytest.raises(ValueError, match=f"{name}=0.5; allowed: {value}"):
            resolved({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", name: 0.5}}})


def test_every_field_says_what_it_does():
    """An effect without a description would be an empty line to a user."""

    def missing(section, path=""):
        for name, field in section.model_fields.items():
            part = field.default
            if hasattr(type(part), "model_fields"):
                yield from missing(type(part), f"{path}{name}.")
            elif not field.description:
                yield f"{path}{name}"

    assert list(missing(TrainingConfig)) == []


# -- where a config may be given, and the log


def test_older_places_for_the_config():
    class Args:
        deepspeed_config = config(ranks=1)

    assert initialize(args=Args(), model=make_net())[0].zero_optimization_stage() == 3
    assert initialize(model=make_net(), config_params=config(ranks=1, stage=1))[0].zero_optimization_stage() == 1
    with pytest.raises(ValueError, match="no config; give config="):
        initialize(model=make_net())


def test_two_engines_have_two_levels_and_none_leaves_logging_alone():
    root = logging.getLogger().level
    loud, quiet = open_engine(config(ranks=1, log_level="DEBUG")), open_engine(config(ranks=1, log_level="error"))
    plain = open_engine(config(ranks=1))
    levels = [engine._log.getEffectiveLevel() for engine in (loud, quiet, plain)]
    assert levels[:2] == [logging.DEBUG, logging.ERROR]
    assert levels[2] == logging.getLogger("hybrid").getEffectiveLevel()
    assert logging.getLogger().level == root


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_level": "loud"},
        {"fp16": {"enabled": True, "hysteresis": 0}},
        {"fp16": {"enabled": True, "initial_scale_power": -1}},
        {"fp16": {"enabled": True, "initial_scale_power": 3, "min_loss_scale": 9}},
        {"fp16": {"enabled": True, "growth_factor": 1.0}},
        {"fp16": {"enabled": True, "backoff_factor": 1.0}},
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        {"fp16": {"min_loss_scale": 0}, "torch_autocast": {"enabled": True, "dtype": "float16"}},
    ],
    ids=str,
)
def test_a_bad_level_or_loss_scale_is_refused_before_the_module_is_touched(wrong):
    net = make_net()
    before = [id(p) for p in net.parameters()]
    with pytest.raises(ValueError, match="|".join(["log_level", *wrong.get("fp16", {}), "min_scale"])):
        initialize(model=net, config=config(ranks=1, **wrong))
    assert [id(p) for p in net.parameters()] == before
    assert all(type(p) is nn.Parameter for p in net.parameters())


def test_the_log_has_a_line_every_few_steps(caplog):
    from training_cases import micro_batches, train

    engine = open_engine(config(ranks=1, steps_per_print=2, log_level="info"))
    with caplog.at_level(logging.INFO):
        train(engine, micro_batches(5, 1))
    assert [r.getMessage().split(",")[0] for r in caplog.records if r.getMessage().startswith("step=")] == ["step=2", "step=4"]
