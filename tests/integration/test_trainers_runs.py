"""Whole runs on one rank: resumed, killed, stopped, finished, refused."""

from __future__ import annotations

import errno
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import save_tiny
from trainer_cases import CHARACTERS, Killed, lines, run, settings, tiny_folder, weights, write_sums

from trainers import opsd
from trainers.certificate import CertificateError
from trainers.new_model import character_tokenizer
from trainers.sampler import Sampler

TEACHERS = {
    "frozen": {},
    "start": {"teacher": {"kind": "self", "weights": "start"}},
    "live": {"teacher": {"kind": "self", "weights": "live"}},
    "ema": {"teacher": {"kind": "self", "weights": "ema", "ema_decay": 0.5}},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_folder(folder / "student", seed=0)
    tiny_folder(folder / "teacher", seed=1)
    write_sums(folder / "sums.jsonl")
    return folder


@pytest.fixture
def make(models, tmp_path):
    def make(recipe: str, name: str = "run", **changes):
        return settings(recipe, models, output_dir=str(tmp_path / name), **changes)

    return make


def same(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_sft_learns_and_leaves_a_run_folder(make, models):
    tree = make("sft", max_steps=30, **{"data.eval": str(models / "sums.jsonl"), "eval.max_new_tokens": 4, "eval.every": 15})
    result, records = run(tree)
    assert records[30]["loss"] < 0.5 * records[1]["loss"]
    assert result.before["eval_reward"] < result.after["eval_reward"]
    assert [r["step"] for r in lines(tree, "metrics.jsonl")] == list(range(31))
    assert [s for s in records if "eval_reward" in records[s]] == [0, 15, 30]
    assert {p.name for p in result.run_dir.iterdir()} >= {"config.yaml", "metrics.jsonl", "completions.jsonl", "model"}
    assert sorted(p.name for p in (result.run_dir / "checkpoints").iterdir()) == ["step_28", "step_30"]
    shown = [(r["step"], r["kind"]) for r in lines(tree, "completions.jsonl")]
    assert shown.count((30, "eval")) == 4
    assert shown.count((30, "train")) == 1


def test_sft_trains_on_the_response_alone_unless_told_otherwise(make):
    counts = {}
    for only in (True, False):
        _, records = run(make("sft", f"only_{only}", max_steps=1, **{"data.shuffle": False, "train.completion_only": only}))
        counts[only] = records[1]["tokens"]
    assert counts[True] == 6  # of the first three sums: a digit and an end each
    assert counts[False] == 6 + 3 * 3  # prompts of 4 tokens, the first of which nothing predicts


def test_distillation_brings_the_student_to_the_teacher(make):
    tree = make("opsd", max_steps=30, **{"loss.divergence": "forward_kl"})
    _, records = run(tree)
    assert records[30]["loss"] < 0.5 * records[1]["loss"]
    assert records[1]["certificate_max"] <= 1e-4
    wanted = {"grad_norm", "lr", "tokens", "student_entropy", "top1_agreement", "first_token_loss", "response_length_min",
              "truncated", "swap_ms", "swap_bytes", "rollout_logprob", "epoch"}  # fmt: skip
    assert wanted <= records[2].keys()
    assert all(r[f"rollout_idle_s_{kind}"] >= 0 for r in records.values() for kind in ("min", "mean", "max"))
    written = lines(tree, "metrics.jsonl")[-1]
    assert {"rollout/seconds", "score/seconds", "train/tokens_per_second"} <= written.keys()


@pytest.mark.parametrize("name", ["sft", *TEACHERS])
def test_a_killed_or_stopped_run_ends_bit_equal(make, name):
    """10 prompts in steps of 3: the checkpoints lie inside a pass, and step 4 crosses into the next."""
    changes = {"max_steps": 5, **TEACHERS.get(name, {})}
    recipe = "sft" if name == "sft" else "opsd"
    whole, killed, stopped = (make(recipe, n, **changes) for n in ("whole", "killed", "stopped"))
    _, expected = run(whole)
    with pytest.raises(Killed):
        run(killed, kill_after=3)
    assert [r["step"] for r in lines(killed, "metrics.jsonl")] == [1, 2, 3]
    run(killed)
    result, _ = run(stopped, stop_after=3)
    assert (result.stopped_by_signal, result.steps, result.after) == (True, 3, None)
    assert not (result.run_dir / "model").exists()
    result, rest = run(stopped)
    assert (result.stopped_by_signal, result.steps, list(rest)) == (False, 5, [4, 5])
    for tree in (killed, stopped):
        assert same(weights(tree), weights(whole))
        assert [r["step"] for r in lines(tree, "metrics.jsonl")] == [1, 2, 3, 4, 5]
        assert [r["loss"] for r in lines(tree, "metrics.jsonl")] == [expected[s]["loss"] for s in range(1, 6)]
        assert lines(tree, "completions.jsonl") == lines(whole, "completions.jsonl")


@pytest.mark.parametrize("teacher", list(TEACHERS))
def test_bf16_compute_on_fp32_masters_resumes_bit_equal(make, teacher):
    changes = {"engine.compute_dtype": "bfloat16", **TEACHERS[teacher]}
    whole, cut = make("opsd", "whole", **changes), make("opsd", "cut", **changes)
    _, expected = run(whole)
    run(cut, stop_after=3)
    _, rest = run(cut)
    assert rest[4]["loss"] == expected[4]["loss"]
    assert same(weights(cut), weights(whole))
    assert expected[1]["certificate_mean"] <= 0.1


def test_a_teacher_may_be_offloaded_between_uses(make):
    plain, offloaded = make("opsd", "plain", max_steps=2), make("opsd", "offloaded", max_steps=2, **{"teacher.offload": True})
    _, expected = run(plain)
    _, records = run(offloaded)
    assert [records[s]["loss"] for s in (1, 2)] == [expected[s]["loss"] for s in (1, 2)]


def test_a_kill_before_the_first_checkpoint_starts_over(make):
    tree, whole = make("sft"), make("sft", "whole")
    with pytest.raises(Killed):
        run(tree, kill_after=1)
    _, records = run(tree)
    run(whole)
    assert list(records) == [1, 2, 3, 4]
    assert [r["step"] for r in lines(tree, "metrics.jsonl")] == [1, 2, 3, 4]
    assert same(weights(tree), weights(whole))


def test_a_finished_run_says_so_and_does_not_train_again(make, models, caplog):
    tree = make("sft", **{"data.eval": str(models / "sums.jsonl"), "eval.max_new_tokens": 2})
    result, _ = run(tree)
    before = {p: p.stat().st_mtime_ns for p in (result.run_dir / "model").iterdir()}
    again, records = run(tree)
    assert again == result
    assert records == {}
    assert "is finished: step 4 of max_steps=4" in caplog.text
    assert {p: p.stat().st_mtime_ns for p in (result.run_dir / "model").iterdir()} == before


def test_a_finished_run_goes_on_with_more_steps(make):
    tree, whole = make("sft"), make("sft", "whole", max_steps=6)
    run(tree)
    _, records = run(tree | {"max_steps": 6})
    run(whole)
    assert list(records) == [5, 6]
    assert same(weights(tree), weights(whole))


def test_never_resuming_starts_over(make):
    tree = make("sft")
    run(tree, stop_after=3)
    tree["checkpoint"]["resume"] = "never"
    _, records = run(tree)
    assert list(records) == [1, 2, 3, 4]
    assert [r["step"] for r in lines(tree, "metrics.jsonl")] == [1, 2, 3, 4]


def test_resuming_another_config_is_refused_and_changes_nothing(make):
    tree = make("sft")
    run(tree, stop_after=2)
    config = (Path(tree["output_dir"]) / "config.yaml").read_text()
    with pytest.raises(ValueError, match=r"seed \(was 0, now 5\)"):
        run(tree | {"seed": 5})
    assert (Path(tree["output_dir"]) / "config.yaml").read_text() == config


def test_a_resume_on_other_data_is_refused(make, tmp_path):
    tree = make("sft", **{"data.train": write_sums(tmp_path / "sums.jsonl")})
    run(tree, stop_after=2)
    write_sums(tmp_path / "sums.jsonl", 9)
    with pytest.raises(ValueError, match="there are 9 prompts, and were 10 when the checkpoint was made"):
        run(tree)


def test_a_loss_that_is_not_finite_stops_with_step_and_name(make, monkeypatch):
    calls = []

    def poisoned(token_loss):
        def wrapped(logits, chunk):
            per_token, metrics = token_loss(logits, chunk)
            calls.append(1)
            return per_token * (math.nan if len(calls) > 8 else 1.0), metrics

        return wrapped

    monkeypatch.setattr(opsd, "with_first_token", poisoned)
    tree = make("opsd", **{"train.micro_batch_tokens": 10_000, "engine.loss_chunk_tokens": 4})
    with pytest.raises(FloatingPointError, match=r"step \d+: the loss is nan"):
        run(tree)
    assert not (Path(tree["output_dir"]) / "model").exists()


def test_a_wrong_rollout_fails_the_certificate(make, monkeypatch):
    """Rollout log-probs that are off by 1e-3 stop the run before a weight changes, or warn by config."""
    real = Sampler.draw

    def shifted(self, prompts):
        rollouts, metrics = real(self, prompts)
        return [replace(r, logprobs_raw=tuple(v - 1e-3 for v in r.logprobs_raw)) for r in rollouts], metrics

    monkeypatch.setattr(Sampler, "draw", shifted)
    with pytest.raises(CertificateError, match=r"step 1: the parity certificate fails.*100.00% of tokens"):
        run(make("opsd"))
    _, records = run(make("opsd", "warned", **{"certificate.action": "warn"}))
    assert records[1]["certificate_mean"] == pytest.approx(1e-3, rel=1e-2)


def test_a_certificate_that_failed_may_be_turned_into_a_warning_on_the_way(make, monkeypatch):
    """What the error proposes works: the run goes on from its checkpoint."""
    tree = make("opsd", **{"certificate.every": 3})
    real = Sampler.draw

    def colder_from_the_third_step(self, prompts):
        if self.engine.step_count >= 2:
            self.sampling = replace(self.sampling, temperature=0.5)
        return real(self, prompts)

    monkeypatch.setattr(Sampler, "draw", colder_from_the_third_step)
    with pytest.raises(CertificateError, match=r"step 3: .*set certificate.action=warn"):
        run(tree)
    assert [r["step"] for r in lines(tree, "metrics.jsonl")] == [1, 2]
    tree["certificate"]["action"] = "warn"
    _, records = run(tree)
    assert list(records) == [3, 4]


LOSSES = [
    {"divergence": "forward_kl", "clip_token": 0.5},
    {"divergence": "forward_kl", "top_k": 3, "tail": "bucket"},
    {"divergence": "reverse_kl"},
    {"divergence": "reverse_kl", "top_k": 3, "support": "student", "tail": "renormalise"},
    {"divergence": "jsd", "beta": 0.1},
    {"divergence": "jsd_normalised", "clip_element": 0.2},
    {"divergence": "skew_forward"},
    {"divergence": "skew_reverse", "reduction": "sequence_mean"},
    {"divergence": "sampled_token", "ratio_clip": 0.2},
]


@pytest.mark.parametrize(("scoring", "noise"), [("module", 1e-6), ("engine", 1e-6)])  # of the gradient: that of log-probs
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_every_loss_trains_and_is_nothing_where_the_teacher_is_the_student(make, models, loss, scoring, noise):
    _, records = run(make("opsd", max_steps=2, loss=loss))
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 1e-3 for r in records.values())
    assert all((r["clipped"] > 0) == ("clip_token" in loss or "clip_element" in loss) for r in records.values() if "clipped" in r)
    same = {"teacher.path": str(models / "student"), "teacher.scoring": scoring, "data.privileged_column": "none"}
    _, records = run(make("opsd", "same", max_steps=1, loss=loss, **same))
    assert abs(records[1]["loss"]) <= 1e-6
    assert records[1]["grad_norm"] <= noise


def test_a_teacher_of_another_family_and_width(make, models):
    save_tiny(
        models / "exaone4", "exaone4", tokenizer=character_tokenizer(CHARACTERS)
    )  # 96 rows for 16 ids, hidden 64 against 32
    _, records = run(make("opsd", max_steps=20, teacher={"path": str(models / "exaone4")}, **{"loss.divergence": "forward_kl"}))
    assert records[20]["loss"] < 0.7 * records[1]["loss"]


def test_a_stopped_run_that_is_asked_for_no_more_steps_leaves_the_model_of_its_last(make):
    """Not the one that an earlier, shorter end left in model/."""
    tree, whole = make("sft", max_steps=2), make("sft", "whole", max_steps=3)
    run(tree)
    run(tree | {"max_steps": 4}, stop_after=3)
    result, records = run(tree | {"max_steps": 3})
    run(whole)
    assert (result.steps, records) == (3, {})
    assert same(weights(tree), weights(whole))


def test_a_full_disk_ends_the_run_with_its_reason_and_keeps_the_checkpoint(make, monkeypatch):
    from hybrid.records import Records

    real = Records.write

    def write(self, record):
        if record.get("step") == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.path))
        real(self, record)

    tree = make("sft")
    with monkeypatch.context() as patch:
        patch.setattr(Records, "write", write)
        with pytest.raises(OSError, match="No space left on device"):
            run(tree)
    _, records = run(tree)
    assert list(records) == [3, 4]
    assert [r["step"] for r in lines(tree, "metrics.jsonl")] == [1, 2, 3, 4]


