"""Which prompts a step gets is a function of (seed, epoch, offset) alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainers.data.order import DataPosition, PromptStream, coin, share, stable_hash
from trainers.types import Prompt

PROMPTS = [Prompt(index=i, ids=(i + 1,), text=str(i)) for i in range(10)]


def stream(**changes: object) -> PromptStream:
    return PromptStream(PROMPTS, **{"seed": 0, "shuffle": True, **changes})


def rows(drawn) -> list[int]:
    return [d.prompt.index for d in drawn]


def test_every_pass_is_a_permutation_of_its_own():
    passes = [rows(stream(position=DataPosition(epoch, 0)).take(10)) for epoch in range(3)]
    assert all(sorted(p) == list(range(10)) for p in passes)
    assert len({tuple(p) for p in passes}) == 3
    assert rows(stream(seed=1).take(10)) != passes[0]
    assert rows(stream(shuffle=False).take(12)) == [*range(10), 0, 1]


@given(st.lists(st.integers(1, 13), max_size=8), st.integers(0, 8))
def test_a_resumed_stream_goes_on_exactly_also_within_a_pass(counts, cut):
    whole = stream()
    expected = [whole.take(n) for n in counts]
    first = stream()
    for n in counts[:cut]:
        first.take(n)
    second = stream(position=DataPosition(**first.position.to_json()))
    assert [second.take(n) for n in counts[cut:]] == expected[cut:]


def test_keys_are_unique_in_a_run_and_do_not_depend_on_the_step_size():
    drawn = stream().take(30)
    assert len({d.key for d in drawn}) == 30
    small = stream()
    assert [d.key for _ in range(10) for d in small.take(3)] == [d.key for d in drawn]
    assert all(0 <= d.key < 2**63 for d in drawn)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_shares_of_all_ranks_are_the_step(world_size):
    drawn = stream().take(5)
    shares = [share(drawn, rank, world_size) for rank in range(world_size)]
    assert sorted(i for s in shares for i in rows(s)) == sorted(rows(drawn))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_shares_are_even_in_the_work_that_is_expected():
    drawn = stream().take(5)
    work = [9, 1, 1, 3, 4]
    assert [rows(share(drawn, rank, 2, work)) for rank in range(2)] == [
        [r for r, w in zip(rows(drawn), work, strict=True) if w == 9],
        [r for r, w in zip(rows(drawn), work, strict=True) if w != 9],
    ]


def test_the_coin_depends_on_seed_and_step_only():
    flips = [coin(0, step, 0.3) for step in range(2000)]
    assert flips == [coin(0, step, 0.3) for step in range(2000)]
    assert 0.25 < sum(flips) / 2000 < 0.35
    assert not any(coin(0, step, 0.0) for step in range(100))
    assert all(coin(0, step, 1.0) for step in range(100))


def test_hashes_do_not_depend_on_the_process():
    code = "from trainers.data.order import stable_hash; print(stable_hash('prompt', 3, 7))"
    other = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "123"}, capture_output=True, text=True, check=True
    )
    assert int(other.stdout) == stable_hash("prompt", 3, 7)
    assert stable_hash(1, 23) != stable_hash(12, 3)


def test_a_position_in_other_data_is_refused():
    with pytest.raises(ValueError, match="there are 10 prompts, and were 9"):
        stream(position=DataPosition(0, 3, 9))
