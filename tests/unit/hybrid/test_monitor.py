"""Monitor: records that stay valid JSON and hold each step once, the progress line, loggers by choice."""

import io
import json
import sys
import types
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hybrid.monitor import Monitor, progress_text


@dataclass(frozen=True)
class Log:
    console: bool = False
    every: int = 1
    console_completions_every: int | None = None
    tensorboard: bool = False
    wandb: str | None = None
    trackio: str | None = None


def lines(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text(encoding="utf-8").splitlines()]


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160)


def test_each_step_is_one_record_with_phase_times_and_speeds(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, Log())
    with monitor.phase("rollout", tokens=10) as phase:
        phase.tokens += 5
    with monitor.phase("rollout"):
        pass
    with monitor.phase("score"):
        pass
    monitor.log(1, {"loss": torch.tensor(0.5), "tokens": 7})
    monitor.log(2, {"loss": 0.25})
    first, second = lines(tmp_path / "metrics.jsonl")  # readable before close
    monitor.close()
    assert (first["step"], first["loss"], first["tokens"]) == (1, 0.5, 7)
    assert first["rollout/tokens_per_second"] == pytest.approx(15 / first["rollout/seconds"])
    assert "score/seconds" in first
    assert "score/tokens_per_second" not in first
    assert first["memory/peak_rss_gb"] > 0.01
    assert "rollout/seconds" not in second


def test_given_responses_have_no_speed_of_generation(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, Log())
    for step, sampled in ((1, 0.0), (2, 0.5)):
        with monitor.phase("rollout", tokens=10):
            pass
        monitor.log(step, {"sampled": sampled})
    given, mixed = lines(tmp_path / "metrics.jsonl")
    monitor.close()
    assert "rollout/seconds" in given
    assert "rollout/tokens_per_second" not in given
    assert "rollout/tokens_per_second" in mixed


def test_a_phase_that_raises_is_still_timed(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, Log())
    with pytest.raises(KeyError):
        with monitor.phase("train"):
            raise KeyError
    monitor.log(1, {})
    assert "train/seconds" in lines(tmp_path / "metrics.jsonl")[0]


def test_numbers_that_json_lacks_become_null_and_are_named(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, Log())
    monitor.log(1, {"loss": float("nan"), "norm": torch.tensor(float("-inf")), "fine": 1.0})
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert (record["loss"], record["norm"], record["fine"]) == (None, None, 1.0)
    assert record["nonfinite"] == {"loss": "nan", "norm": "-inf"}


def test_a_step_cannot_be_logged_twice(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, Log())
    monitor.log(3, {})
    with pytest.raises(ValueError, match="step 3 is logged after step 3"):
        monitor.log(3, {})


def test_resuming_drops_later_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path, Log())
    for step in range(1, 6):
        monitor.completions(step, [{"completion": "ä\n\u2028"}, {"completion": "b"}])
        monitor.log(step, {"loss": step})
    monitor.close()
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 6, "lo')  # a kill
    again = Monitor(tmp_path, Log())
    again.truncate(3)
    again.log(4, {"loss": 40})
    again.completions(4, [{"completion": "c"}])
    again.close()
    assert [(r["step"], r["loss"]) for r in lines(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    rows = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text(encoding="utf-8").split("\n")[:-1]]
    assert [r["step"] for r in rows] == [1, 1, 2, 2, 3, 3, 4]
    assert rows[0]["completion"] == "ä\n\u2028"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["completions.jsonl", "metrics.jsonl"]


def test_a_fresh_start_forgets_all_records(tmp_path: Path) -> None:
    Monitor(tmp_path, Log()).log(0, {})
    again = Monitor(tmp_path, Log())
    again.truncate(-1)
    again.log(0, {"loss": 1.0})
    assert [r["loss"] for r in lines(tmp_path / "metrics.jsonl")] == [1.0]


@pytest.mark.parametrize("line", ['{"st', "5", "{}", '{"step": "2"}'])
def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        Monitor(tmp_path, Log()).truncate(3)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path / "run", Log(console=True, tensorboard=True), rank=1)
    monitor.truncate(0)
    with monitor.phase("train"):
        pass
    monitor.log(1, {"loss": 1.0})
    monitor.completions(1, [{"completion": "x"}])
    monitor.close()
    assert not (tmp_path / "run").exists()


