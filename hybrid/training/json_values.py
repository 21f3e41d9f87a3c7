"""Plain Python values as JSON and back, exactly: what JSON has no form for (tuples, infinities, keys that are no text) is an
object with one key that starts with "~"."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from typing import Any

_TUPLE, _FLOAT, _PAIRS, _COUNTER = "~tuple", "~float", "~pairs", "~counter"


def encode(value: Any, where: str) -> Any:
    """`decode` gives the same value again. Raises ValueError, with the place (`where`["key"]...), for anything that is not made
    of None, bool, int, float, str, list, tuple, dict and Counter; a numpy number becomes Python's."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, numbers.Number) and hasattr(value, "item") and type(item := value.item()) is not type(value):  # numpy's
        return encode(item, where)
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if type(value) is list:
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is tuple:
        return {_TUPLE: [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if type(value) is Counter:
        return {_COUNTER: _pairs(value, where)}
    if isinstance(value, dict):
        if all(type(key) is str and not key.startswith("~") for key in value):
            return {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
        return {_PAIRS: _pairs(value, where)}
    raise ValueError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}; allowed in a checkpoint: JSON, since nothing is pickled; "
        "give numbers, text, lists or dicts (tensor.tolist(), vars(namespace), str(path))"
    )


def _pairs(value: dict[Any, Any], where: str) -> list[Any]:
    return [[encode(key, f"{where}: key {key!r}"), encode(item, f"{where}[{key!r}]")] for key, item in value.items()]


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    form, item = next(iter(value.items())) if len(value) == 1 else ("", None)
    if form == _FLOAT:
        return float(str(item))
    if form == _TUPLE:
        return tuple(decode(item))
    if form in (_PAIRS, _COUNTER):
        pairs = dict(decode(item))
        return Counter(pairs) if form == _COUNTER else pairs
    return {name: decode(part) for name, part in value.items()}
