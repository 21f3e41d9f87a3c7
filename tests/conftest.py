"""Fixtures of the whole suite: one pool of 2 and one of 4 gloo ranks, started at first use and kept to the end of the run."""

from __future__ import annotations

import os

# Before torch loads: tiny tensors are not worth a second thread, and one that spins takes the core the ranks need.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator

import pytest
from pool import Pool


def _pool(size: int) -> Iterator[Pool]:
    pool = Pool(size)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    yield from _pool(4)
