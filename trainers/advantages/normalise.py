"""Means and variances over the tokens or responses of all ranks, each in two passes, so that nothing cancels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

PerToken = Float[Tensor, " n"]
Total = Callable[[Sequence[float]], list[float]]

MIN_STD = 1e-6  # less is rounding: such rewards are all equal


def whiten(advantages: list[Tensor], total: Total, *, eps: float = 1e-8) -> list[Tensor]:
    """(A - mean) / sqrt(variance + eps), both over all tokens of all responses on all ranks; the variance divides by their
    number.

    `advantages` are this rank's responses, [n_i] each. A single token becomes 0.
    """
    count, summed = total([sum(len(a) for a in advantages), sum(a.double().sum().item() for a in advantages)])
    mean = summed / max(count, 1)
    (squares,) = total([sum((a.double() - mean).square().sum().item() for a in advantages)])
    scale = (squares / max(count, 1) + eps) ** -0.5
    return [((a.double() - mean) * scale).to(a.dtype) for a in advantages]


def explained_variance(values: list[Tensor], returns: list[Tensor], total: Total) -> float:
    """1 - variance(returns - values) / variance(returns) over all tokens on all ranks, [n_i] per response: 1 for a perfect
    critic, 0 for one that knows only the mean. 0 too where the returns are all equal: there is nothing to explain."""
    errors = [r.double() - v.double() for r, v in zip(returns, values, strict=True)]
    of_returns, of_errors = (
        RunningMoments().updated([x for row in rows for x in row.tolist()], total) for rows in (returns, errors)
    )
    return 0.0 if of_returns.std < MIN_STD else 1 - of_errors.m2 / of_returns.m2


@dataclass(frozen=True)
class RunningMoments:
    """Mean and variance of every number seen so far. Plain floats: `dataclasses.asdict` goes through JSON without a change."""

    count: float = 0.0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared deviations from the mean

    @property
    def std(self) -> float:
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def updated(self, values: Sequence[float], total: Total) -> RunningMoments:
        """With the values of all ranks, `values` being this rank's (Chan et al. 1979, the parallel update). Collective."""
        count, summed = total([len(values), math.fsum(values)])
        if not count:  # on any rank
            return self
        batch_mean = summed / count
        (m2,) = total([math.fsum((x - batch_mean) ** 2 for x in values)])
        both, delta = self.count + count, batch_mean - self.mean
        return RunningMoments(both, self.mean + delta * count / both, self.m2 + m2 + delta**2 * self.count * count / both)

    def normalised(self, values: PerToken, *, shift_mean: bool) -> PerToken:
        """(values - mean) / std, or values / std. Where all numbers so far were equal, std counts as 1."""
        std = self.std if self.std >= MIN_STD else 1.0
        return ((values.double() - (self.mean if shift_mean else 0.0)) / std).to(values.dtype)
