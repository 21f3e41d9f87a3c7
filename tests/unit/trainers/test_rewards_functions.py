"""`module:function`: found at the door, called with a deadline, and what it may do wrong."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reward_cases import rollout

from trainers.deadline import MOST_STUCK
from trainers.rewards import RewardConfig, Rewards, resolve

HANGS = """
import threading, types, sys
from reward_cases import rollout
from trainers.rewards import RewardConfig, Rewards

sys.modules["users"] = types.SimpleNamespace(hangs=lambda completion, prompt: threading.Event().wait())
(scored,) = Rewards([RewardConfig(name="users:hangs", timeout_s=0.1, default=-1.0)]).score([rollout("")])
print(scored.total, scored.failed)
"""


@pytest.fixture
def mine(monkeypatch):
    """Put a function at users:mine and make it the only component."""

    def install(function, **options):
        monkeypatch.setitem(sys.modules, "users", SimpleNamespace(mine=function))
        return Rewards([RewardConfig(name="users:mine", **options)])

    return install


def test_it_is_given_text_and_prompt(mine):
    given = []

    def reward(completion, prompt):
        given.append((completion, prompt))
        return len(given)

    rollouts = [rollout("a", row=5), rollout("b", row=6)]
    assert [s.total for s in mine(reward).score(rollouts)] == [1.0, 2.0]
    assert given == [("a", rollouts[0].prompt), ("b", rollouts[1].prompt)]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor([2])])
def test_what_counts_as_a_number(mine, value):
    (scored,) = mine(lambda completion, prompt: value).score([rollout("")])
    assert (scored.total, scored.failed, type(scored.total)) == (2.0, (), float)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("1.0", "it gave '1.0'; allowed: a finite number"),
        (None, "it gave None; allowed"),
        (math.inf, "it gave inf; allowed"),
        (-1e300, "it gave -1e.300; allowed: a finite number, up to 1e.30"),
        (math.nan, "it gave nan; allowed"),
        (10**400, r"it gave 10+\.\.\.; allowed"),
        ([1.0, 2.0], "it gave a list; allowed"),
        (torch.tensor([1.0, 2.0]), "it gave a Tensor; allowed"),
    ],
)
def test_what_does_not(mine, caplog, value, shown):
    (scored,) = mine(lambda completion, prompt: value, default=-3.0).score([rollout("", row=4)])
    assert (scored.total, scored.failed) == (-3.0, ("users:mine",))
    assert len(caplog.records) == 1
    assert re.search(f"row 4: {shown}", caplog.text)


@pytest.mark.parametrize("error", [ValueError("no\nidea"), SystemExit(3), KeyboardInterrupt(), TimeoutError("its own")])
def test_whatever_it_raises_is_a_failure(mine, caplog, error):
    def reward(completion, prompt):
        if prompt.index == 1:
            raise error
        return 1.0

    scored = mine(reward).score([rollout("", row=row) for row in (0, 1, 2)])
    assert [s.total for s in scored] == [1.0, 0.0, 1.0]
    assert type(error).__name__ in caplog.text
    assert " ".join(str(error).split()) in caplog.text


def test_calls_share_a_thread_that_is_not_the_trainers(mine):
    """Its connections and OpenMP's teams are per thread."""
    threads = []
    rewards = mine(lambda completion, prompt: threads.append(threading.current_thread()) or 1.0)
    for _ in range(2):
        assert [s.total for s in rewards.score([rollout("")] * 3)] == [1.0] * 3
    (thread,) = set(threads)
    assert thread is not threading.main_thread()
    rewards.close()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_calls_see_the_trainers_cuda_device(mine, monkeypatch):
    """A thread starts on the first device, whichever is its rank's. There is no CUDA here: a stand-in remembers what was set."""
    by_thread = {threading.get_ident(): 3}
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: by_thread.get(threading.get_ident(), 0),
        set_device=lambda device: by_thread.update({threading.get_ident(): device}),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert [s.total for s in mine(lambda completion, prompt: cuda.current_device()).score([rollout("")])] == [3.0]


def test_a_call_that_hangs_fails_and_those_after_it_are_made(mine, caplog):
    release = threading.Event()
    rewards = mine(lambda completion, prompt: 1.0 if prompt.index != 1 or release.wait() else 2.0, timeout_s=1.0, default=-1.0)
    assert [s.total for s in rewards.score([rollout("", row=row) for row in (0, 1, 2)])] == [1.0, -1.0, 1.0]
    assert "row 1: it took longer than timeout_s=1; it counts as default=-1" in caplog.text
    release.set()
    assert [s.total for s in rewards.score([rollout("", row=row) for row in (0, 1, 2)])] == [1.0, 1.0, 1.0]


def test_a_late_result_is_not_taken_for_the_next_calls(mine):
    release = threading.Event()

    def reward(completion, prompt):
        if prompt.index == 0:
            release.wait()
            return 100.0
        release.set()
        return 1.0

    rewards = mine(reward, timeout_s=1.0)
    assert [s.total for s in rewards.score([rollout("", row=row) for row in (0, 1, 2)])] == [0.0, 1.0, 1.0]


def test_a_function_that_always_hangs_is_called_a_few_times_only(mine):
    """A step must not take a time-out for each of its responses; and once calls have returned, it is called again."""
    release, called, calls = threading.Event(), threading.Event(), []

    def reward(completion, prompt):
        calls.append(threading.current_thread())
        called.set()
        release.wait()
        return 1.0

    rewards = mine(reward, timeout_s=0.02)
    for _ in range(2):
        scored = rewards.score([rollout("")] * (MOST_STUCK + 5))
        assert [s.failed for s in scored] == [("users:mine",)] * (MOST_STUCK + 5)
        assert len(calls) == len(set(calls)) == MOST_STUCK
    release.set()
    for thread in calls:
        thread.join(timeout=30)
        assert not thread.is_alive()
    called.clear()
    rewards.score([rollout("")])
    assert called.wait(timeout=30)


def test_calls_run_side_by_side_where_it_has_workers(mine):
    barrier = threading.Barrier(3)
    rewards = mine(lambda completion, prompt: barrier.wait(timeout=20) >= 0, workers=3)
    assert [s.total for s in rewards.score([rollout("")] * 6)] == [1.0] * 6
    rewards.close()


def test_a_slow_function_has_an_end_and_what_it_was_not_called_for_is_said_once_a_step(mine, caplog):
    rewards = mine(lambda completion, prompt: 1.0 + bool(threading.Event().wait(0.02)), batch_timeout_s=0.3, default=-1.0)
    for _ in range(2):
        caplog.clear()
        scored = rewards.score([rollout("")] * 200)
        failed = [bool(s.failed) for s in scored]
        assert failed == sorted(failed), "the first ones have values"
        assert 0 < sum(failed) < 200
        assert [s.total for s in scored] == [-1.0 if f else 1.0 for f in failed]
        lines = [text for text in caplog.messages if "of 200 responses" in text]
        assert len(lines) == 1
        assert re.search(
            r"reward users:mine: \d+ of 200 responses: not called: batch_timeout_s=0.3 was over; .*default=-1", lines[0]
        )


def test_a_process_exits_with_a_call_that_hangs():
    result = subprocess.run(
        [sys.executable, "-c", HANGS],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": ":".join(sys.path)},
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "-1.0 ('users:hangs',)\n"), result.stderr


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        ("math:no_such", "math has no function 'no_such'"),
        ("math:pi", "math has no function 'pi'"),
        ("json:loads", r"it takes .*; allowed: \(completion, prompt\)"),
        ("math:cos", r"it takes .*; allowed: \(completion, prompt\)"),
    ],
)
def test_functions_that_cannot_be_called_are_named(name, expected):
    with pytest.raises(ValueError, match=f"reward {name}: {expected}"):
        Rewards([RewardConfig(name=name)])


def test_a_module_that_fails_to_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="reward broken_rewards:f: cannot import 'broken_rewards': ZeroDivisionError"):
        Rewards([RewardConfig(name="broken_rewards:f")])


def test_functions_of_the_text_by_name(mine):
    mine(lambda completion, prompt: len(completion))
    prompt = rollout("").prompt
    names = ("exact_match", "numeric_match", "regex:4", "format:4", "users:mine")
    assert [resolve(name)("is 42", prompt) for name in names] == [0.0, 1.0, 1.0, 0.0, 5]
    for name in ("length", "math_verify", "http://host/"):
        with pytest.raises(ValueError, match=f"reward {name} is no function of the text; allowed here: exact_match"):
            resolve(name)
    with pytest.raises(ValueError, match="did you mean exact_match"):
        resolve("exact_mach")
