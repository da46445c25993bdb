"""Products with few tiles and a long sum: offered in parts, priced, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion.schedule.library.split_k
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.targets import TARGETS
from fusion.codegen.tuning import Tuning
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.interpret import run_kernel
from fusion.lowering.ir.kernel import Fold, Kernel, Role, folds
from fusion.lowering.ir.program import Contract, Extern, Program
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_kernel
from fusion.schedule import Schedule
from fusion.schedule.clusters.alternatives import Alternative, weighed
from fusion.schedule.clusters.legality import Cluster
from fusion.schedule.kernels import KernelCall
from fusion.schedule.library.split_k import parts_of

pytestmark = pytest.mark.usefixtures("without_disassembly")

Function = Callable[..., torch.Tensor]


def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.t() + b)


def weight_gradient(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return x.t() @ g


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, w) * 2


CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "linear": (linear, ((70, 1024), (90, 1024), (90,))),
    "weight gradient": (weight_gradient, ((2048, 66), (2048, 130))),
    "batched": (batched, ((3, 64, 1024), (3, 1024, 72))),
}


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is offered in two parts, however small."""
    monkeypatch.setattr(fusion.schedule.library.split_k, "parts_of", lambda product, capabilities: 2)


def in_parts(program: Program, cluster: Cluster, kernel: Kernel, ways: object) -> Tuning:
    """A clock by which parts are the fastest."""
    assert isinstance(ways, tuple) and all(isinstance(way, Alternative) for way in ways)
    (number,) = [number for number, way in enumerate(ways) if way.name.endswith("parts")]
    result = weighed(kernel, ways)
    return Tuning(result.subject, result.trials, number)


def scheduled(function: Function, *given: torch.Tensor, target: str = "reference", parts: bool = True) -> Schedule:
    graph = make_fx(function, decomposition_table=decompositions(), tracing_mode="fake")(*given)
    machine = TARGETS[target]("sm_90" if target == "triton" else None)
    measure = in_parts if parts else None
    return schedule_graph(graph, machine, Trace(None, "forward"), measure=measure)[1]


def run(result: Schedule, given: list[torch.Tensor]) -> torch.Tensor:
    """Evaluate the kernels of a schedule."""
    buffers = dict(zip(result.program.inputs, given, strict=True))
    for step in result.steps:
        assert isinstance(step, KernelCall)
        for name in step.written:
            buffer = result.program.buffers[name]
            shape, strides = [int(size) for size in buffer.shape], [int(stride) for stride in buffer.strides]
            buffers[name] = torch.empty_strided(shape, strides, dtype=buffer.dtype)
        run_kernel(step.kernel, [buffers[name] for name in step.buffers])
        buffers |= {name: buffers[operand] for name, operand in step.over.items()}
    (out,) = result.program.output_names()
    return buffers[out]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_parts_give_the_same(name: str, dtype: torch.dtype, halved: None) -> None:
    function, shapes = CASES[name]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    actual = scheduled(function, *given)
    exact, eager = function(*(tensor.double() for tensor in given)), function(*given)
    error, theirs = ((result.double() - exact).norm() / exact.norm() for result in (run(actual, given), eager))
    assert error <= 2 * theirs + 1e-6


