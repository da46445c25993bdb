"""`fusion.verify`: what is compared, with what, and what counts as a difference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.inspect.agreement import Tolerance, judged, largest_error

X = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
BY_RULE = Tolerance()


def of(ours: object, eager: object, exact: object = None, *, tolerance: Tolerance = BY_RULE) -> bool:
    """Does a tensor agree with eager's?"""
    tensors = [None if each is None else torch.as_tensor(each) for each in (ours, eager, exact)]
    return judged("result", *tensors, tolerance).agrees  # type: ignore[arg-type]  # the first two are tensors


def test_the_error_may_be_twice_that_of_eager() -> None:
    exact = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert of([1.0002, 2.0], [1.0001, 2.0], exact)
    assert not of([1.0003, 2.0], [1.0001, 2.0], exact)
    assert of([1.0, 2.0 + 2e-7], [1.0, 2.0], exact) and not of([1.0, 2.0 + 1e-6], [1.0, 2.0], exact)


def test_numbers_that_are_not_finite_are_at_the_same_places() -> None:
    for odd in (math.nan, math.inf, -math.inf):
        assert of([odd, 1.0], [odd, 1.0], torch.tensor([odd, 1.0], dtype=torch.float64))
        assert not of([0.0, 1.0], [odd, 1.0], torch.tensor([odd, 1.0], dtype=torch.float64))
        assert not of([odd, 1.0], [0.0, 1.0], torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert largest_error(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf


def test_integers_are_those_of_eager_or_of_float64() -> None:
    assert of([1, 2], [1, 3], [1, 2]) and of([1, 3], [1, 3], [1, 2])
    assert not of([1, 4], [1, 3], [1, 2])


def test_complex_numbers_have_tolerances() -> None:
    eager = torch.tensor([1 + 1j], dtype=torch.complex64)
    assert of(eager * (1 + 1e-7), eager, eager.to(torch.complex128))
    assert not of(eager * 1.001, eager, eager.to(torch.complex128))


def test_given_tolerances_hold_for_each_element() -> None:
    eager = [1.0, 100.0]
    assert of([1.009, 100.9], eager, tolerance=Tolerance(rtol=0.01))
    assert not of([1.02, 100.0], eager, tolerance=Tolerance(rtol=0.01))
    assert of([1.02, 100.0], eager, tolerance=Tolerance(rtol=0.01, atol=0.1))
    exact = torch.tensor([1.0, 101.0], dtype=torch.float64)
    assert not of([1.0, 101.0], eager, exact, tolerance=Tolerance(atol=0.5))
    assert of([1.0, 101.0], eager, exact, tolerance=Tolerance(atol=0.5, against="float64"))


def test_gradients_buffers_and_changed_inputs_are_compared() -> None:
    model = nn.Sequential(nn.Linear(100, 16), nn.BatchNorm1d(16))
    found = fusion.verify(model)(X.clone().requires_grad_())
    names = {value.name for value in found.values}
    assert {"result", "gradient of input[0]", "gradient of 0.weight", "buffer 1.running_mean"} <= names
    assert "input[0]" not in names and found.agrees
    assert int(model[1].num_batches_tracked) == 0

    def shifted(x: Tensor, *, by: Tensor) -> Tensor:
        by.mul_(2)
        return x + by

    x, by = X.clone(), torch.ones(100)
    found = fusion.verify(shifted)(x, by=by)
    assert [value.name for value in found.values] == ["result", "input['by']"]
    assert torch.equal(by, torch.ones(100))


def test_another_shape_or_dtype_differs() -> None:
    wrong = fusion.inspect.agreement.ComparedRuns(lambda x: x + 1, (X,))
    for program, what in ((lambda x: x[:4] + 1, r"float32 \(4, 100\)"), (lambda x: x.double() + 1, "float64")):
        (value,) = wrong.agreement(wrong.run(lambda _, program=program: program)).values
        assert not value.agrees and what.replace("\\", "") in value.fault


def test_a_program_without_float64_is_compared_with_eager() -> None:
    weight = torch.randn(100, 3)
    found = fusion.verify(lambda x: torch.relu(x @ weight))(X)
    assert found.agrees and "does not run in float64" in found.note
    with pytest.raises(fusion.NotComparable, match="does not run in float64"):
        fusion.verify(lambda x: torch.relu(x @ weight), rtol=1e-3, against="float64")(X)
    found = fusion.verify(lambda x: torch.relu(x.to(torch.bfloat16)))(X)
    assert found.agrees and "still computes in other dtypes" in found.note


def test_random_numbers_are_refused_and_eval_is_not() -> None:
    model = nn.Dropout(0.5)
    with pytest.raises(fusion.NotComparable, match=r"random numbers[\s\S]*eval mode"):
        fusion.verify(model)(X)
    assert fusion.verify(model.eval())(X).agrees