def test_prompts_beyond_ascii_reach_the_table_as_they_are(make, models, tmp_path):
    tiny_folder(tmp_path / "student", characters="é√😀0123456789")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "é√😀", "response": "😀1"}), encoding="utf-8")
    tree = make("sft", max_steps=1, model={"path": str(tmp_path / "student")}, **{"data.train": str(tmp_path / "rows.jsonl")})
    run(tree)
    assert [(r["prompt"], r["completion"]) for r in lines(tree, "completions.jsonl")] == [("é√😀", "😀1")]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "sum_per_constant"])
def test_the_step_does_not_depend_on_micro_batches(make, reduction):
    """One optimizer step equals one big batch, whatever the cut."""
    sgd = {"name": "sgd", "lr": 0.1, "max_grad_norm": None}
    changes = {"max_steps": 1, "loss.reduction": reduction, "loss.constant_length": 5, "engine.optimizer": sgd}
    trees = [make("opsd", f"cut_{n}", **changes, **{"train.micro_batch_tokens": n}) for n in (10, 1000)]
    first, second = (run(tree)[1][1] for tree in trees)
    assert first["loss"] == pytest.approx(second["loss"], rel=1e-6)
    if reduction == "sum_per_constant":  # 3 prompts x 2 samples, over a length of 5
        assert first["loss"] == pytest.approx(first["divergence"] * first["tokens"] / (6 * 5), rel=1e-5)
    if reduction == "token_mean":
        assert first["loss"] == pytest.approx(first["divergence"], rel=1e-6)
    few, many = map(weights, trees)
    for name in few:
        torch.testing.assert_close(few[name], many[name], rtol=0, atol=2e-6)