@pytest.mark.parametrize("name", CASES)
def test_parts_are_one_more_axis_and_the_epilogue_follows_their_sum(
    name: str, halved: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, shapes = CASES[name]
    given = [torch.randn(shape).half() for shape in shapes]
    monkeypatch.setattr(ReferenceTarget, "can_reduce_in_last_block", lambda self, kernel, axis: False)
    first, second = scheduled(function, *given).steps
    assert isinstance(first, KernelCall) and isinstance(second, KernelCall)
    (dot,) = folds(first.kernel).values()
    (total,) = folds(second.kernel).values()
    assert isinstance(dot, Fold) and dot.op == "dot" and isinstance(total, Fold) and total.op == "sum"
    assert len(first.kernel.with_role(Role.GRID)) == (4 if name == "batched" else 3)
    assert first.kernel.params[-1].dtype is torch.float32  # partial sums are not rounded
    assert second.kernel.params[-1].dtype is torch.float16


@pytest.mark.parametrize("name", CASES)
def test_parts_are_summed_in_the_launch_that_computes_them(name: str, halved: None) -> None:
    """They are summed tile by tile; of several products whose tiles are apart, in another launch."""
    function, shapes = CASES[name]
    first, *others = scheduled(function, *(torch.randn(shape).half() for shape in shapes)).steps
    assert isinstance(first, KernelCall) and len(others) == (name == "batched")
    if not others:
        last = first.kernel.then
        assert last is not None and not folds(last) and len(first.kernel.awaited) == 1
        assert set(last.axes) | set(first.kernel.awaited) == set(first.kernel.with_role(Role.GRID))
        dtypes = [param.dtype for param in first.kernel.params if param.written]
        assert dtypes == [torch.float32, torch.float16]  # partial sums are not rounded


def test_the_library_and_one_kernel_stay_candidates() -> None:
    given = [torch.randn(shape) for shape in ((128, 4096), (128, 4096), (128,))]
    (choice,) = scheduled(linear, *given, parts=False).choices
    assert [trial.name for trial in choice.trials] == ["one kernel", "in 8 parts", "the library"]
    assert all(trial.predicted > 0 for trial in choice.trials)


def test_parts_are_cheaper_where_a_single_kernel_leaves_the_device_idle() -> None:
    given = [torch.empty(shape) for shape in ((128, 32768), (128, 32768), (128,))]
    (choice,) = scheduled(linear, *given, target="triton", parts=False).choices
    whole, parts, _ = choice.trials
    assert parts.name.endswith("parts") and parts.predicted < whole.predicted / 2


@pytest.mark.parametrize(
    ("shapes", "count"),
    [
        (((512, 16384), (512, 16384)), 4),  # 16 tiles of 64 that fit
        (((1024, 1024), (1024, 1024)), 1),  # every processor has a tile
        (((128, 960), (128, 960)), 1),  # too short
        (((128, 4095), (128, 4095)), 1),  # no part ends with a block
        (((8, 16384), (512, 16384)), 16),  # a few rows: two tiles of 64 to a processor
    ],
    ids=str,
)
def test_into_how_many(shapes: tuple[tuple[int, int], tuple[int, int]], count: int) -> None:
    x, w = (torch.empty(shape) for shape in shapes)
    graph = make_fx(lambda x, w: x @ w.t(), tracing_mode="fake")(x, w)
    (product,) = [node for node in lower(graph).nodes if isinstance(node, Contract)]
    assert parts_of(product, ReferenceTarget().capabilities) == count


def test_kernels_of_parts_compile_ahead_of_time() -> None:
    pytest.importorskip("triton")
    target = TARGETS["triton"]("sm_90")
    for dtype in (torch.float32, torch.bfloat16):
        given = [torch.empty(shape, dtype=dtype) for shape in ((256, 8192), (256, 8192), (256,))]
        result = scheduled(linear, *given, target="triton")
        kernels = [step.kernel for step in result.steps if isinstance(step, KernelCall)]
        assert len(kernels) == 2 and not any(isinstance(step, Extern) and not step.is_view for step in result.steps)
        for kernel in kernels:
            assert dict(target.stages(kernel, target.emit(kernel)))["cubin"]


def test_few_rows_take_one_launch_on_a_gpu() -> None:
    """Their tiles are small, and go through pointers: the last program of each adds up its parts in no time."""
    pytest.importorskip("triton")
    target = TARGETS["triton"]("sm_90")
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 8192), (512, 8192), (512,))]
    result = scheduled(linear, *given, target="triton")
    (kernel,) = [step.kernel for step in result.steps if isinstance(step, KernelCall)]
    verify_kernel(kernel)
    source = target.emit(kernel)
    assert kernel.awaited and "tl.atomic_add(counter + block, 1" in source
    assert dict(target.stages(kernel, source))["cubin"]
