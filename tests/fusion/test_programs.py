"""Every program of the table on every target that runs here: eager's values, shapes, dtypes, strides; its kernels."""

from __future__ import annotations

import pytest
import torch

import fusion
from tests.fusion.programs import CASES, Case


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest absolute difference from float64, equal infinities and NaNs counting as none."""
    result, exact = result.double(), exact.double()
    same = (result == exact) | (result.isnan() & exact.isnan())
    return float(torch.where(same, 0.0, (result - exact).abs()).max()) if result.numel() else 0.0


def assert_as_eager(got: object, eager: object, exact: object) -> None:
    if isinstance(eager, (tuple, list)):
        for parts in zip(got, eager, exact, strict=True):
            assert_as_eager(*parts)
        return
    assert got.shape == eager.shape and got.dtype is eager.dtype
    assert got.stride() == eager.stride()
    if eager.dtype.is_floating_point:
        assert error(got, exact) <= 2 * error(eager, exact) + 1e-6
    else:
        assert torch.equal(got, eager)


@pytest.mark.parametrize("target", ["reference", "c"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_program(case: Case, target: str) -> None:
    inputs = case.inputs()
    eager = case.function(*inputs)
    exact = case.function(*(x.double() if x.dtype.is_floating_point else x for x in inputs))
    options = {"target": target, "strict": True}
    assert_as_eager(fusion.fuse(case.function, options=options)(*inputs), eager, exact)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernels(case: Case) -> None:
    found = fusion.explain(case.function, options={"target": "reference", "strict": True})(*case.inputs())
    assert not found.externs, str(found)
    assert found.kernels
    if case.kernels is not None:
        assert len(found.kernels) == case.kernels, str(found)
