"""The pool of ranks that other tests stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import Pool, RankError


def rank_and_pid() -> tuple[int, int, str]:
    return dist.get_rank(), os.getpid(), os.environ["OMP_NUM_THREADS"]


def fails_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ArithmeticError("boom")


def leaves_a_collective(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(1))


def dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def test_ranks_live_on_and_errors_come_back(pool2):
    first = pool2.run(rank_and_pid)
    assert [(rank, threads) for rank, _, threads in first] == [(0, "1"), (1, "1")]
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*fails_on.*boom"):
        pool2.run(fails_on, 1)
    assert pool2.run(rank_and_pid) == first


@pytest.mark.slow
def test_a_hung_collective_ends_the_call_the_pool_starts_anew_and_a_dead_rank_is_named():
    pool = Pool(2)
    try:
        with pytest.raises(TimeoutError, match=r"rank \[1\] of 2"):
            pool.run(leaves_a_collective, 0, timeout_s=20)
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 1: the process died"):
            pool.run(dies)
        assert time.monotonic() - start < 100
    finally:
        pool.close()
