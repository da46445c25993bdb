"""Batch-invariant numerics under Triton's interpreter: blocks of any number of rows compute the bits of one row.

The interpreter adds the elements of a block in one order; `tests/fusion/test_fixed_order.py` checks that the text
leaves none to the compiler.
"""

from __future__ import annotations

import pytest
import torch

import fusion
from tests.fusion.test_batch_invariance import PROGRAMS, drawn, parts
from tests.fusion.test_fixed_order import COLUMNS

NAMES = (
    "softmax",
    "variance",
    "product of numbers",
    "rms norm",
    "group norm",
    "mean of pixels",
    "losses",
    "odd linear",
    "norm and linear",
    "product of batches",
)
OPTIONS = {"numerics": "batch_invariant", "strict": True, "target": "triton"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_has_the_same_bits_in_every_batch(name: str, dtype: torch.dtype) -> None:
    program, shape = PROGRAMS[name]
    batch = drawn(9, *shape).to(dtype)
    whole = fusion.fuse(program, dynamic=False, options=OPTIONS)
    expected = parts(whole(batch))
    assert fusion.report(whole).kernels and not fusion.report(whole).externs
    if dtype is torch.float32:
        torch.testing.assert_close(expected, parts(program(batch)), rtol=1e-3, atol=1e-4)
    symbolic = fusion.fuse(program, options=OPTIONS)
    for rows in (5, 4, 2):  # the second size makes the number of rows symbolic
        for got, want in zip(parts(symbolic(batch[:rows])), expected, strict=True):
            assert torch.equal(got, want[:rows])
    torch._dynamo.reset()
    alone = fusion.fuse(program, dynamic=False, options=OPTIONS)
    for got, want in zip(parts(alone(batch[3:4])), expected, strict=True):
        assert torch.equal(got, want[3:4])


@pytest.mark.parametrize("name", [name for name in COLUMNS if name != "long columns"])
def test_columns(name: str) -> None:
    program, shape = COLUMNS[name]
    batch = drawn(3, *shape)
    fused = fusion.fuse(program, dynamic=False, options=OPTIONS)
    expected = fused(batch)
    torch.testing.assert_close(expected, program(batch), rtol=1e-3, atol=1e-4)
    for got, want in zip(parts(fused(batch[1:2])), parts(expected), strict=True):
        assert torch.equal(got, want[1:2])
