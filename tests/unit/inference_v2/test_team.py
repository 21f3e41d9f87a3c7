"""The threads of the C++ kernels: after a fork, and used by several Python threads at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

from inference_v2.kernels.cpu import BuildError, load_kernels


@pytest.fixture(autouse=True)
def three_threads():
    try:
        load_kernels()
    except BuildError as error:
        pytest.skip(str(error))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


X, ONES = torch.arange(400 * 512, dtype=torch.float32).view(400, 512) / 1e4, torch.ones(512)


def large_job() -> bytes:
    """No operation of torch's that would use OpenMP, which does not survive a fork."""
    return load_kernels().rms_norm(X, ONES, 1e-5).numpy().tobytes()


def test_a_forked_child_has_threads_of_its_own():
    want = large_job()  # the parent's are started
    pid = os.fork()
    if pid == 0:
        os._exit(0 if large_job() == want and len(os.listdir("/proc/self/task")) == 3 else 1)
    deadline = time.monotonic() + 60
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail("the child waits for threads that it does not have")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 0


def test_python_threads_do_not_wait_for_each_others_jobs_and_get_right_results():
    want, wrong = large_job(), []

    def work() -> None:
        torch.set_num_threads(3)
        wrong.extend(i for i in range(200) if large_job() != want)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
