"""Small triangular systems and Cholesky factors against eager: no call remains."""

from __future__ import annotations

import pytest
import torch

from fusion.lowering.rules.entries import LARGEST_SIDE
from tests.lowering.lowered import calls, check, lowered

pytestmark = pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")

BOTH = (False, True)


def triangles(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Matrices of both triangles, with a diagonal that outweighs them."""
    return torch.rand(shape, dtype=dtype) + shape[-1] * torch.eye(shape[-1], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("batch", "size"), [((), 5), ((3,), LARGEST_SIDE), ((2, 1), 2), ((0,), 2), ((3,), 1), ((2,), 0)]
)
def test_triangular_systems(batch: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    a, b = triangles(*batch, size, size, dtype=dtype), torch.rand(*batch, size, 3, dtype=dtype)

    def solutions(a, b):
        for upper in BOTH:
            for unit in BOTH:
                yield torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=unit)
                yield torch.linalg.solve_triangular(a, b.mT, upper=upper, unitriangular=unit, left=False)
                yield from (torch.triangular_solve(b, a, upper, transpose, unit) for transpose in BOTH)

    check(lambda a, b: tuple(solutions(a, b)), a, b)
    check(lambda a, b: tuple(solutions(a, b)), a.mT.contiguous().mT, b)


@pytest.mark.parametrize("size", [0, 1, 4])
def test_cholesky_factors(size: int) -> None:
    for batch in ((), (3,), (0,)):
        a, b = triangles(*batch, size, size), torch.rand(*batch, size, 2, dtype=torch.float64)
        for upper in BOTH:
            check(lambda a: torch.linalg.cholesky_ex(a, upper=upper), a @ a.mT)  # noqa: B023
            check(lambda a, b: (a.cholesky_inverse(upper), b.cholesky_solve(a, upper)), a, b)  # noqa: B023


def test_matrices_are_broadcast() -> None:
    a, b = triangles(2, 1, 4, 4), torch.rand(3, 4, 2, dtype=torch.float64)
    check(lambda a, b: (torch.linalg.solve_triangular(a, b, upper=True), torch.cholesky_solve(b, a)), a, b)


def test_the_first_row_without_a_factor_is_named() -> None:
    a = torch.eye(4, dtype=torch.float64).repeat(4, 1, 1)
    a[1, 2, 2], a[2, 0, 0], a[3, 3, 1:3] = -1.0, torch.nan, 2.0
    check(lambda a: torch.linalg.cholesky_ex(a)[1], a)


def test_gradients_of_a_factor() -> None:
    a = triangles(2, 3, 3)

    def gradients(a):
        def total(a):
            return torch.linalg.cholesky_ex(a @ a.mT)[0].square().sum()

        return torch.func.grad(total)(a)

    check(gradients, a)


def test_large_matrices_and_16_bit_floats_stay_calls() -> None:
    large = triangles(LARGEST_SIDE + 1, LARGEST_SIDE + 1)
    program = lowered(lambda a: torch.linalg.solve_triangular(a, a, upper=True), large)
    assert calls(program) == {
        "linalg_solve_triangular.default": f"matrices of more than {LARGEST_SIDE} rows or columns"
    }
    program = lowered(lambda a: torch.linalg.solve_triangular(a, a, upper=True), torch.eye(2, dtype=torch.float16))
    assert "linalg_solve_triangular.default" in calls(program)
