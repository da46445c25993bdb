"""Scans: fusion with other nodes, refusals with reasons, gradients, rows too long to hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import fusion
from fusion.codegen.targets import TARGETS
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Prefix, Role, Store, statements
from fusion.lowering.ir.program import Program
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_program
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall
from fusion.schedule.reductions.scans import split_scans
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.fusion.agreement import assert_as_eager
from tests.fusion.schedule.test_schedule import GPU, schedule

pytestmark = pytest.mark.usefixtures("without_disassembly")


def kernels(result: Schedule) -> list[Kernel]:
    return [step.kernel for step in result.steps if isinstance(step, KernelCall)]


def one(function: Callable[..., object], *shape: int) -> Kernel:
    (kernel,) = kernels(schedule(function, torch.empty(shape)))
    return kernel


# What is one kernel ---------------------------------------------------------------------------------------------------


def test_a_scan_takes_the_maps_around_it() -> None:
    kernel = one(lambda x: x.exp().cumsum(1) * 2, 300, 70)
    assert [type(stmt) for stmt in kernel.body] == [Prefix, Store]
    assert [axis.role for axis in kernel.axes] == [Role.GRID, Role.WHOLE]


def test_a_scan_stands_between_folds_of_its_rows() -> None:
    kernel = one(lambda x: (c := x.softmax(1).cumsum(1)) / c.sum(1, keepdim=True), 300, 70)
    assert [stmt.op for stmt in kernel.body if not isinstance(stmt, Store)] == ["max", "sum", "sum", "sum"]
    assert [type(stmt) for stmt in kernel.body] == [Fold, Fold, Prefix, Fold, Store]


def test_a_long_row_is_scanned_in_every_loop_that_needs_it() -> None:
    kernel = one(lambda x: (c := x.abs().cumsum(1)) / c.sum(1, keepdim=True), 300, 70_001)
    first, second = (stmt for stmt in kernel.body if isinstance(stmt, Loop))
    assert [type(stmt) for stmt in first.body] == [Prefix, Fold]
    assert [type(stmt) for stmt in second.body] == [Prefix, Store]
    assert len({stmt.name for stmt in statements(kernel.body) if isinstance(stmt, Prefix)}) == 2


def test_backward_of_a_sum_is_one_scan_from_the_other_end() -> None:
    kernel = one(lambda g: g.flip(1).cumsum(1).flip(1) * 3, 300, 70)
    assert [type(stmt) for stmt in kernel.body] == [Prefix, Store]


def test_values_and_positions_share_a_kernel() -> None:
    kernel = one(lambda x: x.cummax(1), 300, 70)
    assert sorted(stmt.op for stmt in kernel.body if isinstance(stmt, Prefix)) == ["argmax", "max"]
    source = TARGETS["triton"]("sm_90").emit(kernel)
    assert source.count("tl.associative_scan(") == 1  # the position brings the value along


# What is not ----------------------------------------------------------------------------------------------------------

APART = {
    "other axis": (lambda x: x.cumsum(0).cumsum(1), "a scan would not run along its axis alone"),
    "from the other end": (lambda x: x.cumsum(1).flip(1).cumsum(1), "a scan would not run along its axis alone"),
    "over other axes": (lambda x: x.cumsum(1).sum(), "an axis that the other side spreads over programs"),
    "a part of it": (lambda x: x.cumsum(1)[:, 3:].sum(1), "a scan would not run along its axis alone"),
}


@pytest.mark.parametrize("name", APART)
def test_unfused_scans_report_a_reason(name: str) -> None:
    function, reason = APART[name]
    scheduled = schedule(function, torch.empty(300, 70))
    assert len(kernels(scheduled)) > 1
    assert any(reason in refusal.reason for refusal in scheduled.refusals), [str(r) for r in scheduled.refusals]


# What comes out -------------------------------------------------------------------------------------------------------

TRAINED = {
    "cumsum": lambda x: x.exp().cumsum(1) * 2,
    "cumsum, columns": lambda x: x.sin().cumsum(0),
    "cumprod": lambda x: (x * 0.1 + 1).cumprod(1),
    "cummax": lambda x: x.cummax(1)[0].sin(),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "nucleus": lambda x: x.softmax(-1).cumsum(-1),
    "trapezoids": lambda x: torch.cumulative_trapezoid(x) ** 2,
}


UNROLLED = torch.__version__ < "2.13"
"""Does PyTorch trace the gradient of a `cumprod` as one sum and product for each element?"""


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str) -> None:
    function = TRAINED[name]

    def step(call: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().clone().requires_grad_()
        result = call(x)
        (result * torch.linspace(-1, 1, result.numel(), dtype=x.dtype).view(result.shape)).sum().backward()
        assert x.grad is not None
        return result.detach(), x.grad

    x = torch.randn(5, 37)
    fused = fusion.fuse(function, options={"target": "c", "strict": True})
    assert_as_eager(step(fused, x), step(function, x), step(function, x.double()))
    for graph in fusion.report(fused).graphs:
        left = [extern for extern in graph.externs if not (UNROLLED and extern.name == "aten.stack.default")]
        assert graph.kernels and not left, str(graph)


REPEATED = {
    "rows": lambda x: x[None].expand(32, 3, 6).cumsum(-1) * 2,
    "columns": lambda x: x[..., None].expand(3, 6, 40).cumsum(1) + 1,
    "a fold of it": lambda x: ((c := x[None].expand(32, 3, 6).cumsum(-1)) * 2, c.sum(-1), c.cummax(-1)[0] + 1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_one_scan_is_written_to_many_places(name: str) -> None:
    """The lanes run along an axis that the scanned operand does not have."""
    function, x = REPEATED[name], torch.randn(3, 6)
    fused = fusion.fuse(function, options={"target": "c", "strict": True})
    result, eager, exact = (tree_leaves(call) for call in (fused(x), function(x), function(x.double())))
    assert_as_eager(result, eager, exact)


def test_operands_of_a_scan_are_named_in_folds_of_the_same_loop() -> None:
    """C reads the operand of an extreme twice; it must not be named inside the scan alone."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        both = torch.cat([torch.nn.functional.hardswish(x), y])
        return (both * 0.25 + 1).cumprod(0), both.amin(0), both.amax(0)

    given = torch.randn(2, 1).bfloat16(), torch.randn(2, 1, dtype=torch.float64)
    fused = fusion.fuse(function, options={"target": "c", "strict": True})
    for one, other in zip(fused(*given), function(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("target", ["reference", "c"])
def test_long_rows(target: str) -> None:
    """A row that no program can hold is looped over; a scan that two loops need is computed twice."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        c = x.abs().cumsum(1)
        return c / c.sum(1, keepdim=True), *x.cummax(1)

    x = torch.randn(2, 300_007)
    fused = fusion.fuse(function, options={"target": target, "strict": True})
    assert_as_eager(fused(x), function(x), function(x.double()))


@pytest.mark.parametrize("target", ["reference", "c"])
@pytest.mark.parametrize("dim", [-2, -1])
def test_running_sums_of_products(target: str, dim: int) -> None:
    """A scan needs the product in memory: a kernel that loops over the product's tiles keeps no running sums."""

    def function(x: torch.Tensor, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return (x @ y).masked_fill(hidden, 0).cumsum(dim)

    x, y, hidden = torch.randn(8, 256, 16), torch.randn(8, 16, 256), torch.rand(256, 256) < 0.5
    fused = fusion.fuse(function, options={"target": target, "strict": True})
    assert_as_eager(fused(x, y, hidden), function(x, y, hidden), function(x.double(), y.double(), hidden))


# Few rows -------------------------------------------------------------------------------------------------------------

SPLIT = {
    "cumsum": lambda x: x.exp().cumsum(1) * 2,
    "cumprod": lambda x: (x * 0.01 + 1).cumprod(1),
    "cummax": lambda x: tuple(x.cummax(1)),
    "cummin": lambda x: x.cummin(1)[1],
    "logcumsumexp": lambda x: (x * 9).logcumsumexp(1),
    "flipped": lambda x: x.flip(1).cumsum(1).flip(1),
    "integers": lambda x: (x > 0).cumsum(1),
}


def in_parts(function: Callable[..., object], x: torch.Tensor) -> Program:
    program = inline_cheap_maps(lower(make_fx(function, tracing_mode="fake")(x)))
    split = split_scans(program, GPU)
    verify_program(split)
    assert (split is program) == (not any(name.endswith("_before") for name in split.buffers))
    return split


@pytest.mark.parametrize("name", SPLIT)
def test_few_rows_are_scanned_in_parts(name: str) -> None:
    function = SPLIT[name]
    for x in (torch.randn(2, 1 << 16), torch.randn(1, 3, 1 << 17)[0], torch.randn(1 << 15, 6).t()):
        program = in_parts(function, x)
        assert any(name.endswith("_before") for name in program.buffers)
        actual = run_program(program, [x])
        eager, exact = tree_leaves(function(x)), tree_leaves(function(x.double()))
        assert_as_eager(actual, eager, exact)


@pytest.mark.parametrize("name", ["cumsum", "cummax", "cummin", "logcumsumexp"])
def test_special_values_in_parts(name: str) -> None:
    """NaN from a part on stays; of equal extremes in two parts the later one counts; infinities add up."""
    x = torch.randn(3, 1 << 16).round()
    x[0, 40_000], x[0, 60_000], x[1, 5:60_000:7], x[2, 0] = math.nan, math.nan, math.inf, -math.inf
    x[2, 1:9000] = -math.inf
    function = {**SPLIT, "cumsum": lambda x: x.cumsum(1)}[name]
    actual, eager = run_program(in_parts(function, x), [x]), tree_leaves(function(x))
    for one, other in zip(actual, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_parts_take_three_launches_at_most() -> None:
    """The totals of parts, their scan by the last program of that launch, then the parts with the preceding totals."""
    target = TARGETS["triton"]("sm_90")
    graph = make_fx(SPLIT["cumsum"], tracing_mode="fake")(torch.empty(1, 1 << 22))
    first, second = kernels(schedule_graph(graph, target, Trace(None, "x"))[1])
    assert first.then is not None and first.then.then is None
    assert [type(stmt) for stmt in second.body] == [Prefix, Store]
    for kernel in (first, second):
        assert dict(target.stages(kernel, target.emit(kernel)))["cubin"]


@pytest.mark.parametrize("shape", [(300, 70), (2, 1 << 10), (2, 65_537), (500, 1 << 12), (60, 1 << 13)], ids=str)
def test_scans_that_are_not_split(shape: tuple[int, ...]) -> None:
    """Short rows, many of them, and lengths without a fitting divisor."""
    program = in_parts(lambda x: x.cumsum(1), torch.empty(shape))
    assert len(program.nodes) == 1
