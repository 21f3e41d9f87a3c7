"""All components over the rollouts of one rank, and their metrics over all ranks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainers.deadline import Late, OutOfTime
from trainers.rewards.components import Component, open_component
from trainers.rewards.config import RewardConfig
from trainers.types import LARGEST_REWARD, Prompt, Rollout

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one rollout."""

    total: float  # the sum of weight * part
    parts: Mapping[str, float]  # by component, before its weight; the component's default where it failed
    failed: tuple[str, ...] = ()  # components that raised, took too long, or gave no finite number


class Rewards:
    """The components that `configs` name, in their order.

    A component that fails for a response counts as its default there and is listed in `Scores.failed`; it never ends the run. The
    first failure of each is logged. Raises ValueError, at construction, for a function that cannot be imported and for a
    package that is not installed.

    Each rank scores its own rollouts. `agree` (`mesh.raise_together`) is called after each component, with an error or None, on
    every rank: an error of one is then raised on all of them, and none waits for another longer than one component takes.
    """

    def __init__(self, configs: Sequence[RewardConfig], agree: Callable[[ValueError | None], None] | None = None) -> None:
        self._configs = tuple(configs)
        self.names = _unique([config.label for config in configs])
        self._components = [open_component(config) for config in configs]
        self._agree = agree or _raise
        self._logged: set[str] = set()

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError naming the first row whose answer a built-in reward cannot use (it has none, or one without a
        number). Collective where `agree` is."""
        for name, component in zip(self.names, self._components, strict=True):
            self._together(name, component.check, prompts)

    def score(self, rollouts: Sequence[Rollout]) -> list[Scores]:
        """Per rollout, in order. Collective where `agree` is."""
        columns = [
            self._together(name, self._column, name, config, component, rollouts)
            for name, config, component in zip(self.names, self._configs, self._components, strict=True)
        ]
        return [self._sum([column[i] for column in columns]) for i in range(len(rollouts))]

    def close(self) -> None:
        """End the threads and processes of components."""
        for component in self._components:
            component.close()

    def _together(self, name: str, function: Callable[..., T], *args: Any) -> T:
        found: list[T] = []
        problem: ValueError | None = None
        try:
            found.append(function(*args))
        except ValueError as error:
            problem = error
        except Exception as error:  # whatever it is: the other ranks wait
            problem = ValueError(f"reward {name}: {type(error).__name__}: {error}")
            problem.__cause__ = error
        self._agree(problem)
        return found[0]

    def _column(self, name: str, config: RewardConfig, component: Component, rollouts: Sequence[Rollout]) -> list[float | None]:
        """A component's value for each rollout, None where it failed."""
        values = component.values(rollouts)
        skipped = [value for value in values if isinstance(value, OutOfTime)]
        if skipped:
            logger.error(
                "reward %s: %d of %d responses: %s; they count as default=%g",
                name, len(skipped), len(values), skipped[0], config.default,
            )  # fmt: skip
        return [self._judge(name, config, rollout, value) for rollout, value in zip(rollouts, values, strict=True)]

    def _sum(self, values: Sequence[float | None]) -> Scores:
        parts = [config.default if value is None else value for config, value in zip(self._configs, values, strict=True)]
        return Scores(
            total=sum(config.weight * part for config, part in zip(self._configs, parts, strict=True)),
            parts=dict(zip(self.names, parts, strict=True)),
            failed=tuple(name for name, value in zip(self.names, values, strict=True) if value is None),
        )

    def _judge(self, name: str, config: RewardConfig, rollout: Rollout, value: Any) -> float | None:
        """The value as a float; None where it is none, with one line in the log for the component's first."""
        try:
            return _finite(value)
        except ValueError as problem:
            if name not in self._logged and not isinstance(value, OutOfTime):
                self._logged.add(name)
                # An error, since the other levels are shown on the main rank only, and this rank may be the only one to meet it.
                logger.error(
                    "reward %s: row %d: %s; it counts as default=%g, and so will further failures, which metrics count",
                    name, rollout.prompt.index, problem, config.default,
                )  # fmt: skip
            return None


def reward_metrics(
    scores: Sequence[Scores], names: Sequence[str], sum_over_ranks: Callable[[Sequence[float]], list[float]]
) -> dict[str, float]:
    """Over the responses of all ranks: `reward_mean` and `reward_std` (population) of the totals, and per component
    `reward/NAME`, the mean of its parts (defaults included), and `reward/NAME_failures`, how many failed.

    Collective: `sum_over_ranks` is `mesh.sum`, `names` is `Rewards.names`, equal on all ranks; `scores` may be empty on some.
    """
    local = [float(len(scores)), sum(s.total for s in scores)]
    local += [sum(s.parts[name] for s in scores) for name in names]
    local += [float(sum(name in s.failed for s in scores)) for name in names]
    count, total, *rest = sum_over_ranks(local)
    count = max(count, 1.0)
    mean = total / count
    (squares,) = sum_over_ranks([sum((s.total - mean) ** 2 for s in scores)])
    metrics = {"reward_mean": mean, "reward_std": math.sqrt(squares / count)}
    for name, part, failures in zip(names, rest[: len(names)], rest[len(names) :], strict=True):
        metrics |= {f"reward/{name}": part / count, f"reward/{name}_failures": failures}
    return metrics


def _raise(error: ValueError | None) -> None:
    if error is not None:
        raise error


def _finite(value: Any) -> float:
    """Raises ValueError saying what came instead of a finite number."""
    if isinstance(value, Late):
        raise ValueError(str(value))
    if isinstance(value, BaseException):
        raise ValueError(f"it raised {type(value).__name__}: {' '.join(str(value).split())}")
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception as error:  # a user's object: whatever its conversion raises
        raise ValueError(f"it gave {_shown(value)}; allowed: a finite number") from error
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"it gave {_shown(value)}; allowed: a finite number, up to {LARGEST_REWARD:g}")
    return number


def _shown(value: Any) -> str:
    if not isinstance(value, str | bytes | int | float | None):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _unique(labels: Sequence[str]) -> tuple[str, ...]:
    """A label that was there already gets a number: x, x_2, x_3."""
    names: list[str] = []
    for label in labels:
        name, number = label, 1
        while name in names:
            number += 1
            name = f"{label}_{number}"
        names.append(name)
    return tuple(names)
