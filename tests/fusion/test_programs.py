"""Every program of the table on every target that runs here: eager's values, shapes, dtypes, strides; its kernels."""

from __future__ import annotations

import pytest

import fusion
from tests.fusion.agreement import assert_as_eager
from tests.fusion.programs import CASES, Case


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
    explanation = fusion.explain(case.function, options={"target": "reference", "strict": True})(*case.inputs())
    assert not explanation.externs, str(explanation)
    assert explanation.kernels
    if case.kernels is not None:
        assert len(explanation.kernels) == case.kernels, str(explanation)
