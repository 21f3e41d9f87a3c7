"""By what a loss is multiplied before its backward in fp16, so that small gradients do not become 0. No torch.

Whoever trains reads `scale` before the backward, divides the gradients by that same number, skips the step if one of them is
not finite, and only then says so to `update`: the next `scale` is for the next step (Micikevicius et al. 2018, section 3.2).
"""

from __future__ import annotations

import inspect
import json
import math
import numbers
from collections.abc import Mapping
from typing import Any, Protocol, cast

from hybrid.training.config.precision import Fp16Config


class LossScaleError(RuntimeError):
    """An overflow came at the lowest loss scale."""


class LossScaler(Protocol):
    """Anything with these four drives the engine."""

    @property
    def scale(self) -> float:
        """Of the next backward; finite, above 0."""

    def update(self, overflow: bool) -> None:
        """Once per optimizer step: whether its gradients were not finite (the step was skipped)."""

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on from here, as JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class StaticLossScale:
    """Always `scale`; an overflow changes nothing."""

    def __init__(self, scale: float) -> None:
        """Raises ValueError for a scale that is not finite or not above 0."""
        self._scale = _positive("scale", scale)

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "static", "scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Only checks: the scale is the configuration's, also where it was another. Raises ValueError for another scaler's."""
        _check_state(state, self.state_dict())


