"""Fixtures of the whole suite: one pool of 2 and one of 4 gloo ranks, started at first use and kept to the end of the run."""

from __future__ import annotations

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
