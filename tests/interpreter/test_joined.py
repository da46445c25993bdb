"""Products of the same rows in one loop, under Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by

from fusion.codegen.triton import TritonTarget
from fusion.lowering.ir.program import BufferRef
from fusion.schedule.kernels import KernelCall
from tests.fusion.schedule.test_contractions import Function, launches, scheduled

TARGET = TritonTarget("sm_90")


def grouped_heads(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.linear(x, q), F.linear(x, k), F.linear(x, v)


def added(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Each product has an epilogue before it is stored."""
    return torch.tanh(F.linear(x, q)) + a, torch.tanh(F.linear(x, k)) + b, torch.tanh(F.linear(x, v)) + c


def plain(columns: tuple[int, int, int]) -> tuple[tuple[int, ...], ...]:
    rows, along = 2200, 136
    return ((rows, along), *((count, along) for count in columns))


CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "grouped heads": (grouped_heads, plain((264, 136, 136))),
    "all different": (grouped_heads, plain((136, 520, 264))),
    "added": (added, (*plain((264, 136, 136)), (2200, 264), (2200, 136), (2200, 136))),
}


@pytest.mark.parametrize("name", CASES)
def test_products_of_the_same_rows_are_one_loop(name: str) -> None:
    function, shapes = CASES[name]
    schedule = scheduled(function, *shapes)
    (call,) = launches(schedule)
    assert isinstance(call, KernelCall)
    source = TARGET.emit(call.kernel)
    assert call.kernel.beside and source.count("tl.range(") == source.count("tl.dot(") == 1
    given = [torch.randn(shape).bfloat16() for shape in shapes]
    results = function(*given)
    want = function(*(tensor.double() for tensor in given))
    memory = dict(zip(schedule.program.inputs, given, strict=True))
    outputs = [output.name for output in schedule.program.outputs if isinstance(output, BufferRef)]
    memory |= {name: torch.full_like(value, torch.nan) for name, value in zip(outputs, results, strict=True)}
    TARGET.build(call.kernel, source)(*(memory[name] for name in call.buffers))
    for output, eager, exact in zip(outputs, results, want, strict=True):
        assert (memory[output] - exact).abs().max() <= 2 * (eager - exact).abs().max()
