import os
import signal
import time

import pytest

from recipes import launch
from recipes.launch import StopSignal


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_a_flag_and_the_exit_code(signum):
    with StopSignal() as stop:
        assert not stop()
        os.kill(os.getpid(), signum)
        assert stop()
        assert stop.exit_code == 128 + signum


def test_a_forwarded_copy_of_a_signal_is_not_a_second_one():
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()


def test_a_second_signal_ends_the_process(monkeypatch):
    monkeypatch.setattr(launch, "SAME_SIGNAL_SECONDS", 0.0)
    pid = os.fork()
    if pid == 0:
        with StopSignal():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal():
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_rank_that_starts_after_its_launcher_was_killed_leaves(monkeypatch):
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    monkeypatch.setenv(launch.LAUNCHER, str(gone))
    monkeypatch.setenv("RANK", "1")
    pid = os.fork()
    if pid == 0:
        launch.leave_with_launcher()
        time.sleep(5)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


@pytest.mark.parametrize(
    ("exit_codes", "job", "line"),
    [
        ({}, 0, ""),
        ({0: 1, 1: -9}, 1, "rank 1 was killed by SIGKILL"),
        ({0: -15, 1: -9}, 1, "rank 1 was killed by SIGKILL"),
        ({0: -6, 1: -9}, 1, "rank 1 was killed by SIGKILL"),  # rank 0 aborted in the teardown of its broken group
        ({0: -6, 1: -15}, 1, "rank 0 was killed by SIGABRT"),
        ({0: -15, 1: 1}, 1, "rank 1 failed with exit code 1"),
        ({0: -15, 1: 2}, 2, ""),
        ({0: 1, 1: 2}, 2, ""),
        ({0: 143, 1: -15}, 143, ""),
        ({0: 130, 1: 130}, 130, ""),
        ({0: -15, 1: -15}, 1, "rank 0 was killed by SIGTERM"),
    ],
)
def test_the_root_cause_of_a_lost_job_is_named(exit_codes, job, line, capsys):
    assert launch._explain(exit_codes) == job
    said = capsys.readouterr().err
    assert said.count("\n") == bool(line)
    assert line in said
