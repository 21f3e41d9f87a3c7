"""The memory plan as rows of the table: a phase each, its largest parts first, beside what the machine has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from recipes.doctor.case import Case
from recipes.doctor.finding import Finding, Level
from recipes.doctor.machine import amount, room
from recipes.doctor.plan import Plan

FULL = 0.8  # of the free memory: from there on a warning, since allocators and libraries take their part

# What to do about a part that is among the largest, by the end of its name.
REMEDIES: Mapping[str, str] = {
    "activations": "lower train.micro_batch_tokens, or set engine.activation_checkpointing=true",
    "logits": "lower engine.loss_chunk_tokens",
    "KV pool": "set engine.rollout.engine.cache_bytes or a lower max_running",
    "copy": "set engine.rollout.gather=stream, or engine.rollout.on_leave=free, or offload what is only read",
    "shards": "use more ranks (--nproc)",
    "optimizer": "use more ranks (--nproc), engine.master_dtype=bfloat16, or engine.freeze",
    "gradients": "use more ranks (--nproc), or engine.freeze",
}


def memory_plan(case: Case) -> Iterator[Finding]:
    plan = Plan(case)
    free, machine = room(case)
    for phase in plan.phases():
        largest = sorted(((size, name) for name, size in phase.parts.items() if size), reverse=True)
        found = f"{phase.name}: {amount(phase.total)} a rank: {', '.join(f'{name} {amount(size)}' for size, name in largest)}"
        found += f"; {machine}"
        if free is None or phase.total <= FULL * free:
            yield Finding("memory", found)
            continue
        hints = [hint for size, name in largest[:3] if (hint := REMEDIES.get(_kind(name))) is not None]
        level: Level = "FAIL" if phase.total > free else "warn"
        yield Finding("memory", found, level, "; ".join(dict.fromkeys(hints)))


def _kind(name: str) -> str:
    return next((kind for kind in REMEDIES if name.endswith(kind)), "")
