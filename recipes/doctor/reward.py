"""What rewards make of a right answer: each is called on one row, with that row's own answer as the completion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from recipes.doctor.case import Case
from recipes.doctor.finding import Finding
from trainers.config import PolicyConfig, RewardRecipe
from trainers.rewards import RewardConfig, from_name
from trainers.rewards.components import open_component
from trainers.types import Prompt, Rollout


def rewards(case: Case) -> Iterator[Finding]:
    config = case.config
    components = [c for c in getattr(config, "rewards", ()) if isinstance(c, RewardConfig)]
    for component in components:
        yield from _examined("rewards", component, case, case.prompts.prompts)
    if config.data.eval is not None and not isinstance(config, RewardRecipe) and not config.eval.by_training_rewards:
        assert case.held_out is not None
        yield from _examined("eval.reward", from_name(config.eval.reward), case, case.held_out.prompts)
    if isinstance(config, PolicyConfig) and all(component.weight == 0 for component in config.rewards):
        yield Finding("reward", "every weight in rewards is 0", "FAIL", "nothing is rewarded: set a weight")


def _examined(key: str, config: RewardConfig, case: Case, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    name = f"{key}: {config.label}"
    if config.kind == "length":
        yield _length(name, config, case)
        return
    try:
        component = open_component(config if config.kind != "http" else config.model_copy(update={"retries": 0}))
    except ValueError as error:
        yield Finding("reward", f"{name}: {error}", "FAIL")
        return
    try:
        component.check(prompts)
        prompt = next((p for p in prompts if p.answer), prompts[0])
        texts = [text for text in (prompt.answer, prompt.response) if text]
        values = component.values([_rollout(prompt, text) for text in (*texts, "")])
    except ValueError as error:
        yield Finding("reward", f"{name}: {error}", "FAIL")
        return
    finally:
        component.close()
    yield _judged(name, config, prompt, texts, values)


def _judged(name: str, config: RewardConfig, prompt: Prompt, texts: Sequence[str], values: Sequence[Any]) -> Finding:
    """`values` are those of `texts`, which should be right, and of an empty completion, which is not."""
    said = ", ".join(f"{text[:40]!r}: {_shown(value)}" for text, value in zip((*texts, ""), values, strict=True))
    found = f"{name}: row {prompt.index}, answer {prompt.answer!r}: {said}"
    if any(not isinstance(value, int | float) or not math.isfinite(value) for value in values):
        default = f"such a response is worth default={config.default:g}"
        return Finding("reward", found, "FAIL", f"let it return a finite number for any completion; {default}")
    if not texts:
        return Finding("reward", f"{found}; no row has an answer or a response to try")
    *right, empty = (math.copysign(1.0, config.weight) * float(value) for value in values)
    if max(right) <= empty:
        remedy = "a right answer is worth no more than none: check pattern or function, the answer column, the sign of weight"
        return Finding("reward", found, "warn", remedy)
    return Finding("reward", found)


def _length(name: str, config: RewardConfig, case: Case) -> Finding:
    assert config.max_tokens is not None, "RewardConfig has checked it"
    assert config.buffer is not None, "as above"
    rollout = getattr(case.config, "rollout", None)
    longest = rollout.sampling.max_new_tokens if rollout is not None else case.config.eval.max_new_tokens
    found = f"{name}: from {config.max_tokens - config.buffer} tokens on, of at most {longest}"
    if longest <= config.max_tokens - config.buffer:
        return Finding("reward", found, "warn", "no response is long enough for it: lower rewards.max_tokens")
    return Finding("reward", found)


def _rollout(prompt: Prompt, text: str) -> Rollout:
    """A response as rewards read it: its text. Its tokens are not made, which only `length` counts."""
    return Rollout(
        prompt=prompt,
        sample_index=0,
        ids=prompt.ids,
        spans=(),
        logprobs=(),
        logprobs_raw=(),
        finish_reason="stop",
        weight_version=0,
        text=text,
    )


def _shown(value: Any) -> str:
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {' '.join(str(value).split())[:120]}"
    return f"{value:g}" if isinstance(value, int | float) else repr(value)[:80]