class DynamicLossScale:
    """As high as gradients allow: `growth` times more after every `window` clean updates, `backoff` times less on an overflow.

    The sequence is that of DeepSpeed's ZeRO stages, for all stages. The first growth comes with clean update window + 1, counted
    from the start or the last overflow, every later one `window` on. Of overflows, the first `hysteresis` - 1 only count down
    and the others lower the scale; the count starts anew with a growth, with `consecutive_hysteresis` with any clean update.
    """

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        max_scale: float = 2.0**32,
        growth: float = 2.0,
        backoff: float = 0.5,
    ) -> None:
        """Raises ValueError for a number out of its range."""
        for name, count in (("window", window), ("hysteresis", hysteresis)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name}={count!r}; allowed: a whole number from 1")
        if not 1 < growth < math.inf or not 0 < backoff < 1:
            raise ValueError(f"growth={growth}, backoff={backoff}; allowed: growth above 1, backoff between 0 and 1")
        scale, low, high = _positive("initial_scale", initial_scale), _positive("min_scale", min_scale), float(max_scale)
        if not low <= scale <= high < math.inf:
            raise ValueError(
                f"initial_scale={scale:g}, min_scale={low:g}, max_scale={high:g}; "
                "allowed: min_scale <= initial_scale <= max_scale"
            )
        self._window, self._hysteresis, self._consecutive = window, hysteresis, consecutive_hysteresis
        self._min, self._max, self._growth, self._backoff = low, high, float(growth), float(backoff)
        self._scale = scale
        self._clean = 0  # clean updates since the last overflow
        self._left = hysteresis  # the overflow that lowers the scale is the one that finds 1
        self._updates = self._overflows = self._in_a_row = 0  # for messages

    @property
    def scale(self) -> float:
        return self._scale

    def update(self, overflow: bool) -> None:
        """Raises LossScaleError for an overflow that would lower the lowest scale."""
        self._updates += 1
        if overflow:
            self._on_overflow()
        else:
            self._on_clean()

    def _on_overflow(self) -> None:
        self._overflows += 1
        self._in_a_row += 1
        self._clean = 0
        if self._left > 1:
            self._left -= 1
        elif self._scale <= self._min:
            raise LossScaleError(
                f"gradients overflow at the lowest loss scale, {self._min:g}: {self._in_a_row} overflows in a row, "
                f"{self._overflows} in {self._updates} updates; lower the learning rate, look at this step's batch, train in "
                "bf16, or lower min_loss_scale"
            )
        else:
            self._scale = max(self._scale * self._backoff, self._min)

    def _on_clean(self) -> None:
        self._in_a_row = 0
        grows = self._clean > 0 and self._clean % self._window == 0
        if grows:
            self._scale = min(self._scale * self._growth, self._max)
        if grows or self._consecutive:
            self._left = self._hysteresis
        self._clean += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "kind": "dynamic",
            "scale": self._scale,
            "clean": self._clean,
            "hysteresis_left": self._left,
            "updates": self._updates,
            "overflows": self._overflows,
            "overflows_in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A scale or a count outside this scaler's own limits, which may have changed since, is brought within them. Raises
        ValueError for the state of another kind of scaler or one that is damaged, and changes nothing then."""
        _check_state(state, self.state_dict())
        self._scale = min(max(float(state["scale"]), self._min), self._max)
        self._clean = state["clean"]
        self._left = min(max(state["hysteresis_left"], 1), self._hysteresis)
        self._updates, self._overflows = state["updates"], state["overflows"]
        self._in_a_row = state["overflows_in_a_row"]


def loss_scaler_of(fp16: Fp16Config) -> LossScaler:
    """The scaler that the section asks for; 1, unchanging, where fp16 is off."""
    if not fp16.dynamic:
        return StaticLossScale(fp16.loss_scale if fp16.enabled else 1.0)
    return DynamicLossScale(
        initial_scale=fp16.initial_scale,
        window=fp16.loss_scale_window,
        hysteresis=fp16.hysteresis,
        consecutive_hysteresis=fp16.consecutive_hysteresis,
        min_scale=float(fp16.min_loss_scale),
        max_scale=fp16.max_loss_scale,
        growth=fp16.growth_factor,
        backoff=fp16.backoff_factor,
    )


def check_loss_scaler(scaler: object) -> LossScaler:
    """A user's own scaler, if it is one. Raises ValueError that names all that is missing or wrong."""
    if isinstance(scaler, type):
        raise ValueError(f"loss scaler {scaler.__name__} is a class; allowed: an object; call it")
    problems = []
    scale = getattr(scaler, "scale", None)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not 0 < float(scale) < math.inf:
        problems.append(f"scale (is {scale!r}; a finite number above 0)" if hasattr(scaler, "scale") else "scale")
    for name, arguments in (("update", ("overflow",)), ("state_dict", ()), ("load_state_dict", ("state",))):
        method = getattr(scaler, name, None)
        if not callable(method) or not _takes(method, len(arguments)):
            problems.append(f"{name}({', '.join(arguments)})")
    if not problems and not _is_json_object(cast(LossScaler, scaler).state_dict()):
        problems.append("state_dict() (gives no JSON object, so no checkpoint can hold it)")
    if problems:
        raise ValueError(
            f"loss scaler {type(scaler).__name__} lacks {', '.join(problems)}; allowed: an object with scale, update(overflow), "
            "state_dict() and load_state_dict(state)"
        )
    return cast(LossScaler, scaler)


def _takes(method: Any, arguments: int) -> bool:
    try:
        inspect.signature(method).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return True
    return True


def _is_json_object(state: object) -> bool:
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return isinstance(state, dict)


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}; allowed: a finite number above 0")
    return float(value)


def _check_state(state: Mapping[str, Any], like: Mapping[str, Any]) -> None:
    if state.get("kind") != like["kind"]:
        raise ValueError(
            f"the loss scaler does not fit: {like['kind']} here, {state.get('kind')} there; resume with the fp16 section it had"
        )
    if state.keys() != like.keys():
        missing, surplus = sorted(like.keys() - state.keys()), sorted(state.keys() - like.keys())
        raise ValueError(f"the loss scaler's state does not fit: missing {missing}, surplus {surplus}; resume another checkpoint")
    for name, value in state.items():
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        is_scale = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        if name != "kind" and not (is_scale if name == "scale" else is_count):
            raise ValueError(f"the loss scaler's state is damaged: {name}={value!r}; resume another checkpoint")