def test_given_responses_take_the_share_of_steps_that_was_asked(make):
    tree = make("opsd", max_steps=12, **{"rollout.given_fraction": 0.5, "loss.cross_entropy": 0.1})
    _, records = run(tree)
    sampled = [records[s]["sampled"] for s in sorted(records)]
    assert set(sampled) == {0.0, 1.0}
    assert all(("rollout_logprob" in r) == (r["sampled"] == 1.0) for r in records.values())
    assert all((r["cross_entropy"] > 0) == (r["sampled"] == 0.0) for r in records.values())
    written = lines(tree, "metrics.jsonl")
    assert all(("rollout/tokens_per_second" in r) == ("swap_ms" in r) == (r["sampled"] == 1.0) for r in written)


def test_a_fresh_model_is_made_in_the_run_folder_and_kept(make):
    new = {"architecture": "qwen3", "characters": "0123456789+=?\n", "settings": {"hidden_size": 32, "num_hidden_layers": 1,
           "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}}  # fmt: skip
    tree = make("sft", model={"new": new})
    run(tree, stop_after=2)
    made = Path(tree["output_dir"]) / "init" / "model.safetensors"
    before = made.stat().st_mtime_ns
    run(tree)
    assert made.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"teacher": {"kind": "self"}, "data.privileged_column": "hint"}, "row 0 gives the self-teacher nothing"),
        ({"rollout.given_fraction": 0.5, "data.response_column": "none"}, "row 0 has no response"),
        ({"rollout.sampling.max_new_tokens": 60}, "row 7 has 5 prompt tokens.*allowed: 64 in all"),
        (
            {"rollout.sampling.max_new_tokens": 50, "data.privileged_template": "{prompt}{privileged}{privileged}"},
            "row 7 has 21 privileged prompt tokens.*allowed: 64 in all",
        ),
        ({"rollout.given_fraction": 0.5, "data.response_column": "long"}, "its response up to 71; allowed: 64 in all"),
        ({"model": {"recipe": "x.yaml"}}, "model.recipe is not trained yet"),
        ({"teacher": {"recipe": "x.yaml"}}, "teacher.recipe is not trained yet"),
    ],
)
def test_what_cannot_run_is_refused_at_the_start(make, changes, expected):
    with pytest.raises(ValueError, match=expected):
        run(make("opsd", **changes))


@pytest.mark.parametrize(
    ("column", "expected"), [("none", "row 0 has no response to train on"), ("long", "its response up to 71; allowed: 64 in all")]
)
def test_sft_without_responses_or_room_is_refused(make, column, expected):
    with pytest.raises(ValueError, match=expected):
        run(make("sft", **{"data.response_column": column}))


def test_truncated_sampling_with_a_sampled_token_loss_is_warned_about(make, caplog):
    run(make("opsd", max_steps=1, **{"loss.divergence": "sampled_token", "rollout.sampling.top_k": 3}))
    assert "sampled_token with truncated or penalised sampling" in caplog.text
