"""A config as DeepSpeed takes it: a mapping, the path of a JSON file, or the base64 text of one."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


def load(source: ConfigSource) -> dict[str, Any]:
    """The mapping, unchecked but for its form. Raises ValueError for a file that cannot be read, text that is no JSON object,
    and a key that stands twice in one object."""
    if isinstance(source, Mapping):
        return {**source}
    text, name = _read(os.fspath(source))
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, name))
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON (which has no comments): {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} holds a {type(found).__name__}; allowed: one object, {{...}}")
    return found


def _read(source: str) -> tuple[str, str]:
    """The text and what to call it. A name that is no file may be base64."""
    path = Path(source)
    try:
        return path.read_text(encoding="utf-8-sig"), source
    except OSError as error:
        try:
            return base64.urlsafe_b64decode(source).decode(), "the base64 config"
        except (binascii.Error, ValueError):
            reason = error.strerror or error
            short = source if len(source) < 200 else f"{source[:200]}..."
            raise ValueError(f"config {short!r}: {reason}; allowed: a mapping, a JSON file, or base64 of one") from None
    except UnicodeDecodeError:
        raise ValueError(f"config {source!r} is not UTF-8 text; allowed: a JSON file") from None


def _once(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        raise ValueError(f"{name}: {', '.join(map(repr, twice))} stands more than once in one object; keep one")
    return found
