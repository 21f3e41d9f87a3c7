"""Reductions: one number per optimizer step, whatever the split over ranks and micro-batches."""

from __future__ import annotations

import itertools

import pytest
import torch
from beartype import beartype
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped

from hybrid.batch import Batch
from trainers.losses import reductions

target_weights = jaxtyped(typechecker=beartype)(reductions.target_weights)
denominator = jaxtyped(typechecker=beartype)(reductions.denominator)


def batch_of(counted: list[int]) -> Batch:
    """One sequence per entry, of one prompt token and that many counted ones."""
    lengths = torch.tensor([1 + n for n in counted], dtype=torch.long)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(ends[-1])
    index = torch.cat([torch.arange(int(s), int(s) + n) for s, n in zip(ends, counted)] or [torch.zeros(0, dtype=torch.long)])
    sequence = torch.repeat_interleave(torch.arange(len(counted)), torch.tensor(counted, dtype=torch.long))
    return Batch(torch.zeros(total, dtype=torch.long), torch.zeros(total), ends, index, torch.zeros_like(index), sequence)


def reduced(parts: list[list[list[float]]], reduction: reductions.Reduction) -> float:
    """The step's loss from micro-batches of sequences of per-token losses, as ranks would sum it."""
    total, divisor = 0.0, 0
    for part in parts:
        batch = batch_of([len(sequence) for sequence in part])
        losses = torch.tensor([x for sequence in part for x in sequence])
        total += float((target_weights(batch, reduction, 4) * losses).sum())
        divisor += denominator(batch, reduction)
    return total / divisor


def test_values_by_hand() -> None:
    step = [[1.0, 2.0, 3.0], [10.0], []]
    assert reduced([step], "token_mean") == pytest.approx(16 / 4)
    assert reduced([step], "sequence_mean") == pytest.approx((2 + 10) / 2)  # an empty response has no mean
    assert reduced([step], "sum_per_constant") == pytest.approx((6 / 4 + 10 / 4) / 2)


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    step=st.lists(st.lists(st.floats(-5, 5, width=32), max_size=5), min_size=1, max_size=7).filter(any),
    cuts=st.lists(st.integers(0, 7), max_size=3),
    reduction=st.sampled_from(["token_mean", "sequence_mean", "sum_per_constant"]),
)
def test_any_split_gives_the_same_number(step: list[list[float]], cuts: list[int], reduction: reductions.Reduction) -> None:
    edges = [0, *sorted(min(c, len(step)) for c in cuts), len(step)]
    parts = [step[a:b] for a, b in itertools.pairwise(edges)]  # some of them empty
    assert reduced(parts, reduction) == pytest.approx(reduced([step], reduction), rel=1e-5, abs=1e-5)


def test_constant_length_is_required_where_it_is_used() -> None:
    with pytest.raises(ValueError, match="constant_length"):
        target_weights(batch_of([1]), "sum_per_constant")
