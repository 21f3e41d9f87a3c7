"""Text or messages -> token ids, made exactly once. Nothing downstream decodes and encodes again."""

from __future__ import annotations

import difflib
import inspect
import re
import string
from collections.abc import Collection, Sequence
from typing import Any

from jinja2 import TemplateError

from trainers.config import DataConfig

Message = dict[str, Any]
Content = str | list[Message]
PRIVILEGED_TEMPLATE = "{privileged}\n\n{prompt}"
TEMPLATE_FIELDS = ("prompt", "privileged", "answer")


def encode_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Ids of a text prompt with the tokenizer's default special tokens, but without an end-of-sequence token that it puts at the
    end (a prompt is there to be continued), and with one bos where the text, say of a template, begins with it itself."""
    ids = list(tokenizer(text)["input_ids"])
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if ids and ids[-1] == tokenizer.eos_token_id and bare[-1:] != ids[-1:]:
        ids.pop()
    if ids[:2] == [tokenizer.bos_token_id] * 2 and bare[:2] != ids[:2]:
        ids.pop(0)
    return tuple(ids)


def encode_messages(tokenizer: Any, messages: Sequence[Message], **variables: Any) -> tuple[int, ...]:
    """Ids of a conversation through the chat template, up to where the assistant speaks. The template writes every special
    token itself, so none is added (no doubled bos). A conversation that ends with an assistant message is continued.

    `variables` are the template's own (enable_thinking). Raises ValueError for a conversation that the template refuses.
    """
    continued = messages[-1]["role"] == "assistant"
    try:
        ids = tokenizer.apply_chat_template(
            list(messages),
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **variables,
        )
    except (TemplateError, TypeError) as error:  # TypeError: what a template's own expressions raise
        raise ValueError(f"the chat template refuses these messages: {' '.join(str(error).split())}") from error
    return tuple(ids)


class PromptEncoder:
    """What `data.chat`, `chat_template_kwargs`, `system` and `privileged_template` say, applied with one tokenizer.

    Raises ValueError for settings that contradict each other or the tokenizer, and for content of a wrong form.
    """

    def __init__(self, tokenizer: Any, config: DataConfig, *, eos_token_ids: Collection[int] = ()) -> None:
        """`eos_token_ids`: ids that end a response, beside the tokenizer's own."""
        self.tokenizer, self.config = tokenizer, config
        own = tokenizer.eos_token_id
        self.eos_token_id = min(eos_token_ids, default=None) if own is None else own  # what ends a given response
        self.eos_token_ids = {*eos_token_ids} if own is None else {own, *eos_token_ids}
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.chat == "always" and not self.has_template:
            raise ValueError("data.chat=always, but the tokenizer has no chat template; use data.chat=never")
        self.chat_text = config.chat == "always" or (config.chat == "auto" and self.has_template)
        if config.system is not None and not self.chat_text:
            raise ValueError("data.system needs prompts that go through a chat template; data.chat or the tokenizer rules it out")
        _check_variables(tokenizer if self.has_template and config.chat != "never" else None, config.chat_template_kwargs)
        self.template = PRIVILEGED_TEMPLATE if config.privileged_template is None else config.privileged_template
        self.template_needs = _template_fields(self.template)

    def prompt(self, prompt: Content) -> tuple[int, ...]:
        """Ids of the prompt as the student sees it."""
        if isinstance(prompt, str) and not self.chat_text:
            return encode_text(self.tokenizer, prompt)
        return self._encode(self._conversation(prompt))

    def privileged(self, prompt: Content, privileged: Content | None, answer: str | None) -> tuple[int, ...] | None:
        """Ids of the prompt as the teacher sees it; None where the row has nothing that the template asks for."""
        if isinstance(privileged, list):
            if self.config.privileged_template is not None:
                raise ValueError(
                    "privileged messages with data.privileged_template; allowed: one of them (the template is for text)"
                )
            conversation = self._conversation(prompt)
            system = 1 if conversation[0]["role"] == "system" else 0
            return self._encode([*conversation[:system], *privileged, *conversation[system:]])
        given = {"privileged": privileged, "answer": answer}
        if "privileged" in self.template_needs and privileged is None:
            return None
        if "answer" in self.template_needs and answer is None:
            raise ValueError("data.privileged_template uses {answer}, which this row does not have")
        if isinstance(prompt, str):
            return self.prompt(self.template.format(prompt=prompt, **given))
        last = max((i for i, m in enumerate(prompt) if m["role"] == "user"), default=None)
        if last is None:
            raise ValueError("a privileged text goes into the last user message, and the prompt has none")
        changed = {**prompt[last], "content": self.template.format(prompt=prompt[last]["content"], **given)}
        return self.prompt([*prompt[:last], changed, *prompt[last + 1 :]])

    def response(self, text: str) -> tuple[int, ...]:
        """Ids of a given response, as if it had been sampled: up to its first end-of-sequence token, which is added if there is
        none."""
        if self.eos_token_id is None:
            raise ValueError("given responses need an end-of-sequence token, and neither tokenizer nor checkpoint names one")
        ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        end = next((i for i, token in enumerate(ids) if token in self.eos_token_ids), None)
        return (*ids, self.eos_token_id) if end is None else ids[: end + 1]

    def _encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return encode_messages(self.tokenizer, messages, **self.config.chat_template_kwargs)

    def _conversation(self, prompt: Content) -> list[Message]:
        if not self.has_template or self.config.chat == "never":
            why = "data.chat=never" if self.config.chat == "never" else "the tokenizer has no chat template"
            raise ValueError(f"messages need a chat template, but {why}; give text")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.config.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system}, *messages]
        return messages


