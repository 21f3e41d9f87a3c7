"""Rows -> Prompts: columns by config, ids made once, over-long ones dropped with a count."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from trainers.config import DataConfig
from trainers.data.sources import load_rows
from trainers.data.templates import Content, PromptEncoder, read_content
from trainers.types import Prompt


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one data set that fit, and how many did not."""

    prompts: tuple[Prompt, ...]
    num_rows: int
    num_long_prompts: int  # dropped: the prompt, or its privileged form, is longer than data.max_prompt_tokens
    num_long_responses: int  # dropped: the given response is longer than data.max_response_tokens

    def __len__(self) -> int:
        return len(self.prompts)

    def __str__(self) -> str:
        return (
            f"{len(self)} of {self.num_rows} rows; dropped: {self.num_long_prompts} prompts over data.max_prompt_tokens, "
            f"{self.num_long_responses} responses over data.max_response_tokens"
        )


def load_prompts(config: DataConfig, tokenizer: Any, *, held_out: bool = False, eos_token_ids: Collection[int] = ()) -> PromptSet:
    """The prompts of `config.train`, or with `held_out` those of `config.eval`, of which only prompt and answer are read.

    `eos_token_ids` end given responses, beside the tokenizer's own. Raises ValueError naming the file and the row for a missing
    column, a wrong type or an empty prompt, and where no prompt is short enough.
    """
    source = config.eval if held_out else config.train
    assert source is not None
    split, limit = (config.eval_split, config.max_eval) if held_out else (config.split, config.max_train)
    rows = load_rows(source, split=split, limit=limit)
    encoder = PromptEncoder(tokenizer, config, eos_token_ids=eos_token_ids)
    prompts, long_prompts, long_responses = [], 0, 0
    for index, row in enumerate(rows):
        try:
            prompt = _read_row(index, row, config, encoder, held_out=held_out)
        except Exception as error:
            # `tokenizers` raises a bare Exception for a character that a vocabulary lacks; any other kind is a fault of ours.
            if not isinstance(error, ValueError) and type(error) is not Exception:
                raise
            reason = error if isinstance(error, ValueError) else f"the tokenizer cannot encode this row: {error}"
            raise ValueError(f"data: {source} row {index} (the first is 0): {reason}") from error
        if max(len(prompt.ids), len(prompt.privileged_ids or ())) > config.max_prompt_tokens:
            long_prompts += 1
        elif config.max_response_tokens is not None and _longest_response(prompt) > config.max_response_tokens:
            long_responses += 1
        else:
            prompts.append(prompt)
    found = PromptSet(tuple(prompts), len(rows), long_prompts, long_responses)
    if not prompts:
        raise ValueError(f"data: {source}: nothing is left: {found}; raise the limits")
    return found


def _read_row(index: int, row: Mapping[str, Any], config: DataConfig, encoder: PromptEncoder, *, held_out: bool) -> Prompt:
    if row.get(config.prompt_column) is None:
        near = difflib.get_close_matches(config.prompt_column, row.keys(), 1, cutoff=0.0)
        hint = f"; did you mean data.prompt_column={near[0]}?" if near else ""
        raise ValueError(f"no column {config.prompt_column!r}; given: {', '.join(row) or 'none'}{hint}")
    content = read_content(row[config.prompt_column], column=config.prompt_column)
    if not content:
        raise ValueError(f"column {config.prompt_column} is empty")
    answer = _answer(row.get(config.answer_column), config.answer_column)
    ids = encoder.prompt(content)
    if not ids:
        raise ValueError(f"column {config.prompt_column} has no tokens: {content!r:.80}")
    prompt = Prompt(index=index, ids=ids, text=_shown(content), answer=answer)
    if held_out and config.rejected_column is None:
        return prompt
    privileged = row.get(config.privileged_column)
    if privileged is not None:
        privileged = read_content(privileged, column=config.privileged_column) or None
    response = _text(row, config.response_column)
    rejected = None if config.rejected_column is None else _text(row, config.rejected_column)
    return replace(
        prompt,
        rejected_ids=None if rejected is None else encoder.response(rejected),
        margin=None if rejected is None else _number(row.get(config.margin_column), config.margin_column),
        privileged_ids=encoder.privileged(content, privileged, answer) if _has_context(privileged, config) else None,
        response=response,
        response_ids=None if response is None else encoder.response(response),
    )


def _longest_response(prompt: Prompt) -> int:
    return max(len(prompt.response_ids or ()), len(prompt.rejected_ids or ()))


def _text(row: Mapping[str, Any], column: str) -> str | None:
    value = row.get(column)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"column {column} holds {type(value).__name__}; allowed: text")
    return value


def _number(value: object, column: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"column {column} holds {value!r}; allowed: a finite number")
    return float(value)


def _has_context(privileged: Content | None, config: DataConfig) -> bool:
    """A row has a privileged prompt if it fills the column, or if a template was written for it (which may use the answer)."""
    return privileged is not None or config.privileged_template is not None


def _answer(value: object, column: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"column {column} holds {type(value).__name__}; allowed: text or a number")
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"column {column} holds {value}; allowed: text or a finite number")
    return format(Decimal(str(value)), "f")  # 0.00001 and not 1e-05


def _shown(content: Content) -> str:
    return content if isinstance(content, str) else content[-1]["content"]
