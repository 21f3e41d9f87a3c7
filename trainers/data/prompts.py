"""Rows -> Prompts: columns by config, ids made once, over-long ones dropped with a count."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainers.config import DataConfig
from trainers.data.sources import load_rows
from trainers.data.templates import Content, PromptEncoder, read_content
from trainers.types import Prompt

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSet:
    """The prompts of one data set that fit, and how many did not."""

    prompts: tuple[Prompt, ...]
    num_long_prompts: int  # dropped: the prompt, or its privileged form, is longer than data.max_prompt_tokens
    num_long_responses: int  # dropped: the given response is longer than data.max_response_tokens

    def __len__(self) -> int:
        return len(self.prompts)


def load_prompts(config: DataConfig, tokenizer: Any, *, held_out: bool = False, eos_token_id: int | None = None) -> PromptSet:
    """The prompts of `config.train` (or `config.eval` with `held_out`).

    `eos_token_id` ends given responses (None: the tokenizer's). Raises ValueError naming the file and the row for a missing
    column, a wrong type or an empty prompt, and where no prompt is short enough.
    """
    source = config.eval if held_out else config.train
    assert source is not None
    split, limit = (config.eval_split, config.max_eval) if held_out else (config.split, config.max_train)
    rows = load_rows(source, split=split, limit=limit)
    encoder = PromptEncoder(tokenizer, config, eos_token_id=eos_token_id)
    prompts, long_prompts, long_responses = [], 0, 0
    for index, row in enumerate(rows):
        try:
            prompt = _read_row(index, row, config, encoder)
        except Exception as error:
            if not isinstance(error, ValueError) and type(error) is not Exception:
                raise  # `tokenizers` raises a bare Exception for a character that a vocabulary lacks
            raise ValueError(f"data: {source} row {index} (the first is 0): {error}") from error
        if max(len(prompt.ids), len(prompt.privileged_ids or ())) > config.max_prompt_tokens:
            long_prompts += 1
        elif config.max_response_tokens is not None and len(prompt.response_ids or ()) > config.max_response_tokens:
            long_responses += 1
        else:
            prompts.append(prompt)
    if long_prompts or long_responses:
        logger.warning(
            "%s: dropped %d of %d rows whose prompt is longer than data.max_prompt_tokens=%d, and %d whose response is longer "
            "than data.max_response_tokens=%s",
            source, long_prompts, len(rows), config.max_prompt_tokens, long_responses, config.max_response_tokens,
        )  # fmt: skip
    if not prompts:
        raise ValueError(
            f"data: {source}: all {len(rows)} rows are too long ({long_prompts} prompts over data.max_prompt_tokens="
            f"{config.max_prompt_tokens}, {long_responses} responses over data.max_response_tokens={config.max_response_tokens})"
        )
    return PromptSet(tuple(prompts), long_prompts, long_responses)


def _read_row(index: int, row: Mapping[str, Any], config: DataConfig, encoder: PromptEncoder) -> Prompt:
    if row.get(config.prompt_column) is None:
        near = difflib.get_close_matches(config.prompt_column, row.keys(), 1, cutoff=0.0)
        hint = f"; did you mean data.prompt_column={near[0]}?" if near else ""
        raise ValueError(f"no column {config.prompt_column!r}; given: {', '.join(row) or 'none'}{hint}")
    content = read_content(row[config.prompt_column], column=config.prompt_column)
    if not content:
        raise ValueError(f"column {config.prompt_column} is empty")
    privileged = row.get(config.privileged_column)
    if privileged is not None:
        privileged = read_content(privileged, column=config.privileged_column)
    answer = _answer(row.get(config.answer_column), config.answer_column)
    response = row.get(config.response_column)
    if response is not None and not isinstance(response, str):
        raise ValueError(f"column {config.response_column} holds {type(response).__name__}; allowed: text")
    ids = encoder.prompt(content)
    if not ids:
        raise ValueError(f"column {config.prompt_column} has no tokens: {content!r:.80}")
    return Prompt(
        index=index,
        ids=ids,
        text=_shown(content),
        answer=answer,
        privileged_ids=encoder.privileged(content, privileged, answer) if _has_context(privileged, config) else None,
        response_ids=None if response is None else encoder.response(response),
    )


def _has_context(privileged: Content | None, config: DataConfig) -> bool:
    """A row has a privileged prompt if it fills the column, or if a template was written for it (which may use the answer)."""
    return privileged is not None or config.privileged_template is not None


def _answer(value: object, column: str) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"column {column} holds {type(value).__name__}; allowed: text or a number")
    return str(value)


def _shown(content: Content) -> str:
    return content if isinstance(content, str) else content[-1]["content"]
