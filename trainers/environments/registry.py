"""Environments by name. No torch."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainers.environments.calculator import Calculator
from trainers.environments.environment import Environment
from trainers.environments.verifier import Verifier
from trainers.types import Prompt

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {"calculator": Calculator, "verifier": Verifier}


def resolve(name: str, settings: Mapping[str, Any]) -> Callable[[Prompt], Environment]:
    """What makes the environment called `name`, a key of ENVIRONMENTS or `module:Class`, for one conversation.

    Raises ValueError for an unknown name (with the nearest), a class that is not there, and settings that it does not take.
    """
    make = ENVIRONMENTS[name] if name in ENVIRONMENTS else _imported(name)
    signature = inspect.signature(make)
    try:
        signature.bind(None, **settings)  # the prompt comes first
    except TypeError as error:
        known = ", ".join(list(signature.parameters)[1:]) or "none"
        raise ValueError(f"environment {name}: settings {dict(settings)}: {error}; allowed: {known}") from error
    return partial(make, **settings)


def _imported(name: str) -> Callable[..., Environment]:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        near = difflib.get_close_matches(name, ENVIRONMENTS, 1, cutoff=0.3)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"environment {name!r} is unknown; {hint}allowed: {', '.join(ENVIRONMENTS)}, module:Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module: whatever it raises
        raise ValueError(
            f"environment {name}: cannot import {module_name!r}: {type(error).__name__}: {error}; its folder must be on "
            "PYTHONPATH"
        ) from error
    make = getattr(module, attribute, None)
    if not callable(make):
        raise ValueError(f"environment {name}: {module_name} has no class {attribute!r}")
    return make