def read_content(value: object, *, column: str) -> Content:
    """A cell as text or as a list of messages (keys that hold None are dropped: columnar files fill absent keys with it)."""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise ValueError(f"column {column} holds {type(value).__name__}; allowed: text, or a list of messages")
    messages: list[Message] = []
    for message in value:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), str)
        ):
            raise ValueError(f"column {column} holds {message!r:.80}; allowed in a list: messages {{role: text, content: text}}")
        messages.append({k: v for k, v in message.items() if v is not None})
    return messages


def _template_fields(template: str) -> set[str]:
    """The fields of a str.format template. Attribute and index access are refused, since they would reach into objects, and so
    are conversions and format specs, which would change or pad the text."""
    try:
        fields = [
            (name, spec or conversion) for _, name, spec, conversion in string.Formatter().parse(template) if name is not None
        ]
    except ValueError as error:
        raise ValueError(f"data.privileged_template={template!r}: {error}; a literal brace is written twice") from error
    names = {name for name, _ in fields}
    if unknown := sorted(names - set(TEMPLATE_FIELDS)):
        raise ValueError(f"data.privileged_template uses {unknown}; allowed: {', '.join(TEMPLATE_FIELDS)}")
    if formatted := sorted(name for name, extra in fields if extra):
        raise ValueError(f"data.privileged_template formats {formatted}; allowed: the bare name in braces")
    if names <= {"prompt"}:
        raise ValueError(f"data.privileged_template={template!r} adds nothing; use {{privileged}} or {{answer}}")
    return names


def _check_variables(tokenizer: Any | None, variables: Collection[str]) -> None:
    """A name that the template does not use would be ignored, and one of apply_chat_template's own would change what it does."""
    if not variables:
        return
    if tokenizer is None:
        raise ValueError("data.chat_template_kwargs needs a chat template; data.chat or the tokenizer rules it out")
    used = set(re.findall(r"[A-Za-z_]\w*", tokenizer.get_chat_template()))
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    for name in variables:
        if name in own or name not in used:
            near = difflib.get_close_matches(name, used - own.keys(), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"data.chat_template_kwargs: {name} is no variable of the tokenizer's chat template{hint}")
