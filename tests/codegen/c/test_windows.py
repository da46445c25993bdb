"""Windows in C: folded in registers as maps, unless lanes would test or gather their elements."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion

ROWS, IMAGE = (3, 5, 130), (2, 8, 21, 23)
LAST = torch.channels_last

IN_REGISTERS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.memory_format]] = {
    "dilated row": (lambda x: F.max_pool1d(x, 8, stride=1, dilation=3), ROWS, torch.contiguous_format),
    "row in steps": (lambda x: F.max_pool1d(x, 4), ROWS, torch.contiguous_format),
    "overlapping sums": (lambda x: x.unfold(2, 7, 1).sum(-1), ROWS, torch.contiguous_format),
    "first axis": (lambda x: x.unfold(0, 2, 1).sum(-1), ROWS, torch.contiguous_format),
    "channels last": (lambda x: F.avg_pool2d(x, 3, 1), IMAGE, LAST),
    "groups": (lambda x: x.view(3, 5, 5, 26).amax(2), ROWS, torch.contiguous_format),
}

FOLDED: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], torch.memory_format]] = {
    "ten points": (lambda x: F.max_pool1d(x, 10, stride=1), ROWS, torch.contiguous_format),
    "padded": (lambda x: F.avg_pool1d(x, 5, 1, 2), ROWS, torch.contiguous_format),
    "padded, channels last": (lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE, LAST),
    "rows of an image": (lambda x: F.max_pool2d(x, 3, 2), IMAGE, torch.contiguous_format),
}


def check(program: Callable[[Tensor], Tensor], shape: tuple[int, ...], order: torch.memory_format) -> str:
    """Compare with eager, also at NaN; return the source."""
    x = torch.randn(shape)
    x.view(-1)[7] = torch.nan
    x = x.contiguous(memory_format=order)
    fused = fusion.fuse(program, options={"target": "c", "strict": True})
    torch.testing.assert_close(fused(x), program(x), equal_nan=True)
    (kernel,) = fusion.report(fused).kernels
    return str(kernel.source)


@pytest.mark.parametrize("name", IN_REGISTERS)
def test_few_elements_are_folded_in_registers(name: str) -> None:
    source = check(*IN_REGISTERS[name])
    assert "r0" not in source and "#pragma omp simd" in source


@pytest.mark.parametrize("name", FOLDED)
def test_others_are_loops(name: str) -> None:
    assert "for (int64_t r0 = " in check(*FOLDED[name])
