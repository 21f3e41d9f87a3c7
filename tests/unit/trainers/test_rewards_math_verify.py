"""Mathematical equality, where the package math-verify is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess

import pytest
from reward_cases import rollout

from trainers.deadline import MOST_STUCK
from trainers.rewards import RewardConfig, Rewards, math_verify

SLOW = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    if "slow" in line:
        time.sleep(600)
    print(1.0, flush=True)
"""
needs_package = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the package math-verify")


@pytest.fixture(scope="module")
def rewards():
    rewards = Rewards([RewardConfig(name="math_verify", default=-1.0)])
    yield rewards
    rewards.close()


@needs_package
@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$.", "0.5", 1.0),
        ("the answer is 1/2", r"\frac12", 1.0),
        ("the answer is 0.5", r"$\frac{2}{4}$", 1.0),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"\boxed{\frac{\frac{1}{2}}{3}}", r"\frac{1}{6}", 1.0),
        (r"first $\boxed{3}$, but it must be $\boxed{4}$", "4", 1.0),
        (r"\boxed{3} and \boxed{4}", "4", 0.0),  # to the package these are one answer, the set of both
        (r"\boxed{4}", "3", 0.0),
        ("it is 1,234", "1234", 1.0),
        ("\u22123", "-3", 1.0),
        ("-3", "\u22123", 1.0),
        ("$x = 2$", "2", 1.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        ("", "3", 0.0),
        ("no idea", "3", 0.0),
        (r"\boxed{", "3", 0.0),
        (r"\boxed{\frac{1}{0}}", "3", 0.0),
        ("lone \ud800 surrogate, 3", "3", 1.0),
        ("the square root of 2: $\\sqrt{2}$", "it is more than 3/4\n#### \\sqrt{2}", 1.0),
        ("1/2", r"We get $x=1$ and so $\frac{1}{2}$", 1.0),
        ("it is\n72\n", "48/2 = <<48/2=24>>24, 48 + 24 = 72\n#### 72", 1.0),
    ],
)
def test_values(rewards, completion, answer, expected):
    (scored,) = rewards.score([rollout(completion, answer)])
    assert (scored.total, scored.failed) == (expected, ())


@needs_package
def test_a_number_too_large_is_given_up_and_the_next_response_is_scored(caplog):
    """SymPy computes it in one C function, which no thread and no signal handler gets in between."""
    rewards = Rewards([RewardConfig(name="math_verify", default=-1.0, timeout_s=2.0)])
    found = rewards.score(
        [rollout(text, "3", row=i) for i, text in enumerate((r"\boxed{3}", r"\boxed{9^{9^{9}}}", r"\boxed{3}"))]
    )
    rewards.close()
    assert [s.total for s in found] == [1.0, -1.0, 1.0]
    assert "row 1: it took longer than timeout_s=2" in caplog.text


@needs_package
def test_a_process_that_died_is_replaced(rewards, caplog):
    rewards.score([rollout("3", "3")])
    (component,) = rewards._components
    os.kill(component._process.pid, 9)
    component._process.wait()
    assert [s.total for s in rewards.score([rollout("3", "3")] * 2)] == [-1.0, 1.0]


@needs_package
def test_it_ends_with_close():
    rewards = Rewards([RewardConfig(name="math_verify")])
    rewards.score([rollout("3", "3")])
    process = rewards._components[0]._process
    assert process.poll() is None
    rewards.close()
    assert process.poll() is not None
    assert [s.total for s in rewards.score([rollout("3", "3")])] == [1.0], "it may be used again"
    rewards.close()


@needs_package
def test_it_ends_when_its_input_does(rewards):
    """As it does when the trainer is killed."""
    rewards.score([rollout("3", "3")])
    (component,) = rewards._components
    component._process.stdin.close()
    assert component._process.wait(timeout=60) == 0
    component._end()


@needs_package
def test_it_ends_by_itself_when_nobody_is_there_to_give_it_up():
    """The trainer was killed in the middle of a call."""
    rewards = Rewards([RewardConfig(name="math_verify", timeout_s=1.0)])
    (component,) = rewards._components
    component._open()
    process = component._process
    process.stdin.write(json.dumps({"answer": "3", "completion": r"\boxed{9^{9^{9}}}"}) + "\n")
    process.stdin.close()
    assert process.wait(timeout=200) == -signal.SIGXCPU


@needs_package
def test_rows_are_checked_before_the_run(rewards):
    rewards.check([rollout("", answer).prompt for answer in ("42", r"\frac12", "#### 3", "(0, 1]", "the answer is $x^2$")])
    for answer, said in (
        (None, "of the data has no answer"),
        (" ", "has the answer ' ', in which it reads no formula"),
        ("", "''"),
    ):
        with pytest.raises(ValueError, match=f"reward math_verify: row 9 .*{said}"):
            rewards.check([rollout("", "3").prompt, rollout("", answer, row=9).prompt])
    (scored,) = rewards.score([rollout("3", None)])
    assert (scored.total, scored.failed) == (-1.0, ("math_verify",))


@pytest.fixture
def with_worker(monkeypatch, tmp_path):
    """The component with another program as its process."""

    def install(program: str, **options) -> Rewards:
        (tmp_path / "worker.py").write_text(program)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
        monkeypatch.setattr(math_verify, "WORKER", tmp_path / "worker.py")
        return Rewards([RewardConfig(name="math_verify", default=-1.0, **options)])

    return install


def test_a_process_that_was_killed_leaves_nothing_stuck(with_worker):
    rewards = with_worker(SLOW, timeout_s=0.5)
    late = MOST_STUCK + 1
    assert [s.total for s in rewards.score([rollout("slow")] * late + [rollout("3")])] == [-1.0] * late + [1.0]
    rewards.close()


def test_a_process_that_cannot_be_started_or_never_is_ready_is_a_failure_like_others(with_worker, monkeypatch, caplog):
    rewards = with_worker("import time; time.sleep(600)")
    monkeypatch.setattr(math_verify, "START_S", 0.3)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(popen(*args, **options)) or started[-1])
    assert [s.total for s in rewards.score([rollout("3")])] == [-1.0]
    assert "row 0: it took longer than timeout_s=0.3" in caplog.text
    assert [process.returncode for process in started] == [-signal.SIGKILL]

    def refused(*args, **options):
        raise OSError("no memory")

    monkeypatch.setattr(subprocess, "Popen", refused)
    assert [s.total for s in rewards.score([rollout("3")] * 2)] == [-1.0] * 2
    with pytest.raises(ValueError, match=r"row 4 .*no memory"):
        rewards.check([rollout("", "3", row=4).prompt])


def test_the_package_is_asked_for_at_the_door(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package math-verify, which is not installed: pip install math-verify"):
        Rewards([RewardConfig(name="math_verify")])
