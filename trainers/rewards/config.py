"""One component of the reward, as the YAML names it. No torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from hybrid.config import Strict
from trainers.rewards.builtin import REWARDS

Kind = Literal["text", "math_verify", "length", "regex", "format", "function", "http"]  # text: a key of REWARDS
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "math_verify": ("timeout_s", "batch_timeout_s"),
    "length": ("max_tokens", "buffer"),
    "function": ("timeout_s", "batch_timeout_s", "workers"),
    "http": ("timeout_s", "batch_timeout_s", "retries", "batch_size"),
}
BATCH_TIMEOUT_S = 300.0  # where none is named
ALLOWED = f"{', '.join(REWARDS)}, math_verify, length, regex:PATTERN, format:PATTERN, module:function, http(s)://HOST/PATH"
_FUNCTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class RewardConfig(Strict):
    """A component. The score of a response is the sum of weight * value over all components."""

    name: str = Field(
        description="exact_match: the completion is the answer; numeric_match: its last number is; math_verify: they are equal "
        "as mathematics (needs the package math-verify); length: see max_tokens; regex:PATTERN: found in the completion; "
        "format:PATTERN: matches all of it; module:function: of (completion, prompt), in a thread of its own; a URL: see "
        "trainers/rewards/remote.py"
    )
    weight: float = 1.0
    default: float = Field(0.0, description="the value of a response for which the component failed or took too long")
    timeout_s: float | None = Field(None, gt=0, description="module:function, math_verify, URLs: seconds per call; None: 10")
    batch_timeout_s: float | None = Field(
        None,
        gt=0,
        description="the same: seconds for all responses of a rank in a step, beyond which they count as `default`; None: 300. "
        "Below engine.timeout_s, for which the other ranks wait",
    )
    workers: int | None = Field(
        None, ge=1, description="module:function: calls at the same time, each in a thread, for which it must be made; None: 1"
    )
    retries: int | None = Field(None, ge=0, description="URLs: further attempts after a lost connection or a 5xx; None: 2")
    batch_size: int | None = Field(None, ge=1, description="URLs: responses per request; None: 64")
    max_tokens: int | None = Field(None, ge=1, description="length: a response of so many tokens or more is worth -1")
    buffer: int | None = Field(None, ge=1, description="length: tokens before max_tokens over which it falls from 0 to -1")

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        kind = self.kind
        for option in ("timeout_s", "batch_timeout_s", "workers", "retries", "batch_size", "max_tokens", "buffer"):
            if getattr(self, option) is not None and option not in OPTIONS.get(kind, ()):
                users = ", ".join(other for other, options in OPTIONS.items() if option in options)
                raise ValueError(f"reward {self.name}: {option} does not belong to it, only to: {users}; leave it out")
        most = self.seconds_at_most
        if self.timeout_s is not None and self.timeout_s > most:
            raise ValueError(f"reward {self.name}: timeout_s={self.timeout_s:g}; allowed: up to batch_timeout_s={most:g}")
        if kind == "length":
            if self.max_tokens is None or self.buffer is None:
                raise ValueError(
                    "reward length needs max_tokens (a response that long is worth -1) and buffer (the tokens before, over which "
                    "the value falls from 0)"
                )
            if self.buffer > self.max_tokens:
                raise ValueError(f"reward length: buffer={self.buffer}; allowed: 1 to max_tokens={self.max_tokens}")
        return self

    @property
    def seconds_at_most(self) -> float:
        """For all responses of a rank in a step; 0 where it is a function of the text that takes no time."""
        if "batch_timeout_s" not in OPTIONS.get(self.kind, ()):
            return 0.0
        return BATCH_TIMEOUT_S if self.batch_timeout_s is None else self.batch_timeout_s

    @property
    def kind(self) -> Kind:
        return kind_of(self.name)

    @property
    def label(self) -> str:
        """What metrics call it: the name, a URL without its query."""
        return self.name.partition("?")[0] if self.kind == "http" else self.name


def kind_of(name: str) -> Kind:
    """Raises ValueError for an unknown name (with the nearest), a pattern that does not compile, a malformed URL."""
    head, colon, rest = name.partition(":")
    if head in ("http", "https") and colon:
        _check_url(name)
        return "http"
    if head in ("regex", "format") and colon:
        try:
            re.compile(rest)
        except re.error as error:
            raise ValueError(f"reward {name}: not a regular expression: {error}") from None
        return "regex" if head == "regex" else "format"
    if name in REWARDS:
        return "text"
    if name in ("math_verify", "length"):
        return "length" if name == "length" else "math_verify"
    if _FUNCTION.fullmatch(name):
        return "function"
    near = difflib.get_close_matches(head, [*REWARDS, "math_verify", "length", "regex", "format", "http"], 1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ValueError(f"reward {name!r} is unknown; {hint}allowed: {ALLOWED}")


def from_name(name: str) -> RewardConfig:
    """The component that a name alone stands for. Raises ValueError, one line."""
    try:
        return RewardConfig(name=name)
    except ValidationError as error:
        raise ValueError("; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())) from None


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"reward {url}: {error}; allowed: http://HOST:PORT/PATH or https://HOST:PORT/PATH") from None
    if not parts.hostname or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f"reward {url!r}: allowed: http://HOST:PORT/PATH or https://HOST:PORT/PATH")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"reward {parts.scheme}://{parts.hostname}: a user or password in a URL would be logged; leave them out")
