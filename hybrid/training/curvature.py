"""The eigenvalue of largest magnitude of a symmetric matrix that is known by its products alone: power iteration.

v <- H v / |H v| (von Mises and Pollaczek-Geiringer 1929). What is read off is the Ritz value of two vectors that follow each
other, not the quotient v H v alone, which stands still far from any eigenvalue where one is +x and another nearly -x.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_TIE = 1e-4  # relative difference in magnitude below which two signs are equally large
_PARALLEL = 1e-3  # sine of the angle below which a second vector is rounding errors
_ASYMMETRY = 1e-2  # relative; rounding errors are far below


@dataclass(frozen=True)
class Eigenvalue:
    """What one iteration ended with."""

    value: float  # with its sign; nan: there is none, see `trouble`
    iterations: int  # as many products
    residual: float  # |H x - value x| / |value| of its unit vector x: some eigenvalue is that near, relatively
    converged: bool
    trouble: str = ""


def top_eigenvalue(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    *,
    max_iter: int,
    tol: float,
    stability: float = 0.0,
    agree: Callable[[list[float]], list[float]] = lambda numbers: numbers,
    note: Callable[[int, float, float], None] = lambda iteration, value, residual: None,
) -> Eigenvalue:
    """Of H, where product(v) is H v, from start [n], not zero. It ends when the value has changed by at most tol, relatively, and
    the residual is at most tol; relatively means over the magnitude plus `stability`. Without rounding errors the magnitude is
    never overestimated.

    agree: numbers that all ranks go by, since all must end together. note(iteration, value, residual) is called each time. A
    product that is not symmetric is no Hessian's, and one that is not finite has no eigenvalue: nan.
    """
    assert max_iter >= 1
    v, before, last, residual = start / start.norm(), None, math.inf, math.inf
    for iteration in range(1, max_iter + 1):
        w = product(v)
        value, residual, asymmetry, length = agree([*_ritz(v, w, before), float(w.norm())])
        residual /= abs(value) + stability or 1.0
        note(iteration, value, residual)
        if not math.isfinite(length):
            return Eigenvalue(math.nan, iteration, math.nan, False, "a product with the Hessian is not finite")
        if length == 0.0:
            return Eigenvalue(0.0, iteration, 0.0, True)
        if asymmetry > _ASYMMETRY * (length + stability):
            trouble = "products with the Hessian are not symmetric: the backward of some operation cannot be differentiated"
            return Eigenvalue(math.nan, iteration, math.nan, False, trouble)
        if abs(value - last) <= tol * (abs(value) + stability) and residual <= tol:
            return Eigenvalue(value, iteration, residual, True)
        before, last, v = (v, w), value, w / w.norm()
    return Eigenvalue(value, max_iter, residual, False)


def _ritz(v: Tensor, w: Tensor, before: tuple[Tensor, Tensor] | None) -> tuple[float, float, float]:
    """(the Ritz value of largest magnitude, |H x - value x|, how far products are from symmetric) in the span of v and the vector
    before, with their products. Of two equally large it is the positive one, step after step."""
    quotient = float(torch.dot(v, w))
    alone = (quotient, float((w - quotient * v).norm()))
    if before is None:
        return *alone, 0.0
    v0, w0 = before
    asymmetry = abs(float(torch.dot(v0, w)) - float(torch.dot(v, w0)))
    cosine = float(torch.dot(v0, v))
    across = v - cosine * v0
    sine = float(across.norm())
    if not sine > _PARALLEL:
        return *alone, asymmetry
    across, image = across / sine, (w - cosine * w0) / sine
    mixed = (float(torch.dot(across, w0)) + float(torch.dot(v0, image))) / 2
    a, b = float(torch.dot(v0, w0)), float(torch.dot(across, image))
    # of [[a, mixed], [mixed, b]]
    middle, half = (a + b) / 2, math.hypot((a - b) / 2, mixed)
    is_upper = middle >= -_TIE * half
    value = middle + half if is_upper else middle - half
    angle = math.atan2(2 * mixed, a - b) / 2 + (0 if is_upper else math.pi / 2)  # of its eigenvector
    x, image_of_x = (math.cos(angle) * p + math.sin(angle) * q for p, q in ((v0, across), (w0, image)))
    return value, float((image_of_x - value * x).norm()), asymmetry
