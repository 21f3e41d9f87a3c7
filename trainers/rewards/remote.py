"""A reward server: JSON over HTTP, with the standard library.

A request is a POST of {"completions": [text, ...], "prompts": [text, ...], "answers": [text or null, ...]}, three lists of one
length; the reply is {"rewards": [number, ...]}, of the same length and order. `batch_size` responses go into one request, and
requests are made one after the other.
"""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from trainers.deadline import Deadline, NotCalled
from trainers.types import Prompt, Rollout

BACKOFF_S = 0.5  # before the first retry; doubles with each further one
MOST_BACKOFF_S = 8.0
MOST_REPLY_BYTES = 2**24


class StatusError(Exception):
    """The server answered with something else than success."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Remote:
    """A component that a server computes.

    A lost connection, a time-out and a 5xx are tried again `retries` times, after 0.5, 1, 2, ... 8 seconds; a 4xx, a redirect and
    a reply of another form are not. Once a request has used its retries up, those that follow in the same step get none: a step
    does not wait long for a server that is down. `timeout_s` is for a whole attempt, from the name's look-up to the reply's last
    byte. Loopback addresses are reached without the environment's proxy.
    """

    def __init__(self, url: str, *, timeout_s: float, batch_timeout_s: float, retries: int, batch_size: int) -> None:
        self._url, self._timeout_s, self._retries, self._batch_size = url, timeout_s, retries, batch_size
        self._batch_timeout_s = batch_timeout_s
        self._opener = _opener(url)
        self._deadline = Deadline(timeout_s)

    def check(self, prompts: Sequence[Prompt]) -> None:
        pass  # what a server needs only it knows

    def values(self, rollouts: Sequence[Rollout]) -> list[Any]:
        self._deadline.begin(self._batch_timeout_s)
        retries = self._retries
        values: list[Any] = []
        for start in range(0, len(rollouts), self._batch_size):
            part = rollouts[start : start + self._batch_size]
            reply = self._request(part, retries)
            if isinstance(reply, Exception):
                retries = 0 if _may_pass(reply) else retries
                values += [reply] * len(part)
            else:
                values += reply
        return values

    def close(self) -> None:
        self._deadline.close()

    def _request(self, rollouts: Sequence[Rollout], retries: int) -> Any:
        """The list of rewards, or the exception of the last attempt."""
        sent = {
            "completions": [r.text for r in rollouts],
            "prompts": [r.prompt.text for r in rollouts],
            "answers": [r.prompt.answer for r in rollouts],
        }
        body = json.dumps(sent).encode()
        for attempt in range(retries + 1):
            if attempt:
                time.sleep(min(BACKOFF_S * 2 ** (attempt - 1), MOST_BACKOFF_S))
            reply = self._deadline.call(self._post, body, len(rollouts))
            if not _may_pass(reply):
                break
        return reply

    def _post(self, body: bytes, count: int) -> list[Any]:
        """One attempt. Its deadline is around it; the socket's, which is per read, only lets a thread go that was given up."""
        request = Request(self._url, data=body, headers={"Content-Type": "application/json"}, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s + 1) as response:
                reply = response.read(MOST_REPLY_BYTES + 1)
        except HTTPError as error:
            with error:
                said = error.read(200).decode(errors="replace")
            raise StatusError(error.code, f"HTTP {error.code} {error.reason}: {said}") from None
        if len(reply) > MOST_REPLY_BYTES:
            raise ValueError(f"the reply is longer than {MOST_REPLY_BYTES} bytes")
        return _rewards(reply, count)


def _rewards(reply: bytes, count: int) -> list[Any]:
    """Raises ValueError for a reply of another form; whether its items are numbers is judged later, one by one."""
    try:
        parsed = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the reply is not JSON: {error}") from None
    rewards = parsed.get("rewards") if isinstance(parsed, dict) else None
    if not isinstance(rewards, list):
        raise ValueError('the reply has no list "rewards"; allowed: {"rewards": [number, ...]}')
    if len(rewards) != count:
        raise ValueError(f"the reply has {len(rewards)} rewards for {count} completions")
    return rewards


def _may_pass(reply: Any) -> bool:
    """Whether another attempt may succeed where this one failed."""
    if isinstance(reply, StatusError):
        return reply.code >= 500
    return isinstance(reply, URLError | OSError | HTTPException) and not isinstance(reply, NotCalled)


class _NoRedirect(HTTPRedirectHandler):
    """A redirected POST would go on as a GET without its body, possibly to another scheme or host."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _opener(url: str) -> OpenerDirector:
    return build_opener(ProxyHandler({} if _is_loopback(urlsplit(url).hostname or "") else None), _NoRedirect)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified
