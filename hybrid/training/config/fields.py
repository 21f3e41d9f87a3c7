"""What all sections share: unknown names, "auto", whole numbers. No torch."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from hybrid.config import Strict, first_causes, in_words


class Section(Strict):
    """A section of DeepSpeed's configuration. A value of "auto" counts as not given. An unknown name is refused, with the
    nearest known one."""

    AUTO: ClassVar[Mapping[str, Any]] = {}  # what "auto" stands for where that is not the default

    @model_validator(mode="before")
    @classmethod
    def _known_and_given(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if unknown := [str(name) for name in given if name not in cls.model_fields]:
            raise ValueError("; ".join(f"{name} is unknown; {nearest(name, cls.model_fields)}" for name in unknown))
        auto = {name for name, value in given.items() if isinstance(value, str) and value == "auto"}
        return {n: cls.AUTO[n] if n in auto else v for n, v in given.items() if n not in auto or n in cls.AUTO}


def nearest(name: str, known: Iterable[str]) -> str:
    """`nearest: NAME`, whatever its case, or all the known names where none is near."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"nearest: {by_lower[near[0]]}" if near else f"allowed: {', '.join(by_lower.values())}"


def one_line(error: ValidationError) -> str:
    """Every problem with its path, in one line."""
    found = [(".".join(map(str, each["loc"])), in_words(each)) for each in first_causes(error)]
    return "; ".join(f"{where}: {message}" if where else message for where, message in found)


def whole(value: Any) -> int:
    """A whole number: an integer of any type (numpy's too), or a float without a fraction, since JSON reads 1e3 as one.
    Raises ValueError for anything else: true, 1.5, NaN, infinities, null, text."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value).is_integer():
        return int(float(value))
    raise ValueError(f"{value!r} is given; allowed: a whole number, as in 1000 or 1e3")


def whole_or_text(value: Any) -> int:
    """As `whole`; also the text of an integer, "2"."""
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass  # refused below, with what is allowed
    return whole(value)


def number_or_text(value: Any) -> float:
    """A finite number, or the text of one. Raises ValueError for anything else."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is given; allowed: a finite number")
    return number


Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=1)]
WholeOrText = Annotated[int, BeforeValidator(whole_or_text)]
NumberOrText = Annotated[float, BeforeValidator(number_or_text)]