def test_without_a_terminal_each_shown_step_is_a_plain_line(tmp_path: Path) -> None:
    out = console()
    monitor = Monitor(tmp_path, Log(console=True, every=2), total_steps=10, console=out)
    monitor.truncate(0)
    for step in (1, 2, 3, 4):
        monitor.log(step, {"loss": 0.5, "swap_ms": 12.0})
    monitor.close()
    shown = out.file.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in shown] == ["step 2/10", "step 4/10"]
    assert "loss 0.5 | swap 12 ms" in shown[0]
    assert "eta 0:0" in shown[0]
    assert len(lines(tmp_path / "metrics.jsonl")) == 4  # every step, whatever is shown


def test_on_a_terminal_the_line_is_live(tmp_path: Path) -> None:
    out = console(terminal=True)
    monitor = Monitor(tmp_path, Log(console=True), total_steps=10, console=out)
    monitor.truncate(4)
    monitor.log(5, {"loss": 0.5})
    monitor.close()
    assert "5/10" in out.file.getvalue()
    assert "loss 0.5" in out.file.getvalue()


def test_the_line_shows_loss_speeds_swap_and_memory() -> None:
    record = {
        "step": 1, "loss": 0.123456, "eval/exact_match": 0.5, "rollout/tokens_per_second": 1520.4, "train/seconds": 1.0,
        "train/tokens_per_second": 800.0, "swap_ms": 12.3, "memory/peak_rss_gb": 1.234, "other": 3.0,
    }  # fmt: skip
    expected = "loss 0.1235 | eval/exact_match 0.5 | rollout 1520 tok/s | train 800 tok/s | swap 12 ms | 1.23 GB"
    assert progress_text(record) == expected
    assert progress_text({"loss": float("nan")}) == "loss nan"
    policy = {"policy_loss": 0.1, "loss": 0.001, "reward_mean": 0.25, "reward_std": 1.0, "kl_reference": 0.03}
    assert progress_text(policy) == "loss 0.001 | reward_mean 0.25 | kl_reference 0.03"


def test_completions_are_a_table_at_their_steps(tmp_path: Path) -> None:
    out = console()
    monitor = Monitor(tmp_path, Log(console=True, console_completions_every=2), console=out)
    monitor.completions(1, [{"completion": "first"}])
    monitor.completions(2, [{"completion": "[bold]second " + "x" * 500}])
    monitor.close()
    shown = out.file.getvalue()
    assert "first" not in shown
    assert "[bold]second" in shown  # markup in a completion is text
    assert shown.count("x") < 200


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_logger_that_is_not_installed_is_an_error_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rank: int
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=f"pip install {name}"):
        Monitor(tmp_path, replace(Log(), **{name: True if name == "tensorboard" else "project"}), rank=rank)


def test_tensorboard_has_the_numbers_and_forgets_steps_made_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, resumed in (((1, 2, 3), -1), ((2, 3), 1)):
        monitor = Monitor(tmp_path, Log(tensorboard=True))
        monitor.truncate(resumed)
        for step in steps:
            monitor.log(step, {"loss": 10.0 * resumed + step, "note": "text", "bad": float("nan")})
        monitor.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, -9.0), (2, 12.0), (3, 13.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_remote_loggers_get_settings_points_and_the_same_run_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls: list[tuple] = []
    run = types.SimpleNamespace(log=lambda metrics, step: calls.append((step, metrics)), finish=lambda: calls.append(("end",)))
    fake = types.ModuleType(name)
    fake.__spec__ = types.SimpleNamespace(name=name)
    fake.init = lambda **kwargs: (calls.append(("init", kwargs)), run)[1]
    monkeypatch.setitem(sys.modules, name, fake)
    for step in (1, 2):
        monitor = Monitor(tmp_path, replace(Log(), **{name: "project"}), settings={"lr": 1})
        monitor.log(step, {"loss": 0.5})
        monitor.close()
    inits = [call[1] for call in calls if call[0] == "init"]
    assert inits[0]["project"] == "project"
    assert inits[0]["config"] == {"lr": 1}
    assert inits[0] == inits[1]
    assert [(c[0], c[1]["loss"]) for c in calls if isinstance(c[0], int)] == [(1, 0.5), (2, 0.5)]
    assert calls[-1] == ("end",)
