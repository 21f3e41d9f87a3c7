"""Who computes what: work dealt out beforehand, and whole requests taken over on the way."""

from __future__ import annotations

import random

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid.queues import Queues
from hybrid.shares import deal


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 5))
def test_a_deal_is_whole_even_and_a_function_of_the_work(work, ranks):
    shares = deal(work, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(work)))
    assert all(share == sorted(share) for share in shares)
    assert shares == deal(list(work), ranks)
    loads = [sum(work[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(work, default=0)  # whoever has most did so before its last item


def test_equal_items_go_round_in_turn():
    assert deal([3.0] * 5, 2) == [[0, 2, 4], [1, 3]]
    assert deal([0.0] * 3, 2) == [[0, 2], [1]]
    assert deal([1, 1, 1, 9], 2) == [[3], [0, 1, 2]]
    assert deal([], 2) == [[], []]


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 2**32))
def test_every_request_is_claimed_once_whatever_the_order_of_the_ranks(sizes, seed):
    choice = random.Random(seed)
    numbers = iter(range(100))
    queues = [[next(numbers) for _ in range(size)] for size in sizes]
    store = dist.HashStore()
    ranks = [Queues(queues, rank, store, "q") for rank in range(len(queues))]
    claimed: list[list[int]] = [[] for _ in queues]
    stolen = set()
    while sum(map(len, claimed)) < sum(sizes):
        r = choice.randrange(len(queues))
        what = choice.choice(("claim", "open", "steal"))
        if what == "open":
            ranks[r].open()
        elif what == "claim" and (i := ranks[r].claim()) is not None:
            claimed[r].append(i)
        elif what == "steal":
            found = ranks[r].steal(choice.randint(1, 5))
            claimed[r] += found
            stolen |= set(found)
            assert not set(found) & set(queues[r])
    assert sorted(i for c in claimed for i in c) == sorted(i for q in queues for i in q)
    assert all(
        [i for i in c if i in q] == [i for i in q if i in c] for c, q in zip(claimed, queues, strict=True)
    )  # own, in order
    assert all(rank.claim() is None and rank.steal(9) == [] for rank in ranks)
    for rank in ranks:
        rank.close()
    assert store.num_keys() == 0


def test_a_queue_that_is_not_open_is_left_alone_and_an_open_one_is_shared():
    store = dist.HashStore()
    queues = [[], list(range(9)), []]
    first, owner, last = (Queues(queues, rank, store, "q") for rank in range(3))
    assert owner.claim() == 0
    assert first.steal(9) == []
    owner.open()
    assert first.steal(9) == [1, 2, 3]  # a third of the eight that are left
    assert last.steal(1) == [4]
    assert owner.claim() == 5
    assert [last.steal(9), first.steal(9), first.steal(9), owner.claim()] == [[6], [7], [8], None]


@pytest.mark.parametrize("sizes", [[0, 0], [3, 0]])
def test_an_own_queue_that_is_done_is_not_opened(sizes):
    store = dist.HashStore()
    queues = [list(range(size)) for size in sizes]
    first, second = (Queues(queues, rank, store, "q") for rank in range(2))
    assert [first.claim() for _ in range(sizes[0] + 1)] == [*range(sizes[0]), None]
    first.open()
    assert second.steal(5) == []
