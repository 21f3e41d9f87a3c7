"""Whole requests taken over by ranks that have room: one counter a rank in the process group's store, no collective.

A rank works off its own queue; once it can start no more of it, it opens the rest to the others. Who computes a request changes
when it is done, not what comes out: randomness is keyed by prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist


class Queues:
    """`queues[r]` lists what rank r begins with, in its order. Everything is claimed exactly once. All ranks make this together,
    with equal queues, and a `name` that no other in the store's life has."""

    def __init__(self, queues: Sequence[Sequence[int]], rank: int, store: dist.Store, name: str) -> None:
        self._queues = queues
        self._rank = rank
        self._store = dist.PrefixStore(name, store)
        self._taken = 0  # of the own queue, while it is not open
        self._is_open = False
        self._num_opened = 0  # known to this rank
        self._others: list[int] = []  # whose queues are open and not known to be empty

    def claim(self) -> int | None:
        """The next of the own queue, or None."""
        if self._is_open:
            return next(iter(self._take(self._rank, 1)), None)
        if self._taken == len(self._queues[self._rank]):
            return None
        self._taken += 1
        return self._queues[self._rank][self._taken - 1]

    def open(self) -> None:
        """Let the others take what is left of the own queue."""
        if self._is_open or self._taken == len(self._queues[self._rank]):
            return
        self._is_open = True
        self._store.add(f"taken/{self._rank}", self._taken)
        number = self._store.add("opened", 1)
        self._store.set(f"opened/{number}", str(self._rank))

    def steal(self, most: int) -> list[int]:
        """At most `most` of what another rank has opened: an even share of what is left there, so that others find some too."""
        opened = self._store.add("opened", 0)
        for number in range(self._num_opened + 1, opened + 1):
            owner = int(self._store.get(f"opened/{number}").decode())
            if owner != self._rank:
                self._others.append(owner)
        self._num_opened = opened
        while self._others:
            owner = self._others[0]
            left = len(self._queues[owner]) - self._store.add(f"taken/{owner}", 0)
            if left > 0 and (claimed := self._take(owner, min(most, -(-left // len(self._queues))))):
                return claimed
            self._others.pop(0)
        return []

    def close(self) -> None:
        """Take this rank's keys out of the store, once no rank claims any more."""
        if self._is_open:
            self._store.delete_key(f"taken/{self._rank}")
        if self._rank == 0:
            for number in range(1, self._store.add("opened", 0) + 1):
                self._store.delete_key(f"opened/{number}")
            self._store.delete_key("opened")

    def _take(self, owner: int, count: int) -> list[int]:
        end = self._store.add(f"taken/{owner}", count)
        return list(self._queues[owner][end - count : end])
