"""Measuring tools as the config turns them on, and scalars."""

from __future__ import annotations

import csv
import json
import logging

import pytest
import torch
from tiny import tiny_model
from training_cases import config, micro_batches, open_engine, train

from hybrid import TrainingEngine


def test_the_profiled_step_is_counted_and_no_other(tmp_path):
    out = tmp_path / "profile.txt"
    section = {"enabled": True, "profile_step": 2, "output_file": str(out)}
    engine = open_engine(config(ranks=1, accumulation=2, flops_profiler=section, steps_per_print=4))
    train(engine, micro_batches(1, 2))
    assert not out.exists()
    train(engine, micro_batches(1, 2))
    weights = 8 * 16 + 2 * 16 * 16 + 16 * 4  # door, two blocks, head
    inputs = weights - 8 * 16  # the door's input needs no gradient
    assert engine.flops_profiler.get_total_flops() == 2 * 2 * 8 * (2 * weights + inputs)
    assert "Net" in out.read_text()
    train(engine, micro_batches(2, 2))
    assert engine.throughput["train/tflops"] > 0


def logged(settings: dict) -> dict:
    engine = open_engine(settings)
    train(engine, micro_batches(2, 1))
    first = {name: sum(size["count"] for size in sizes.values()) for name, sizes in engine.comms_logger.summary().items()}
    engine.comms_logger.stop()
    train(engine, micro_batches(1, 1))
    second = {name: sum(size["count"] for size in sizes.values()) for name, sizes in engine.comms_logger.summary().items()}
    return {"first": first, "second": second}


def test_collectives_of_a_step_are_logged_where_that_is_enabled(pool2):
    for result in pool2.run(logged, config(comms_logger={"enabled": True})):
        assert sum(count for name, count in result["first"].items() if "gather" in name) == 2 * 5  # layers twice, root once
        assert sum(count for name, count in result["first"].items() if "scatter" in name) == 2 * 3
        assert result["first"] == result["second"]
    for result in pool2.run(logged, config(comms_logger={"enabled": False, "verbose": True})):
        assert result == {"first": {}, "second": {}}


def test_throughput_counts_tokens_samples_and_phases(caplog):
    engine = open_engine(
        config(ranks=1, accumulation=2, steps_per_print=4, wall_clock_breakdown=True, log_level="info", peak_tflops=1.0,
               flops_profiler={"enabled": True, "output_file": "/dev/null"}, hybrid_engine={"enabled": True}),
        tiny_model("llama"),
    )  # fmt: skip
    ids = torch.randint(3, 79, (8, 6))
    with caplog.at_level(logging.INFO):
        for _ in range(8):
            engine.generate(ids, max_new_tokens=2)
            for _ in range(2):
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
    report = engine.throughput
    assert report["step"] == 8
    assert report["steps"] == 4
    ratio = report["train/tokens_per_second"] / report["train/samples_per_second"]
    assert ratio == pytest.approx(6)
    assert report["train/mfu"] == pytest.approx(report["train/tflops"])
    assert report["generate/seconds"] > 0
    assert any("forward" in r.getMessage() and "backward" in r.getMessage() for r in caplog.records)


def test_scalars_go_where_the_config_says(tmp_path):
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    engine = open_engine(config(ranks=1, tensorboard=section, csv_monitor=section, fp16={"enabled": True, "loss_scale": 8}))
    losses = train(engine, micro_batches(3, 1))
    engine.destroy()
    rows = list(csv.reader((tmp_path / "job" / "Train_Samples_train_loss.csv").open()))
    assert rows[0] == ["step", "Train/Samples/train_loss"]
    assert [int(step) for step, _ in rows[1:]] == [8, 16, 24]
    assert [float(value) for _, value in rows[1:]] == pytest.approx(losses)
    assert {p.name for p in (tmp_path / "job").glob("*.csv")} >= {"Train_Samples_lr.csv", "Train_Samples_loss_scale.csv"}
    assert list((tmp_path / "job" / "tensorboard").glob("events*"))


def test_what_the_engine_does_not_know_is_the_modules():
    engine = open_engine(config(ranks=1), tiny_model("llama"))
    assert engine.model is engine.module.model
    with pytest.raises(AttributeError, match="nonsense"):
        engine.nonsense  # noqa: B018
    assert isinstance(engine, TrainingEngine)
    assert json.loads(engine.module.config.to_json_string())["model_type"] == "llama"
