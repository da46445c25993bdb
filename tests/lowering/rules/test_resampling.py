"""Antialiased resizing and its gradients against eager: no call remains."""

from __future__ import annotations

import pytest
import torch

from fusion.lowering.interpret import run_program
from tests.lowering.lowered import calls, check, lowered

aten = torch.ops.aten
RULES = {
    "bilinear": (aten._upsample_bilinear2d_aa, aten._upsample_bilinear2d_aa_backward),
    "bicubic": (aten._upsample_bicubic2d_aa, aten._upsample_bicubic2d_aa_backward),
}


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_resizing_and_its_gradients(name, align):
    forward, backward = RULES[name]
    x = torch.randn(2, 13, 10, 3, dtype=torch.float64).movedim(-1, 1)
    for size in ([5, 25], [1, 3], [13, 11], [40, 1]):
        grad = torch.randn(2, 3, *size[::-1], dtype=torch.float64).mT
        check(lambda x: forward(x, size, align), x, tolerance=1e-10)  # noqa: B023
        check(lambda g: backward(g, size, [2, 3, 13, 10], align), grad, tolerance=1e-10)  # noqa: B023


def test_scales_that_are_given():
    forward, backward = RULES["bilinear"]
    x, grad = torch.randn(2, 3, 7, 9), torch.randn(2, 3, 5, 12)
    check(lambda x: forward(x, [5, 12], False, 0.75, 1.4), x)
    check(lambda g: backward(g, [5, 12], [2, 3, 7, 9], False, 0.75, 1.4), grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_floats_are_rounded_once(dtype):
    forward, _ = RULES["bilinear"]
    x = torch.randn(1, 2, 9, 30, dtype=dtype)
    program = lowered(lambda x: forward(x, [4, 7], False), x)
    assert not calls(program)
    torch.testing.assert_close(run_program(program, [x])[0], forward(x.float(), [4, 7], False).to(dtype))
