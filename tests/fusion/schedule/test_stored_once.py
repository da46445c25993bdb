"""Maps that are stored once, and the order in which tiles read tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fusion
from fusion.inspect.examples import lowered
from fusion.lowering.ir.program import Map
from fusion.schedule.layouts.stored_once import merge_equal_maps
from fusion.schedule.overrides import LIBRARY, Overrides
from tests.fusion.agreement import assert_as_eager

Q = (2, 4, 300, 16)


def scores(bias: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Attention with a bias of shape (batch, rows, columns, heads), heads next to each other in memory."""
    return lambda q, k, v, b: torch.softmax(q @ k.mT + bias(b).permute(0, 3, 1, 2), -1) @ v


@pytest.mark.parametrize("bias", [lambda b: b, lambda b: b.float().tanh().exp().lgamma().bfloat16()])
def test_tiles_read_rows_of_a_bias_with_heads_next_to_each_other(bias: Callable[[Tensor], Tensor]) -> None:
    inputs = (
        *[torch.empty(4, 8, 1024, 64, dtype=torch.bfloat16)] * 3,
        torch.empty(4, 1024, 1024, 8, dtype=torch.bfloat16),
    )
    export = fusion.export_kernels(scores(bias), *inputs, target="triton", arch="sm_90")
    (attention,) = [kernel.source for kernel in export.kernels if "tl.dot" in kernel.source]
    assert "[4, 8, 1024, 1024]" in attention or "[4, 1024, 1024, 8]" in attention
    assert "strides [8388608, 8192, 8, 1]" not in attention


def test_the_values_of_a_copied_bias() -> None:
    inputs = *[torch.randn(Q) for _ in range(3)], torch.randn(2, 300, 300, 4)
    program = scores(lambda b: b)
    options = fusion.Options(target="triton", strict=True, graph_cache=False)
    backend = fusion.Backend(options, None, Overrides(evaluated=True))
    with torch.no_grad():
        result = torch.compile(program, backend=backend)(*inputs)
    assert_as_eager(result, program(*inputs), program(*[x.double() for x in inputs]))
    names = [kernel.name for report in backend.reports for kernel in report.kernels]
    assert any("_ordered" in name for name in names), names


def test_equal_maps_of_two_devices_stay() -> None:
    program = lowered(lambda x, y: x / y.sin() + y.sin(), torch.empty(64), torch.empty(64))
    first, second = [node.out for node in program.nodes if isinstance(node, Map) and "sin" in node.out]
    assert merge_equal_maps(program) is not program
    moved = program.edited(buffers=[replace(program.buffers[second], device=torch.device("meta"))])
    assert merge_equal_maps(moved) is moved and first != second


def test_a_tensor_that_changes_in_between_is_read_twice() -> None:
    def changed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = (x.sin() @ y).exp()
        x.add_(1)
        return before, (x.sin() @ y).exp()

    x, y = torch.randn(64, 64), torch.randn(64, 64)
    expected = changed(x.clone(), y)
    for ours, theirs in zip(fusion.fuse(changed)(x.clone(), y), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4)


def test_library_alternatives_read_what_is_stored() -> None:
    def spread(g: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spread = g.expand(16, 32, 8, 8).double().sin().exp().to(g.dtype)
        return spread.permute(0, 2, 3, 1).reshape(-1, 32) @ w, spread.sum((2, 3)), spread.amax((0, 2, 3))

    inputs = torch.randn(16, 32, 1, 1), torch.randn(32, 48)
    options = fusion.Options(target="triton", strict=True, graph_cache=False)
    backend = fusion.Backend(options, None, Overrides(evaluated=True, products=LIBRARY))
    with torch.no_grad():
        results = torch.compile(spread, backend=backend)(*inputs)
    for result, eager, exact in zip(results, spread(*inputs), spread(*[x.double() for x in inputs]), strict=True):
        assert_as_eager(result, eager, exact)
    (report,) = backend.reports
    assert report.externs and any("[16, 32, 1, 1] written" in kernel.source for kernel in report.kernels), report
