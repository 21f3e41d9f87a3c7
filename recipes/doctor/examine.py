"""The checks in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from recipes.doctor import boundary, footprint, lengths, models, reward, sampling, steps, vocabulary
from recipes.doctor.case import Case
from recipes.doctor.finding import Finding, NotExamined
from trainers.config import RunConfig

Check = Callable[[Case], Iterator[Finding]]

# A row's name, where the check itself cannot give one, and the check.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("files", models.files),
    ("models", models.models),
    ("data", lengths.data),
    ("tokenizer", vocabulary.tokenizers),
    ("vocabulary", vocabulary.vocabulary_rows),
    ("special ids", vocabulary.special_ids),
    ("responses", vocabulary.given_responses),
    ("template", boundary.template),
    ("lengths", lengths.lengths),
    ("weights", models.same_weights),
    ("dropout", models.dropout),
    ("generation_config", sampling.generation_config),
    ("sampling", sampling.sampling),
    ("evaluation", sampling.evaluation),
    ("reward", reward.rewards),
    ("batch", steps.shares),
    ("learning rate", steps.learning_rates),
    ("settings", steps.inert),
    ("memory", footprint.memory_plan),
)


def examine(config: RunConfig, *, nproc: int = 1, max_rows: int | None = None) -> list[Finding]:
    """All rows for this recipe on `nproc` ranks, of which `max_rows` rows of each data set are read. Reads no weights."""
    with Case.opened(config, nproc=nproc, max_rows=max_rows) as case:
        return [finding for name, check in CHECKS for finding in _rows(name, check, case)]


def _rows(name: str, check: Check, case: Case) -> Iterator[Finding]:
    """What the check finds; its own error is a row, and does not keep others from being seen."""
    try:
        yield from check(case)
    except NotExamined as reason:
        yield Finding(name, f"not examined: {reason}", "warn")
    except (ValueError, OSError) as error:
        yield Finding(name, " ".join(str(error).split()), "FAIL")
    except Exception as error:  # of a tokenizer, template or library with this input: whatever it is, the other rows must be seen
        yield Finding(name, f"the check itself failed: {type(error).__name__}: {' '.join(str(error).split())}", "FAIL")
