"""Calls that hang, raise or come late, one after the other and side by side."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from trainers.deadline import MOST_STUCK, Deadline, Late, NotCalled, OutOfTime


def ended(deadline: Deadline) -> None:
    for thread in deadline._given_up:
        thread.join(timeout=30)
        assert not thread.is_alive()


@pytest.mark.parametrize("workers", [3, math.inf])
def test_calls_run_side_by_side_and_an_error_is_a_result(workers):
    barrier = threading.Barrier(3)

    def meet(number: int) -> int:
        barrier.wait(timeout=20)  # all three at the same time, or none
        return number

    deadline = Deadline(30.0, workers=workers)
    results = deadline.run([lambda: int("x"), *(partial(meet, number) for number in (1, 2, 3))])
    assert results[1:] == [1, 2, 3]
    assert isinstance(results[0], ValueError)
    assert isinstance(deadline.call(sys.exit), SystemExit)
    assert deadline.run([]) == []


def test_no_more_than_its_workers_at_a_time():
    most, now, lock = [0], [0], threading.Lock()

    def work() -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        threading.Event().wait(0.002)
        with lock:
            now[0] -= 1

    Deadline(30.0, workers=3).run([work] * 20)
    assert 1 <= most[0] <= 3


def test_a_call_that_hangs_is_left_behind_and_what_it_says_later_changes_nothing():
    leave = threading.Event()
    deadline = Deadline(0.2, workers=2)
    results = deadline.run([lambda: leave.wait() and "late", lambda: "in time"])
    assert isinstance(results[0], Late)
    assert str(results[0]) == "it took longer than timeout_s=0.2"
    assert results[1] == "in time"
    leave.set()
    ended(deadline)
    assert isinstance(results[0], Late)
    assert deadline.call(lambda: "of the next") == "of the next"


@pytest.mark.parametrize(("workers", "most_stuck"), [(1, MOST_STUCK), (math.inf, 64)])
def test_where_too_many_hang_nobody_is_called_until_they_return(workers, most_stuck):
    leave, called, deadline = threading.Event(), [], Deadline(0.02, workers=workers, most_stuck=most_stuck)
    deadline.run([leave.wait] * most_stuck)
    refused = deadline.call(called.append, 1)
    assert isinstance(refused, NotCalled)
    assert f"{most_stuck} calls before it took too long and have not returned" in str(refused)
    assert not called
    leave.set()
    ended(deadline)
    assert deadline.call(lambda: "again") == "again"


def test_late_calls_that_have_returned_are_not_counted_as_stuck():
    """Each ends the one before it: never are there two of them."""
    leave = [threading.Event() for _ in range(3 * MOST_STUCK)]
    deadline = Deadline(0.02)

    def late(i: int) -> None:
        if i:
            leave[i - 1].set()
            ended(deadline)
        leave[i].wait()

    found = deadline.run([partial(late, i) for i in range(len(leave))])
    assert {type(error) for error in found} == {Late}
    leave[-1].set()


def test_a_batch_ends():
    leave, deadline, called = threading.Event(), Deadline(60.0, workers=2), []
    deadline.begin(0.5)
    first = deadline.run([leave.wait, *[lambda: called.append(1)] * 3, leave.wait, leave.wait, lambda: called.append(1)])
    assert [type(value) for value in first] == [Late, *[type(None)] * 3, Late, OutOfTime, OutOfTime]
    assert str(first[0]) == "it took longer than batch_timeout_s=0.5"
    assert str(first[-1]) == "not called: batch_timeout_s=0.5 was over"
    assert isinstance(deadline.call(called.append, 1), OutOfTime)
    assert len(called) == 3
    deadline.begin(60.0)
    assert deadline.call(lambda: "of the next") == "of the next"
    leave.set()


@pytest.fixture
def interruptible():
    """As a shell in the foreground starts a program; in the background Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_leaves_no_answer_for_the_next_call(interruptible):
    release = threading.Event()
    deadline = Deadline(60.0)

    def interrupt():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        release.wait(60)
        return "of the call that was interrupted"

    deadline.call(int)  # its thread is there
    with pytest.raises(KeyboardInterrupt):
        deadline.call(interrupt)
    release.set()
    assert deadline.call(lambda: "of the next") == "of the next"
    ended(deadline)


def test_a_call_that_hangs_does_not_keep_the_process():
    code = "import threading; from trainers.deadline import Deadline; Deadline(0.1).call(threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
