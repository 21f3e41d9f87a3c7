"""DeepSpeed's learning-rate schedules as closed forms of an optimizer step's index, which counts from -1. No torch.

No rate is made from the one before, so none drifts, and a resumed run sees the very numbers of one that was not interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hybrid.training.config.schedulers import (
    LRRangeTest,
    OneCycle,
    ScheduleParams,
    Warmup,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

MAX_MOMENTUM = 0.999  # of OneCycle's decay, which has none in DeepSpeed and there passes 1, where Adam's averages explode


def rates(params: ScheduleParams, base: Sequence[float], index: int) -> list[float]:
    """The learning rate of each parameter group at `index`; `base` are the groups' rates in the optimizer as it was made."""
    match params:
        case WarmupLR():
            return _between(params.warmup_min_lr, params.warmup_max_lr, base, warmup_share(params, index))
        case WarmupDecayLR():
            return _between(params.warmup_min_lr, params.warmup_max_lr, base, decay_share(params, index))
        case WarmupCosineLR():
            return [rate * cosine_ratio(params, index) for rate in base]
        case OneCycle():
            low, high = params.cycle_min_lr, params.cycle_max_lr
            decay = 1.0 + params.decay_lr_rate * _decay_intervals(params, index)
            return [rate / decay for rate in _between(low, high, base, cycle_share(params, index))]
        case LRRangeTest():
            factor = 1.0 + params.lr_range_test_step_rate * range_intervals(params, index)
            return [rate * factor for rate in per_group(params.lr_range_test_min_lr, len(base))]
    raise AssertionError(f"no rates for {type(params).__name__}")


def warmup_share(params: Warmup, index: int) -> float:
    """How far from the minimum to the maximum: 0 at index -1, then log(i + 1) / log(W) or i / W, and 1 from index W on."""
    end = params.warmup_end
    if index >= end or end == 0:
        return 1.0
    if index < 0:
        return 0.0
    return math.log(index + 1) / math.log(end) if params.warmup_type == "log" else index / end


def decay_share(params: WarmupDecayLR, index: int) -> float:
    """The rise, then (T - i) / (T - W), from 1 at index W to 0 at index T and after."""
    end, total = params.warmup_end, _total(params.total_num_steps)
    if index < end:
        return warmup_share(params, index)
    return min(1.0, max(0.0, (total - index) / max(1, total - end)))


def cosine_ratio(params: WarmupCosineLR, index: int) -> float:
    """Share of the optimizer's rate: the rise from warmup_min_ratio, then half a cosine down to cos_min_ratio, whose first
    step, of T - W, is index W. (At index -1 DeepSpeed uses 0, under the minimum it was given; here it is the minimum.)"""
    end, total, low, floor = params.warmup_end, _total(params.total_num_steps), params.warmup_min_ratio, params.cos_min_ratio
    if index < end:
        return low + (1.0 - low) * warmup_share(params, index)
    done = min(1.0, (index - end + 1) / max(1, total - end))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))


def cycle_share(params: OneCycle, index: int) -> float:
    """How far from the minimum to the maximum: a line up over the first half, one down over the second, in stairs where it has
    some; 0 after the cycle."""
    up, down = params.cycle_first_step_size, params.down_steps
    done = index + 1
    if done >= up + down:
        return 0.0
    steps, left, stairs = (
        (up, done, params.cycle_first_stair_count) if done <= up else (down, up + down - done, params.down_stairs)
    )
    return (left * stairs // steps) / stairs if stairs else left / steps


def momenta(params: OneCycle, groups: int, index: int) -> list[float]:
    """The momentum (Adam's beta 1) of each parameter group, high where the rate is low. At index -1 it is the lowest, as in
    DeepSpeed, which sets that with the scheduler's construction. After the cycle it rises, up to MAX_MOMENTUM."""
    low, high = per_group(params.cycle_min_mom, groups), per_group(params.cycle_max_mom, groups)
    if index < 0:
        return low
    share, growth = cycle_share(params, index), 1.0 + params.decay_mom_rate * _decay_intervals(params, index)
    return [min((b - (b - a) * share) * growth, max(b, MAX_MOMENTUM)) for a, b in zip(low, high, strict=True)]


def range_intervals(params: LRRangeTest, index: int) -> float:
    """How many times step_size steps have passed, whole ones only for a staircase."""
    size = params.lr_range_test_step_size
    return (index + 1) // size if params.lr_range_test_staircase else (index + 1) / size


def per_group(value: float | tuple[float, ...], groups: int) -> list[float]:
    """One value for each group. Raises ValueError for a list of another length."""
    if not isinstance(value, tuple):
        return [value] * groups
    if len(value) != groups:
        raise ValueError(f"{len(value)} values {list(value)} for {groups} parameter groups; allowed: one, or one per group")
    return list(value)


def _between(
    low: float | tuple[float, ...], high: float | tuple[float, ...] | None, base: Sequence[float], share: float
) -> list[float]:
    highs = list(base) if high is None else per_group(high, len(base))
    return [a + (b - a) * share for a, b in zip(per_group(low, len(base)), highs, strict=True)]


def _decay_intervals(params: OneCycle, index: int) -> float:
    after = index + 1 - (params.cycle_first_step_size + params.down_steps)
    return after / params.decay_step_size if after > 0 and params.decay_step_size else 0.0


def _total(steps: int | None) -> int:
    assert steps is not None, "refused by PeerSchedule"
    return steps
