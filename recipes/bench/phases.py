"""Where the time of an engine's steps goes, measured from outside: the hot code knows nothing of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from inference_v2 import sampler
from inference_v2.engine import InferenceEngine
from inference_v2.head import Head

PARTS = ("forward", "head", "sample", "host")


@dataclass
class Step:
    """Seconds of one `engine.step()` that ran `tokens` tokens of `requests` requests."""

    tokens: int = 0
    requests: int = 0
    whole: float = 0.0
    decoder: float = 0.0  # Decoder.forward, with what it reads at its end
    read: float = 0.0  # of this, reading hidden states into tokens or scores
    head: float = 0.0  # hidden states to logits
    sample: float = 0.0  # logits to tokens

    @property
    def is_decode(self) -> bool:
        """Every request gave one token."""
        return self.tokens == self.requests

    def seconds(self, part: str) -> float:
        """`forward`: layers and norms; `host`: scheduling, metadata, bookkeeping, all that is nothing else."""
        forward = self.decoder - self.read
        parts = {"forward": forward, "head": self.head, "sample": self.sample}
        return parts[part] if part in parts else self.whole - sum(parts.values())


@contextmanager
def watched(engine: InferenceEngine) -> Iterator[list[Step]]:
    """Inside the `with` every step of `engine` is timed; the list holds those that computed tokens. One engine at a time: for
    as long as it lasts, `Head.logits` and `sampler.draw` are wrapped for all."""
    steps: list[Step] = []
    now = Step()

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal now
        now = Step()
        done = add_time("whole", plain_step)(*args, **kwargs)
        if now.tokens:
            steps.append(now)
        return done

    def forward(batch: Any, cache: Any, weights: Any, read: Callable[..., Any]) -> Any:
        now.tokens, now.requests = batch.num_tokens, batch.num_requests
        return plain_forward(batch, cache, weights, add_time("read", read))

    def add_time(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                setattr(now, name, getattr(now, name) + time.perf_counter() - start)

        return timed

    plain_step, plain_forward = engine.step, engine.decoder.forward
    with ExitStack() as stack:
        stack.enter_context(_replaced(engine, "step", step))
        stack.enter_context(_replaced(engine.decoder, "forward", add_time("decoder", forward)))
        stack.enter_context(_replaced(Head, "logits", add_time("head", Head.logits)))
        stack.enter_context(_replaced(sampler, "draw", add_time("sample", sampler.draw)))
        yield steps


def summary(steps: Sequence[Step]) -> dict[str, Any]:
    """The median step in ms, and the mean step by parts (these add up); tokens and the most requests of a step."""
    if not steps:
        return {"steps": 0}
    return {
        "steps": len(steps),
        "tokens": sum(step.tokens for step in steps),
        "rows": max(step.requests for step in steps),
        "step_ms": statistics.median(step.whole for step in steps) * 1e3,
        "mean_ms": {
            "step": statistics.fmean(step.whole for step in steps) * 1e3,
            **{part: statistics.fmean(step.seconds(part) for step in steps) * 1e3 for part in PARTS},
        },
    }


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while."""
    own = name in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
