"""A calculator that the policy asks between two markers, e.g. `<calc>12*34</calc>`. No torch."""

from __future__ import annotations

import ast
import decimal
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from trainers.environments.environment import Reply
from trainers.types import Prompt

MAX_CHARACTERS = 100  # of an expression, so that its tree is small too
MAX_NUMBER = 10**40  # of every numerator and denominator on the way
MAX_EXPONENT = 64
DIGITS = 12  # of a quotient that does not come out even

_ALPHABET = re.compile(r"[0-9.+\-*/%() ]+")  # the parser sees no name, call or string
_OPERATORS: dict[type[ast.AST], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Calculator:
    """A turn that holds `closing` is a call: what stands before it, from the last `opening` on, is worked out, and the result is
    the environment's message; `error` is, where there is none. A turn without a call is the policy's answer and ends the
    conversation. It gives no reward of its own."""

    def __init__(self, prompt: Prompt, *, opening: str = "<calc>", closing: str = "</calc>", error: str = "error") -> None:
        """Raises ValueError for a setting that is no text, or an empty marker."""
        settings = {"opening": opening, "closing": closing, "error": error}
        if not all(isinstance(value, str) for value in settings.values()) or not opening or not closing:
            raise ValueError(f"calculator: {settings}; allowed: texts, the markers of a character or more")
        self.opening, self.closing, self.error = opening, closing, error
        self.stop = (closing,)

    def reply(self, text: str, ids: tuple[int, ...], finish_reason: str) -> Reply:
        before, closed, _ = text.partition(self.closing)
        if not closed:
            return Reply(None)
        _, opened, expression = before.rpartition(self.opening)
        try:
            return Reply(calculate(expression) if opened else self.error)
        except ValueError:
            return Reply(self.error)


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and brackets, exactly: an integer, or a decimal of at most DIGITS
    digits. Raises ValueError for anything else, for a division by 0, and for numbers beyond MAX_NUMBER."""
    if len(expression) > MAX_CHARACTERS or not _ALPHABET.fullmatch(expression):
        raise ValueError(
            f"{expression!r:.120}; allowed: at most {MAX_CHARACTERS} of the characters 0-9 . + - * / % ( ) and space"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError) as error:  # the last two: what the parser makes of depth
        raise ValueError(f"{expression!r}: {error}") from error
    if value.denominator == 1:
        return str(value.numerator)
    context = decimal.Context(prec=DIGITS)
    return format(context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator)), "f")


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return _limited(Fraction(str(number)))  # a float's shortest text: 0.1 is one tenth
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _limited(Fraction(_OPERATORS[type(op)](_value(left), _value(right))))
    raise ValueError(f"{ast.unparse(node)}; allowed: numbers, + - * / // % ** and brackets")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"exponent {exponent}; allowed: an integer of at most {MAX_EXPONENT} either way")
    return _limited(Fraction(base**exponent))


def _limited(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > MAX_NUMBER:
        raise ValueError(f"a number beyond {MAX_NUMBER:.0e} on the way")
    return value
