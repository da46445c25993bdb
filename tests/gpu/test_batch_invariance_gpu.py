"""Batch-invariant numerics on a device: a row has the same bits in every batch, compiled alone or for any size."""

from __future__ import annotations

import pytest
import torch

import fusion
from tests.fusion.test_batch_invariance import PROGRAMS, drawn, parts
from tests.fusion.test_fixed_order import COLUMNS

pytestmark = pytest.mark.gpu

OPTIONS = {"numerics": "batch_invariant", "strict": True}
MANY = 1000
COPIED = "aten._to_copy.default"
"""The weights of the programs come from the host."""
EVERY = {**PROGRAMS, **COLUMNS}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_a_row_has_the_same_bits_in_every_batch(name: str, dtype: torch.dtype) -> None:
    program, shape = EVERY[name]
    many = MANY if torch.Size(shape).numel() < 1 << 16 else 100

    batch = drawn(many, *shape).to(dtype).cuda()
    static = fusion.fuse(program, dynamic=False, options=OPTIONS)
    symbolic = fusion.fuse(program, options=OPTIONS)
    expected = parts(static(batch))
    externs = {str(each.name) for each in fusion.report(static).externs} - {COPIED}
    assert externs == ({"aten.cumsum.default"} if name == "scan" else set())
    if dtype is torch.float32:
        torch.testing.assert_close(expected, parts(program(batch)), rtol=2e-2, atol=2e-2)
    if name == "scan":  # a library call: the report says that its bits may vary
        return
    slices = [(static, 0, 1), (static, 7, 40)]
    slices += [(symbolic, *bounds) for bounds in ((0, 2), (1, 4), (5, 13), (60, 93), (0, many))]
    for compiled, first, last in slices:
        given = batch[first:last]
        if compiled is symbolic:
            torch._dynamo.mark_dynamic(given, 0)
        for got, want in zip(parts(compiled(given)), expected, strict=True):
            assert torch.equal(got, want[first:last]), (first, last, compiled is static)
