"""Power iteration on matrices whose spectrum is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hybrid.training.curvature import Eigenvalue, top_eigenvalue


def found(matrix: Tensor, **keys: float) -> Eigenvalue:
    g = torch.Generator().manual_seed(0)
    given = {"max_iter": 300, "tol": 1e-3} | keys
    return top_eigenvalue(lambda v: matrix @ v, torch.randn(len(matrix), generator=g).to(matrix), **given)


def with_spectrum(spectrum: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(1)
    basis = torch.linalg.qr(torch.randn(len(spectrum), len(spectrum), generator=g, dtype=torch.float64))[0]
    return (basis @ torch.tensor(spectrum).double().diag() @ basis.T).to(dtype)


@pytest.mark.parametrize(
    ("spectrum", "largest"),
    [
        ([3.0, 1.0, -2.0], 3.0),
        ([-3.0, 1.0, 2.9], -3.0),
        ([2.0, -2.0, 1.0, 0.5], 2.0),  # a tie, which the positive one wins
        ([2.0, -1.999, 1.0, 0.5], 2.0),
        ([1.0, 0.999, 0.998, -0.9, 0.0], 1.0),
        ([5.0], 5.0),
        ([-1e-5, 1e-6, 0.0], -1e-5),
        ([1e7, 1.0, -1.0], 1e7),
        ([2.0, 2.0, 2.0], 2.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_in_magnitude_with_its_sign(spectrum, largest, dtype):
    one = found(with_spectrum(spectrum, dtype))
    assert one.converged
    assert one.residual <= 1e-3
    assert one.value == pytest.approx(largest, rel=2e-3)


def test_random_matrices_against_a_full_decomposition():
    for seed in range(20):
        matrix = torch.randn(30, 30, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        matrix = matrix + matrix.T
        spectrum = torch.linalg.eigvalsh(matrix)
        one = found(matrix, max_iter=3000)
        assert one.converged
        assert abs(one.value) <= float(spectrum.abs().max()) * (1 + 1e-12)
        assert abs(one.value) == pytest.approx(float(spectrum.abs().max()), rel=1e-2)


def test_what_has_not_settled_says_so_and_is_no_overestimate():
    one = found(with_spectrum([1.0, 0.99, 0.98, -0.97, 0.5, 0.1]), max_iter=3, tol=1e-6)
    assert (one.iterations, one.converged) == (3, False)
    assert 0.3 < abs(one.value) < 1.0
    assert found(with_spectrum([1.0, 0.5]), max_iter=1).iterations == 1


def test_a_flat_loss_has_eigenvalue_zero():
    assert found(torch.zeros(4, 4)) == Eigenvalue(0.0, 1, 0.0, True)


def test_stability_ends_what_is_smaller_than_it():
    spectrum = with_spectrum([1e-9, -9.9e-10, 5e-10, 1e-10])
    assert found(spectrum, stability=1e-3).iterations == 2
    assert found(spectrum).value == pytest.approx(1e-9, rel=1e-2)


def test_no_hessian_has_no_eigenvalue():
    one = found(torch.tensor([[1.0, 3.0], [-1.0, 2.0]]))
    assert math.isnan(one.value)
    assert "not symmetric" in one.trouble
    one = found(torch.full((2, 2), math.inf))
    assert math.isnan(one.value)
    assert "not finite" in one.trouble


def test_all_end_by_the_numbers_that_are_agreed_on():
    heard: list[list[float]] = []

    def agree(numbers: list[float]) -> list[float]:
        heard.append(numbers)
        return [7.0, 0.0, 0.0, 1.0]

    matrix = with_spectrum([3.0, 1.0, -2.0])
    one = top_eigenvalue(lambda v: matrix @ v, torch.ones(3), max_iter=9, tol=1e-2, agree=agree)
    assert (one.value, one.iterations, len(heard)) == (7.0, 2, 2)
