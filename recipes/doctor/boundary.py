"""Where a prompt ends and the response begins, token by token, for one row of the data.

A prompt that ends otherwise for the teacher than for the student shifts what it says of the first token, and of all that follow;
means over tokens hide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from recipes.doctor.case import Case
from recipes.doctor.finding import Finding
from recipes.doctor.tokens import decoded, is_special
from trainers.data.sources import load_rows
from trainers.data.templates import PromptEncoder, encode_messages, read_content
from trainers.types import Prompt

SHOWN = 6  # tokens at the end of a prompt


def template(case: Case) -> Iterator[Finding]:
    tokenizer, prompts = case.tokenizer, case.prompts.prompts
    prompt = next((p for p in prompts if p.privileged_ids is not None), prompts[0])
    encoder = PromptEncoder(tokenizer, case.data)
    yield _student(case, prompt, encoder)
    yield from _bos(prompts, tokenizer)
    if case.role("teacher") is not None:
        yield _teacher(prompt, encoder)
        yield from _own_template(case, prompt, encoder)


def _student(case: Case, prompt: Prompt, encoder: PromptEncoder) -> Finding:
    """The end of the prompt and the first token of the response, given or sampled."""
    tokenizer = encoder.tokenizer
    form = "through the chat template" if encoder.chat_text else "as plain text"
    found = f"row {prompt.index}, {form}: the student's prompt ends in {decoded(tokenizer, prompt.ids[-SHOWN:])}"
    if not prompt.response_ids:
        return Finding("template", f"{found}; its response is sampled, none is given")
    first = prompt.response_ids[0]
    found += f"; the given response begins with {decoded(tokenizer, [first])}"
    if first == prompt.ids[-1] and is_special(tokenizer, first):
        return Finding("template", found, "warn", "the same special token ends the prompt and begins the response: write it once")
    if not encoder.chat_text and prompt.response and (joint := _joint(tokenizer, prompt)) is not None:
        remedy = "as one text it would be cut otherwise there; move the white space from the prompt's end to the response's start"
        return Finding("template", f"{found}; prompt and response as one text: {decoded(tokenizer, joint)}", "warn", remedy)
    return Finding("template", found)


def _joint(tokenizer: Any, prompt: Prompt) -> list[int] | None:
    """The ids around the boundary where prompt and response, encoded as one text, are not the prompt's ids and more."""
    joint = list(tokenizer(prompt.text + (prompt.response or ""))["input_ids"])
    number = len(prompt.ids)
    if tuple(tokenizer(prompt.text)["input_ids"]) != prompt.ids or tuple(joint[:number]) == prompt.ids:
        return None
    return joint[max(0, number - SHOWN // 2) : number + 1]


def _teacher(prompt: Prompt, encoder: PromptEncoder) -> Finding:
    """The end of the privileged prompt beside the student's."""
    tokenizer = encoder.tokenizer
    if prompt.privileged_ids is None:
        return Finding("template", "the teacher reads the student's prompt (no row has a privileged one)")
    length = max(1, len(generation_prompt(encoder)))
    mine, theirs = prompt.ids[-length:], prompt.privileged_ids[-length:]
    found = f"row {prompt.index}: the teacher's privileged prompt ends in {decoded(tokenizer, prompt.privileged_ids[-SHOWN:])}"
    if mine == theirs:
        return Finding("template", f"{found}, its last {length} as the student's")
    special = encoder.chat_text or any(is_special(tokenizer, i) for i in {*mine} ^ {*theirs})
    return Finding(
        "template",
        f"{found}; expected: {decoded(tokenizer, mine)}, as the student's",
        "FAIL" if special else "warn",
        "let data.privileged_template (or the privileged messages) put their text first, so that both prompts end alike",
    )


def _own_template(case: Case, prompt: Prompt, encoder: PromptEncoder) -> Iterator[Finding]:
    """How the teacher's own template, which nobody uses, would end the prompt it is asked to continue."""
    role = case.role("teacher")
    assert role is not None
    own = case.model(role).tokenizer
    if own is None or not encoder.chat_text or own.chat_template in (None, encoder.tokenizer.chat_template):
        return
    row = load_rows(str(case.data.train), split=case.data.split, limit=prompt.index + 1)[prompt.index]
    content = read_content(row[case.data.prompt_column], column=case.data.prompt_column)
    theirs = PromptEncoder(own, case.data.model_copy(update={"chat_template_kwargs": {}})).prompt(content)
    mine = prompt.ids
    length = max(1, len(generation_prompt(encoder)))
    found = f"the teacher's own template would end the student's prompt in {decoded(own, theirs[-SHOWN:])}"
    if theirs[-length:] == mine[-length:]:
        yield Finding("template", f"{found}, as the policy's does")
        return
    remedy = (
        "the teacher never saw a response begin there: set data.chat_template_kwargs so that they agree, or use a teacher "
        "that was trained with this template"
    )
    yield Finding(
        "template", f"{found}; the policy's, which it reads: {decoded(encoder.tokenizer, mine[-SHOWN:])}", "warn", remedy
    )


def _bos(prompts: Sequence[Prompt], tokenizer: Any) -> Iterator[Finding]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return
    doubled = [p.index for p in prompts if p.ids[:2] == (bos, bos)]
    if doubled:
        remedy = "remove the bos from the chat template or from the prompts' texts"
        yield Finding("template", f"{len(doubled)} prompts begin with two bos tokens, first row {doubled[0]}", "warn", remedy)
    lacking = [p.index for p in prompts if p.ids[0] != bos]
    if lacking and tokenizer("x")["input_ids"][:1] == [bos]:
        remedy = "let the chat template write bos_token first, as the tokenizer does before a text"
        found = f"{len(lacking)} prompts do not begin with the bos token {decoded(tokenizer, [bos])}, first row {lacking[0]}"
        yield Finding("template", found, "warn", remedy)


def generation_prompt(encoder: PromptEncoder) -> tuple[int, ...]:
    """What the chat template adds after the last message, where the assistant is to speak; empty without one."""
    if not encoder.chat_text:
        return ()
    tokenizer, messages = encoder.tokenizer, [{"role": "user", "content": "1"}]
    with_it = encode_messages(tokenizer, messages, **encoder.config.chat_template_kwargs)
    without = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False, add_generation_prompt=False, **encoder.config.chat_template_kwargs
    )
    return with_it[len(without) :] if with_it[: len(without)] == tuple(without) else ()
