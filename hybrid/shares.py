"""Who does what: work dealt out to ranks before it is known how long it takes. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def deal(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of `work` for each rank, ascending: the largest goes first, to the rank that has least so far (of equals to the one
    with fewest items, then to the lowest). A function of its arguments alone; equal items go round in turn."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], len(shares[r]), r))
        shares[rank].append(i)
        loads[rank] += work[i]
    return [sorted(share) for share in shares]
