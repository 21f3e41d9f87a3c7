"""What a run's own numbers say is going wrong, in words, while it runs. An alarm never stops a run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

PATIENCE = 5  # steps in a row before an alarm that one odd step could set off
SILENCE = 50  # steps before one is said again

Record = Mapping[str, Any]


@dataclass
class Alarms:
    """`look` at each step's record; what it returns is to be logged. Keeps the last few records and what it has said."""

    _recent: deque[Record] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    _first: dict[str, float] = field(default_factory=dict)  # each metric's first value in this process
    _said: dict[str, int] = field(default_factory=dict)

    def look(self, step: int, record: Record) -> list[str]:
        """Lines, each naming what was seen, what would be usual, and what to look at; none twice within SILENCE steps."""
        self._recent.append(record)
        for name, value in record.items():
            if isinstance(value, int | float):
                self._first.setdefault(name, float(value))
        lines = []
        for name, alarm in ALARMS.items():
            text = alarm(self)
            if text is not None and step - self._said.get(name, -SILENCE) >= SILENCE:
                self._said[name] = step
                lines.append(f"step {step}: alarm ({name}): {text}")
        return lines

    def all_recent(self, metric: str) -> list[float] | None:
        """Its last PATIENCE values; None before there are as many."""
        values = [r[metric] for r in self._recent if isinstance(r.get(metric), int | float)]
        return values if len(values) == PATIENCE else None

    def first(self, metric: str) -> float | None:
        return self._first.get(metric)


def _no_update(alarms: Alarms) -> str | None:
    updates = alarms.all_recent("updates")
    if updates is not None and max(updates) == 0:
        return (
            f"the last {PATIENCE} steps changed nothing: no response was in the loss; they were all cut (shaping.mask_truncated: "
            "raise max_new_tokens), or no group differed (dynamic_sampling)"
        )
    return None


def _no_signal(alarms: Alarms) -> str | None:
    stds, silent = alarms.all_recent("reward_std"), alarms.all_recent("no_signal")
    if stds is not None and max(stds) == 0:
        return (
            f"every response of the last {PATIENCE} steps had the same reward; nothing can be learnt from that: look at "
            "completions, at the reward's name and at whether answers are in the form it reads"
        )
    if silent is not None and min(silent) > 0.95:
        return (
            f"in the last {PATIENCE} steps {min(silent):.0%} or more of the responses had an advantage of 0 (all samples of a "
            "prompt alike): prompts are too easy or too hard; use more samples_per_prompt, dynamic_sampling, other data"
        )
    return None


def _collapse(alarms: Alarms) -> str | None:
    first, recent, rewards = alarms.first("entropy"), alarms.all_recent("entropy"), alarms.all_recent("reward_mean")
    # A policy that has learnt a task with one right answer has no entropy either.
    better = rewards is not None and min(rewards) > (alarms.first("reward_mean") or 0.0)
    if first is not None and recent is not None and first > 0.1 and max(recent) < 0.02 * first and not better:
        return (
            f"the entropy is {max(recent):.2g} nats, and was {first:.2g}, and the reward is no better: the policy says one thing "
            "only; lower the learning rate, raise the KL or the entropy weight"
        )
    student, teacher = alarms.all_recent("student_entropy"), alarms.all_recent("teacher_entropy")
    if student is not None and teacher is not None and min(teacher) > 0.1 and max(student) < 0.1 * min(teacher):
        return (
            f"the student's entropy is {max(student):.2g} nats where the teacher's is {min(teacher):.2g}: it keeps one of the "
            "teacher's answers only; use divergence=forward_kl or jsd, or a lower learning rate"
        )
    repeated, start = alarms.all_recent("repetition"), alarms.first("repetition")
    if repeated is not None and start is not None and min(repeated) > max(0.5, 2 * start):
        return f"{min(repeated):.0%} of the 4-grams in responses are repeats (at the start {start:.0%}); read completions.jsonl"
    return None


def _endless(alarms: Alarms) -> str | None:
    cut, start = alarms.all_recent("truncated"), alarms.first("truncated")
    if cut is not None and start is not None and min(cut) > 0.9 and start < 0.5:
        return (
            f"{min(cut):.0%} of the responses are cut by the length limit (at the start {start:.0%}): the policy has forgotten "
            "to end; look at eos ids, at shaping.missing_eos_penalty, at rewards that grow with length"
        )
    return None


def _wrong_teacher(alarms: Alarms) -> str | None:
    agreement, teacher = alarms.all_recent("top1_agreement"), alarms.all_recent("teacher_logprob")
    if agreement is not None and teacher is not None and max(agreement) < 0.2 and max(teacher) < -5:
        return (
            f"the teacher gives the student's tokens a log-prob of {max(teacher):.1f} on average and agrees on the likeliest "
            f"token in {max(agreement):.0%} of the places: another tokenizer, template or a broken checkpoint; run hybrid doctor"
        )
    first, whole = alarms.all_recent("first_token_loss"), alarms.all_recent("loss")
    if first is not None and whole is not None and min(first) > 20 * max(max(whole), 0.05):
        return (
            f"the loss at a response's first token is {min(first):.2g}, at all of them {max(whole):.2g}: the teacher's prompt "
            "ends otherwise than the student's; run hybrid doctor and compare the template boundary"
        )
    return None


def _runaway(alarms: Alarms) -> str | None:
    kl = alarms.all_recent("kl_reference")
    if kl is not None and min(kl) > 5:
        return (
            f"the KL to the reference is {min(kl):.2g} nats a token; raise reward_kl.beta or loss.kl, or lower the learning rate"
        )
    return None


def _mismatch(alarms: Alarms) -> str | None:
    distance = alarms.all_recent("mismatch_abs")
    if distance is not None and min(distance) > 0.15:
        return (
            f"the trainer's log-probs differ from the rollout engine's by {min(distance):.2g} on average: set "
            "mismatch.correct=truncate, or look at dtypes and temperature"
        )
    return None


def _failing_reward(alarms: Alarms) -> str | None:
    for name in [n for n in alarms._recent[-1] if n.endswith("_failures")]:
        counts = alarms.all_recent(name)
        if counts is not None and min(counts) > 0:
            return f"{name}: {min(counts):.0f} or more in each of the last {PATIENCE} steps; those responses got its default"
    return None


ALARMS: dict[str, Callable[[Alarms], str | None]] = {
    "no signal": _no_signal,
    "collapse": _collapse,
    "no update": _no_update,
    "endless": _endless,
    "wrong teacher": _wrong_teacher,
    "runaway": _runaway,
    "mismatch": _mismatch,
    "failing reward": _failing_reward,
}
