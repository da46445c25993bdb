"""Complex numbers between real ones: computed as pairs, as in eager; others are left to the library."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion
from tests.fusion.agreement import agree

Program = Callable[[Tensor, Tensor], Tensor]


def complex_of(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    """A rotary embedding."""
    turned = complex_of(x) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


def rotated_heads(x: Tensor, angle: Tensor) -> Tensor:
    heads = complex_of(x.view(5, 2, 8)).transpose(0, 1)
    return torch.view_as_real(heads * torch.polar(torch.ones_like(angle), angle)[:, :4]).flatten(-2)


def by_real(x: Tensor, angle: Tensor) -> Tensor:
    z = complex_of(x) * angle
    return torch.view_as_real(2.5 * z + angle - 1 + (0.5 - 2j) * z)


def conjugated(x: Tensor, angle: Tensor) -> Tensor:
    z = complex_of(x)
    return torch.view_as_real((z * z.conj()).sum(0) - (z.conj() * angle).sum(0))


def length(x: Tensor, angle: Tensor) -> Tensor:
    z = complex_of(x) * torch.polar(angle, angle)
    return z.abs() + z.real * z.imag


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [rotated, rotated_heads, by_real, conjugated], ids=lambda p: p.__name__)
def test_parts_are_generated(program: Program, dynamic: bool) -> None:
    x, angle = torch.randn(5, 16, requires_grad=True), torch.rand(5, 8, requires_grad=True)
    report = agree(program, x, angle, backward=True, dynamic=dynamic)
    assert not report.externs, str(report)


def test_lengths_are_generated() -> None:
    report = agree(length, torch.randn(5, 16), torch.rand(5, 8) + 0.5)
    assert not report.externs, str(report)


def test_a_complex_input_is_read_in_place() -> None:
    def program(x: Tensor, turn: Tensor) -> Tensor:
        return torch.view_as_real(complex_of(x) * turn[:, ::2])

    turn = torch.polar(torch.rand(5, 16), torch.rand(5, 16))
    report = agree(program, torch.randn(5, 16, requires_grad=True), turn, backward=True)
    assert not report.externs, str(report)
    agree(program, torch.randn(5, 16, requires_grad=True), turn.conj(), backward=True)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -0.0])
def test_a_real_factor_is_a_complex_one(number: float) -> None:
    """Infinity times zero is NaN: the imaginary part of a real factor counts."""

    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.view_as_real(complex_of(x) * y + y)

    x, y = torch.randn(3, 8), torch.randn(3, 4)
    x[0, 3] = y[1, 2] = number
    agree(program, x, y)


def transformed(x: Tensor, angle: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * 2).sin()


def returned(x: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    z = complex_of(x) * angle
    return z, torch.view_as_real(z + 1)


@pytest.mark.parametrize("program", [transformed, returned], ids=lambda p: p.__name__)
def test_complex_numbers_read_by_a_library_or_the_caller_stay_complex(program: Program) -> None:
    x, angle = torch.randn(5, 16), torch.rand(5, 8)
    fused = fusion.fuse(program, options={"strict": True})
    torch.testing.assert_close(fused(*copy.deepcopy((x, angle))), program(x, angle))
    assert any(call.name == "aten.mul.Tensor" for call in fusion.report(fused).externs)


def test_strict_numerics_leave_complex_numbers_to_the_library() -> None:
    fused = fusion.fuse(rotated, options={"strict": True, "numerics": "strict"})
    x, angle = torch.randn(5, 16), torch.rand(5, 8)
    torch.testing.assert_close(fused(x, angle), rotated(x, angle))
    assert any(call.name == "aten.mul.Tensor" for call in fusion.report(fused).externs)
