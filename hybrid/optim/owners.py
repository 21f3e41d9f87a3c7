"""Whole matrices on one rank each: shards travel to an owner, which works on the whole matrix, and its result travels back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid.sharding import local_rows

ROUND_NUMEL = 2**24  # numbers that an owner holds whole in one round, unless a single matrix has more

Shape = tuple[int, int]


def plan_rounds(shapes: Sequence[Shape], ranks: int, limit: int = ROUND_NUMEL) -> list[list[list[int]]]:
    """Which rank owns which matrix in which round: [round][rank] = places in `shapes`.

    The largest first, each to the rank that has least so far. A rank's part of a round is `limit` numbers, or one matrix. The
    same on every rank: it depends on nothing else.
    """
    queues: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for place in sorted(range(len(shapes)), key=lambda i: -prod(shapes[i])):
        owner = loads.index(min(loads))
        queues[owner].append(place)
        loads[owner] += prod(shapes[place])
    chunked = [list(_chunks(queue, shapes, limit)) for queue in queues]
    length = max(map(len, chunked), default=0)
    return [[chunks[i] if i < len(chunks) else [] for chunks in chunked] for i in range(length)]


def _chunks(queue: Sequence[int], shapes: Sequence[Shape], limit: int) -> Iterator[list[int]]:
    chunk: list[int] = []
    filled = 0
    for place in queue:
        if chunk and filled + prod(shapes[place]) > limit:
            yield chunk
            chunk, filled = [], 0
        chunk.append(place)
        filled += prod(shapes[place])
    if chunk:
        yield chunk


def on_whole(
    shard: Callable[[int], Tensor],
    shapes: Sequence[Shape],
    function: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup | None,
    limit: int = ROUND_NUMEL,
) -> Iterator[tuple[int, Tensor]]:
    """(place, this rank's rows of `function(matrix)`) of every matrix, each computed once, by its owner.

    `shard(place)`, asked for once and in the round of its matrix, gives this rank's rows [rows, columns] of a matrix of
    `shapes`. All are of one dtype, in which they travel; `function` keeps shapes. Collective over `group`: two all-to-alls a
    round, which move each matrix once to its owner and once back (what the owner has itself does not travel). Every rank must
    give the same matrices in the same order. group None: shards are whole.
    """
    if group is None:
        for place in range(len(shapes)):
            whole = shard(place)
            yield place, function(whole).to(whole.dtype)
        return
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for owned in plan_rounds(shapes, ranks, limit):
        places = [i for own in owned for i in own]
        sizes = {i: _rows(shapes[i], ranks, rank) * shapes[i][1] for i in places}
        there = [sum(sizes[i] for i in own) for own in owned]  # numbers that go to each owner
        mine = [shapes[i] for i in owned[rank]]
        here = [sum(_rows(shape, ranks, source) * shape[1] for shape in mine) for source in range(ranks)]
        gathered = _all_to_all(torch.cat([shard(i).reshape(-1) for i in places]), there, here, group)
        results = [function(whole).to(whole.dtype) for whole in _assemble(gathered, mine, here)]
        cut = [result.split([_rows(result.shape, ranks, r) for r in range(ranks)]) for result in results]
        back = [parts[r].reshape(-1) for r in range(ranks) for parts in cut]
        returned = _all_to_all(torch.cat([gathered[:0], *back]), here, there, group)
        for i, piece in zip(places, returned.split([sizes[i] for i in places]), strict=True):
            yield i, piece.view(-1, shapes[i][1])


def _rows(shape: Sequence[int], ranks: int, rank: int) -> int:
    held = local_rows(shape[0], ranks, rank)
    return held.stop - held.start


def _assemble(flat: Tensor, shapes: Sequence[Shape], from_each: Sequence[int]) -> list[Tensor]:
    """Whole matrices of what came: by rank, and inside of a rank by matrix."""
    ranks = len(from_each)
    pieces = [
        part.split([_rows(shape, ranks, source) * shape[1] for shape in shapes])
        for source, part in enumerate(flat.split(list(from_each)))
    ]
    return [torch.cat([pieces[source][i] for source in range(ranks)]).view(shape) for i, shape in enumerate(shapes)]


def _all_to_all(flat: Tensor, to_each: list[int], from_each: list[int], group: dist.ProcessGroup) -> Tensor:
    received = flat.new_empty(sum(from_each))
    dist.all_to_all_single(received, flat, from_each, to_each, group=group)
    return received
