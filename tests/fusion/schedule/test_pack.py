"""Independent kernels in one launch (horizontal fusion): which ones, in which order, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion import fuse, report
from fusion.codegen.build import is_idle
from fusion.codegen.c.target import CTarget
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.target import Capabilities, Target
from fusion.codegen.triton import TritonTarget
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import Extern
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

Function = Callable[..., tuple[torch.Tensor, ...]]
GPU = TritonTarget("sm_90")


def scheduled(function: Function, shapes: Sequence[tuple[int, ...]], target: Target | None = None) -> Schedule:
    """Return the schedule for bfloat16 tensors that are never allocated."""
    target = target or ReferenceTarget()
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
        graph = make_fx(function, decomposition_table=decompositions())(*given)
    return schedule_graph(graph, target, Trace(None, "forward"))[1]


def launches(function: Function, *shapes: tuple[int, ...], target: Target | None = None) -> list[KernelCall | Extern]:
    steps = scheduled(function, shapes, target).steps
    return [step for step in steps if isinstance(step, KernelCall) or not step.is_view]


def kernel(step: KernelCall | Extern) -> Kernel:
    assert isinstance(step, KernelCall)
    return step.kernel


def leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tanh(tensor) * 0.5 + tensor for tensor in tensors)


def norms(*rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(F.softmax(row, -1) for row in rows)


def projections(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


SIZES = ((7,), (3, 50), (1000,), (1, 1), (65, 33), (0, 4), (2, 3, 5))


# What shares a launch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [GPU, CTarget(), ReferenceTarget()], ids=lambda target: target.name)
def test_leaves_of_many_sizes_are_one_launch(target: Target) -> None:
    step, idle = launches(leaves, *SIZES, target=target)
    assert len(kernel(step).parts) == len(SIZES) - 1
    assert kernel(step).name == f"tanh_mul_add_x{len(SIZES) - 1}"
    assert is_idle(kernel(idle))


@pytest.mark.parametrize("shape", [(0, 17), (3, 0), (0, 0)])
def test_rows_without_elements_share_no_launch(shape: tuple[int, int]) -> None:
    def function(x: torch.Tensor, *empty: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sigmoid(), *(y[None].expand(3, *shape).exp() for y in empty), *(y.mT * 2 for y in empty)

    for step in launches(function, (7,), shape, shape, target=GPU):
        assert not kernel(step).beside and (is_idle(kernel(step)) or GPU.emit(kernel(step)))


def test_a_launch_takes_no_more_tensors_than_a_target_allows() -> None:
    class Few(ReferenceTarget):
        @property
        def capabilities(self) -> Capabilities:
            return replace(super().capabilities, max_params=6)

    result = launches(leaves, *((n,) for n in range(10, 20)), target=Few())
    assert [len(kernel(step).params) for step in result] == [6, 6, 6, 2]


def test_projections_of_a_row_with_grouped_heads_are_one_launch() -> None:
    (step,) = launches(projections, (1, 4096), (4096, 4096), (1024, 4096), (1024, 4096), target=GPU)
    assert len(kernel(step).parts) == 2  # keys and values are one loop


def test_kernels_of_other_needs_keep_their_launches() -> None:
    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(a), F.softmax(b, -1), F.softmax(c, -1)

    for widest, count in ((1024, 2), (16384, 3)):  # pointwise, a warp or two per row, sixteen
        result = launches(f, (70,), (40, 700), (40, widest), target=GPU)
        assert len(result) == count


def test_large_kernels_keep_their_launches() -> None:
    assert len(launches(leaves, (1 << 14, 1 << 14), (1 << 14, 1 << 13), target=GPU)) == 2


# The order of launches -----------------------------------------------------------------------------------------------


def test_a_path_keeps_kernels_apart() -> None:
    """Kernels before and after the extern never share a launch; the third one may join either."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.tanh(x)
        return torch.tanh(torch.linalg.qr(first).R), torch.tanh(y[:3])

    steps = launches(f, (5, 9), (4, 7))
    calls = [step for step in steps if isinstance(step, KernelCall)]
    assert sorted(len(call.kernel.parts) for call in calls) == [1, 2]
    assert sum(isinstance(step, Extern) for step in steps) == 1


def test_a_kernel_that_waits_for_a_later_input_is_launched_later() -> None:
    """The free kernel comes first in the program, but may only share a launch after the extern."""

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(x), torch.tanh(torch.linalg.qr(y).R)

    extern, both = launches(f, (5, 9), (4, 7))
    assert isinstance(extern, Extern) and len(kernel(both).parts) == 2


def test_random_numbers_are_drawn_in_order() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(x) * torch.rand(5, 9), torch.tanh(y) * torch.rand(4, 7)

    schedule = scheduled(f, [(5, 9), (4, 7)])
    impure = [step.outs for step in schedule.steps if isinstance(step, Extern) and step.impure]
    assert impure == sorted(impure)


def test_same_graph_gives_the_same_launches() -> None:
    first, second = (launches(leaves, *SIZES) for _ in range(2))
    assert list(map(kernel, first)) == list(map(kernel, second))


# What they give -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["c", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("function", [leaves, norms], ids=lambda function: function.__name__)
def test_values(function: Function, dtype: torch.dtype, target: str) -> None:
    shapes = [shape for shape in SIZES if 0 not in shape or function is leaves]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    given[1] = given[1].T.contiguous().T
    fused = fuse(function, options={"target": target, "strict": True})
    got, eager = fused(*given), function(*given)
    assert len(report(fused).graphs[-1].kernels) < len(given)
    for ours, theirs, exact in zip(got, eager, function(*(tensor.double() for tensor in given)), strict=True):
        assert ours.dtype is theirs.dtype and ours.stride() == theirs.stride()
        if exact.numel():
            allowed = 2 * (theirs.double() - exact).abs().max() + 1e-7
            assert (ours.double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("target", ["c", "reference"])
def test_sizes_that_change(target: str) -> None:
    def both(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.tanh(x) + x, torch.tanh(y) * 2

    fused = fuse(both, dynamic=True, options={"target": target, "strict": True})
    for first, second in ((5, 70), (800, 3)):
        given = torch.randn(first), torch.randn(second, 3)
        for ours, theirs in zip(fused(*given), both(*given), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(report(fused).kernels) == 1


def test_tables_of_zeros_are_filled_when_they_are_needed() -> None:
    """Gradients of embeddings: each is held until it is cast, and so would all be that one kernel fills or adds to."""

    def added_up(*rows: torch.Tensor) -> list[torch.Tensor]:
        tables = [torch.zeros(1 << 17, 64) for _ in rows]  # each is filled, added to and cast: three kernels
        pairs = zip(tables, rows, strict=True)
        return [table.index_add(0, x[:, 0].long(), x.float()).bfloat16() for table, x in pairs]

    held, most = 0, 0
    for step in launches(added_up, *[(512, 64)] * 12, target=GPU):
        assert isinstance(step, KernelCall)
        held += sum(name.startswith("index_add") for name in step.written)
        most = max(most, held)
        held -= sum(name.startswith("_to_copy") for name in step.written)
    assert held == 0 and most <= 4
