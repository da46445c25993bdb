"""Small matrices: factors, systems, inverses and determinants against eager; no call remains."""

from __future__ import annotations

import pytest
import torch

from fusion.lowering.lower import lower
from fusion.lowering.rules.entries import LARGEST_SIDE
from tests.lowering.lowered import calls, check, lowered, traced

aten = torch.ops.aten


def matrices(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers of which rows have to be exchanged, but whose systems are well-conditioned."""
    torch.manual_seed(3)
    return torch.rand(shape, dtype=dtype) + 2 * torch.eye(*shape[-2:], dtype=dtype).flip(-2)


SIZES = [((), 5), ((3,), 6), ((2, 1), 2), ((0,), 2), ((3,), 1), ((2,), 0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("batch", "size"), SIZES)
def test_systems(batch: tuple[int, ...], size: int, dtype: torch.dtype) -> None:
    a, b = matrices(*batch, size, size, dtype=dtype), torch.rand(*batch, size, 3, dtype=dtype)

    def solutions(a, b):
        yield from aten._linalg_solve_ex(a, b)
        yield from aten._linalg_solve_ex(a, b.mT, left=False)
        yield from torch.linalg.inv_ex(a)
        factors, pivots, _ = torch.linalg.lu_factor_ex(a)
        for adjoint in (False, True):
            yield torch.linalg.lu_solve(factors, pivots, b, adjoint=adjoint)
            yield torch.linalg.lu_solve(factors, pivots, b.mT, left=False, adjoint=adjoint)

    check(lambda a, b: tuple(solutions(a, b)), a, b)
    check(lambda a, b: tuple(solutions(a, b)), a.mT.contiguous().mT, b)


@pytest.mark.parametrize(("batch", "size"), SIZES)
def test_determinants(batch: tuple[int, ...], size: int) -> None:
    def determinants(a):
        return (*aten._linalg_det(a), *aten._linalg_slogdet(a))

    a = matrices(*batch, size, size)
    check(determinants, a)
    check(determinants, a.mT)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 4, 4), (0, 3, 2), (2, 0, 3), (1, 1)])
def test_factors(shape: tuple[int, ...]) -> None:
    def factors(a):
        together, pivots, info = torch.linalg.lu_factor_ex(a)
        yield from (together, pivots, info)
        yield from torch.linalg.lu(a)
        for data, exchanged in ((True, True), (False, True), (True, False)):
            yield from torch.lu_unpack(together, pivots, data, exchanged)

    check(lambda a: tuple(factors(a)), matrices(*shape))


def test_vectors_and_broadcast_matrices() -> None:
    a, b = matrices(2, 1, 4, 4), torch.rand(3, 4, 2, dtype=torch.float64)
    check(lambda a, b: (torch.linalg.solve_ex(a, b)[0], torch.linalg.solve_ex(a[:, 0], b[:2, :, 0])[0]), a, b)
    check(lambda a, b: torch.linalg.solve_ex(a[0, 0], b[0, :, 0])[0], a, b)


def test_equal_elements_and_columns_of_zeros() -> None:
    a = torch.tensor([[[0.0, 1, 2], [0, -1, 3], [0, 1, 5]], [[2, 1, 0], [-2, 1, 0], [2, 3, 0]]], dtype=torch.float64)
    check(lambda a: (*torch.linalg.lu_factor_ex(a), aten._linalg_det(a)[0]), a)


def test_gradients() -> None:
    def total(a):
        return torch.linalg.inv_ex(a)[0].sum() + torch.linalg.solve_ex(a, a[..., :1])[0].square().sum()

    check(lambda a: torch.func.grad(total)(a), matrices(2, 3, 3))


def test_factors_without_exchanged_rows_agree_with_a_gpu() -> None:
    program = lowered(lambda a: torch.lu_unpack(*torch.linalg.lu_factor_ex(a, pivot=False)[:2]), matrices(3, 3))
    assert list(calls(program)) == ["linalg_lu_factor_ex.default"]


def test_large_matrices_stay_calls() -> None:
    for size in (7, LARGEST_SIDE + 1):
        program = lowered(lambda a: torch.linalg.inv_ex(a)[0], matrices(size, size))
        assert list(calls(program)) == ["linalg_inv_ex.default"]


def test_strict_numerics_leave_matrices_to_the_library() -> None:
    graph = traced(
        lambda a: (torch.linalg.inv_ex(a)[0], torch.linalg.solve_triangular(a, a, upper=True)), [matrices(3, 3)]
    )
    assert sorted(calls(lower(graph, rounded=True))) == ["linalg_inv_ex.default", "linalg_solve_triangular.default"]
