"""An environment's text to ids, made exactly once, between the markers that end the policy's turn and open its next one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jinja2 import TemplateError

from trainers.environments.config import EnvironmentConfig

_ASKED, _SAID, _TOLD = "what was asked", "what was said", "what was told"  # no template writes these


class MessageEncoder:
    """The markers are encoded once, special tokens and all. A message is encoded on its own and as plain text: where a tool's
    output spells a special token, it stays characters and ends no turn.

    Raises ValueError for a role that the tokenizer's chat template cannot place, and for markers that it cannot encode.
    """

    def __init__(
        self, tokenizer: Any, config: EnvironmentConfig, eos_token_ids: Collection[int], variables: Mapping[str, Any]
    ) -> None:
        """`variables` are the chat template's own, as for prompts."""
        self._tokenizer, self._eos = tokenizer, frozenset(eos_token_ids)
        prefix, suffix = config.prefix, config.suffix
        if config.role is not None:
            prefix, suffix = turn_markers(tokenizer, config.role, variables)
        self._prefix, self._suffix = self._ids(prefix), self._ids(suffix)

    def encode(self, text: str, *, after: int) -> tuple[int, ...]:
        """Ids of a message that follows the id `after`, the last of the policy's turn: where that ended the sequence, markers
        that begin with such an id do not end it twice. Raises ValueError for text that the tokenizer cannot encode."""
        prefix = self._prefix
        if after in self._eos and prefix[:1] and prefix[0] in self._eos:
            prefix = prefix[1:]
        return (*prefix, *self._ids(text, split_special_tokens=True), *self._suffix)

    def _ids(self, text: str, **how: Any) -> tuple[int, ...]:
        try:
            return tuple(self._tokenizer(text, add_special_tokens=False, **how)["input_ids"]) if text else ()
        except Exception as error:
            # `tokenizers` raises a bare Exception for a character that a vocabulary lacks; any other kind is a fault of ours.
            if type(error) is not Exception:
                raise
            raise ValueError(f"the tokenizer cannot encode the environment's {text!r:.80}: {error}") from error


def turn_markers(tokenizer: Any, role: str, variables: Mapping[str, Any]) -> tuple[str, str]:
    """What the chat template writes between the assistant's content and that of a message of `role`, and after that up to where
    the assistant speaks. Raises ValueError where there is no template, or none that writes both contents, once and in order."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(f"environment: role={role!r}, but the tokenizer has no chat template; use prefix and suffix")
    messages = [("user", _ASKED), ("assistant", _SAID), (role, _TOLD)]
    try:
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in messages],
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
    except (TemplateError, TypeError) as error:  # TypeError: what a template's own expressions raise
        reason = " ".join(str(error).split())
        raise ValueError(
            f"environment: the chat template refuses role={role!r}: {reason}; use another role, or prefix"
        ) from error
    _, _, rest = text.partition(_SAID)
    prefix, _, suffix = rest.partition(_TOLD)
    if text != text.partition(_SAID)[0] + _SAID + prefix + _TOLD + suffix or _SAID in rest or _TOLD in suffix:
        raise ValueError(f"environment: the chat template does not write role={role!r} as it stands; use another role, or prefix")
    return prefix, suffix
