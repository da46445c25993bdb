"""Contractions that share an operand: which of them become one kernel, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.triton import TritonTarget
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import schedule_graph
from fusion.compilation.scheduling import plan
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.interpret import run_kernel, run_program
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, statements
from fusion.lowering.ir.program import Axis, Buffer, BufferRef, Extern, Map, Program
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_kernel
from fusion.runner.contexts import Scheduling
from fusion.runtime import Boxed
from fusion.schedule import Schedule, grow
from fusion.schedule.iteration.contractions import divided
from fusion.schedule.kernels import KernelCall
from fusion.schedule.library.copies import merge_copies
from fusion.schedule.rewrites.inline import inline_cheap_maps
from tests.fusion.capabilities import of_everything

Function = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
BF16 = torch.bfloat16


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def gated_and_kept(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The forward of training, with the values that backward needs."""
    first, second = F.linear(x, gate), F.linear(x, up)
    return first, second, F.silu(first) * second


def side_by_side(x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.linear(x, keys), torch.relu(F.linear(x, values))


def one_matrix(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The right operand is shared."""
    return a @ weight - torch.tanh(b @ weight)


def batched(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (x @ a) * (x @ b)


def from_either_side(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The shared operand is the left one of one product and the right one of the other."""
    return F.linear(x, a), b @ x.T


SHARED: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "gated": (gated, ((20, 35), (45, 35), (45, 35))),
    "gated, three dimensions": (gated, ((2, 10, 35), (45, 35), (45, 35))),
    "gated and kept": (gated_and_kept, ((20, 35), (45, 35), (45, 35))),
    "gated vector": (gated, ((1, 35), (45, 35), (45, 35))),
    "gated, few rows": (gated, ((3, 64), (45, 64), (45, 64))),
    "side by side": (side_by_side, ((20, 35), (45, 35), (45, 35))),
    "one matrix": (one_matrix, ((35, 45), (20, 35), (20, 35))),
    "batched": (batched, ((3, 20, 35), (3, 35, 45), (3, 35, 45))),
    "from either side": (from_either_side, ((20, 35), (45, 35), (45, 35))),
}


def random_tensors(shapes: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Random tensors; every second one is not contiguous, as a weight that is stored transposed."""
    tensors = [torch.randn(*shape).to(dtype) for shape in shapes]
    return [t.mT.contiguous().mT if number % 2 else t for number, t in enumerate(tensors)]


def grown(function: Function, given: Sequence[torch.Tensor]) -> Schedule:
    """Return the schedule of a program in which no product is left to the library."""
    graph = make_fx(function, tracing_mode="fake", decomposition_table=decompositions())(*given)
    program = inline_cheap_maps(lower(graph))
    return plan(program, grow(program, TritonTarget("sm_90").capabilities), Scheduling(None))


def kernels(schedule: Schedule) -> list[Kernel]:
    results = [step.kernel for step in schedule.steps if isinstance(step, KernelCall)]
    for kernel in results:
        verify_kernel(kernel)
    return results


def only_kernel(function: Function, given: Sequence[torch.Tensor]) -> Kernel:
    schedule = grown(function, given)
    (kernel,) = kernels(schedule)
    assert len(schedule.steps) == 1
    return kernel


def scheduled(function: Function, *shapes: tuple[int, ...]) -> Schedule:
    """Return the schedule for an H200, of bfloat16 tensors that are never allocated."""
    target = TritonTarget("sm_90")
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=BF16) for shape in shapes]
        graph = make_fx(function, decomposition_table=decompositions())(*given)
    return schedule_graph(graph, target, Trace(None, "forward"))[1]


def launches(schedule: Schedule) -> list[KernelCall | Extern]:
    return [step for step in schedule.steps if isinstance(step, KernelCall) or not step.is_view]


def dots(kernel: Kernel) -> list[Fold]:
    return [stmt for stmt in statements(kernel.body) if isinstance(stmt, Fold) and stmt.op == "dot"]


def error(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))


def listed(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


def outputs(kernel: Kernel) -> list[torch.Tensor]:
    """Return empty tensors for a kernel's results."""
    return [
        torch.empty_strided([int(n) for n in p.shape], [int(n) for n in p.strides], dtype=p.dtype).fill_(float("nan"))
        for p in kernel.params
        if p.written
    ]


# One kernel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHARED)
def test_products_of_one_operand_are_one_loop(name: str) -> None:
    function, shapes = SHARED[name]
    kernel = only_kernel(function, random_tensors(shapes))
    (loop,) = [stmt for stmt in kernel.body if isinstance(stmt, Loop)]
    first, second = dots(kernel)
    assert set(loop.body) == {first, second}
    assert len(set(first.args) & set(second.args)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_scheduled_programs_agree_with_eager(name: str, dtype: torch.dtype) -> None:
    function, shapes = SHARED[name]
    given = random_tensors(shapes, dtype)
    kernel = only_kernel(function, given)
    outs = outputs(kernel)
    run_kernel(kernel, [*ordered(kernel, given), *outs])
    want = listed(function(*(tensor.double() for tensor in given)))
    assert error(outs, want) <= 2 * error(listed(function(*given)), want) + 1e-7


def ordered(kernel: Kernel, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in the order of the parameters; tensors of equal layout keep their order."""
    left = list(given)
    results = []
    for param in kernel.params:
        if not param.written:
            layout = (tuple(map(int, param.shape)), tuple(map(int, param.strides)))
            position = next(k for k, t in enumerate(left) if (tuple(t.shape), t.stride()) == layout)
            results.append(left.pop(position))
    return results


def meeting(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of scores: their two products share no operand, but are multiplied."""
    weights = torch.tanh(q @ k)
    return weights, weights * (g @ v)


def apart(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.tanh(q @ k), torch.tanh(g @ v)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_products_that_meet_are_one_loop(dtype: torch.dtype) -> None:
    given = random_tensors([(90, 7), (7, 85), (90, 7), (7, 85)], dtype)
    kernel = only_kernel(meeting, given)
    first, second = dots(kernel)
    assert not set(first.args) & set(second.args)
    outs = outputs(kernel)
    run_kernel(kernel, [*ordered(kernel, given), *outs])
    want = meeting(*(tensor.double() for tensor in given))
    eager = meeting(*given)
    for got in outs:  # the results have one layout
        excess = (error([got], [true]) - 2 * error([mine], [true]) for mine, true in zip(eager, want, strict=True))
        assert min(excess) < 1e-7


@pytest.mark.parametrize("length", [64, 512])
def test_products_that_meet_share_no_loop_if_their_operands_are_larger(length: int) -> None:
    """Their results would take less memory than the operands that a shared loop has in flight."""
    counts = [len(dots(kernel)) for kernel in kernels(grown(meeting, random_tensors([(64, length), (length, 64)] * 2)))]
    assert counts == [1, 1]


def test_products_without_a_common_reader_share_no_loop() -> None:
    given = random_tensors([(90, 7), (7, 85), (90, 7), (7, 85)])
    assert [len(dots(kernel)) for kernel in kernels(grown(apart, given))] == [1, 1]


@pytest.mark.parametrize("tokens", [1, 512, 4096])
def test_gated_mlp_is_two_launches(tokens: int) -> None:
    def mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return F.linear(gated(x, gate, up), down)

    first, _ = launches(scheduled(mlp, (tokens, 2048), (5632, 2048), (5632, 2048), (2048, 5632)))
    assert isinstance(first, KernelCall)
    assert len(dots(first.kernel)) == 2


def test_every_product_is_left_to_the_library_where_none_gains() -> None:
    """Large ones in one launch gain less than the library is faster."""

    def f(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.T @ a, x.T @ b

    result = launches(scheduled(f, *[(4096, 4096)] * 3))
    assert [isinstance(step, Extern) for step in result] == [True, True]


def gradient_of_gelu(dy: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gradient: torch.Tensor = torch.ops.aten.gelu_backward(dy @ w, x)
    return gradient


def test_the_epilogue_of_a_product_through_pointers_is_priced() -> None:
    """As measured on an H200: 326 µs in one kernel, 206 after a product of the library."""
    product, rest = launches(scheduled(gradient_of_gelu, (200704, 96), (96, 384), (200704, 384)))
    assert isinstance(product, Extern) and isinstance(rest, KernelCall)


def test_groups_in_turn_hide_the_gradient_of_a_function() -> None:
    (step,) = launches(scheduled(gradient_of_gelu, (3136, 768), (768, 3072), (3136, 3072)))
    assert isinstance(step, KernelCall) and len(dots(step.kernel)) == 1


def heads_together(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradient of a linear layer whose result had its heads moved before positions."""
    gradient = torch.tanh(g)
    whole = gradient.transpose(1, 2).reshape(x.shape)
    return whole @ w, whole.T @ x


def test_copies_for_the_library_are_fused_with_their_source_once() -> None:
    """They are maps, fused with their source: two calls of `clone` took longer than the products."""
    shapes = (1, 12, 256, 64), (256, 768), (768, 768)
    schedule = scheduled(heads_together, *shapes)
    result, *products = launches(schedule)
    assert isinstance(result, KernelCall) and len(result.written) == 1
    assert [step.target for step in products if isinstance(step, Extern)] == [torch.ops.aten.mm.default] * 2
    given = [torch.randn(shape).to(BF16) for shape in shapes]
    got = run_program(schedule.program, given)
    want = heads_together(*(tensor.double() for tensor in given))
    assert error(got, want) <= 2 * error(heads_together(*given), want)


def test_equal_copies_with_a_write_between_them_stay() -> None:
    x = Buffer("x", BF16, (sympy.Integer(4),), (sympy.Integer(1),), torch.device("cpu"))
    i = axis_symbol(0)
    copies = [Map(name, (Axis(i, sympy.Integer(4)),), Load("x", (i,), BF16)) for name in ("a", "b")]
    reader = Extern(("y",), torch.ops.aten.add.Tensor, (BufferRef("a"), BufferRef("b")))
    write = Extern((None,), torch.ops.aten.zero_.default, (BufferRef("x"),), impure=True)
    buffers = {name: replace(x, name=name) for name in ("x", "a", "b", "y")}
    once = Program(("x",), buffers, (*copies, reader), (BufferRef("y"),))
    merged = merge_copies(once, {"a", "b"}).nodes
    assert merged == (copies[0], replace(reader, args=(BufferRef("a"), BufferRef("a"))))
    changed = replace(once, nodes=(copies[0], write, copies[1], reader))
    assert merge_copies(changed, {"a", "b"}) is changed
    assert merge_copies(once, ()) is once


# No kernel of their own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rows", "length", "columns", "generated"),
    [
        *((torch.float32, n, k, n, True) for n, k in ((5, 10), (16, 16), (64, 64))),
        *((BF16, n, k, n, True) for n, k in ((5, 10), (64, 64))),
        (torch.float32, 128, 512, 128, False),  # few tiles of a long sum, which the library cuts
        (BF16, 16, 4096, 16, False),
    ],
)
def test_products_shorter_than_a_library_call_are_generated(
    dtype: torch.dtype, rows: int, length: int, columns: int, generated: bool
) -> None:
    """Measured on an H200: cuBLAS's shortest time is more than a kernel's."""
    with FakeTensorMode():
        given = torch.empty(rows, length, dtype=dtype), torch.empty(length, columns, dtype=dtype)
        graph = make_fx(torch.matmul)(*given)
    target = TritonTarget("sm_90")
    launched = launches(schedule_graph(graph, target, Trace(None, "forward"))[1])
    assert [isinstance(step, KernelCall) for step in launched] == [generated]


@pytest.mark.parametrize(("rows", "generated"), [(27, True), (128, False)])
def test_small_matrices_of_a_batch_are_generated(rows: int, generated: bool) -> None:
    """The library computes a whole tile for each; rows of 27 numbers are misaligned besides."""
    with FakeTensorMode():
        vectors = torch.empty(4096, rows, 64, dtype=BF16)
        graph = make_fx(lambda x: x @ x.transpose(1, 2))(vectors)
    launched = launches(schedule_graph(graph, TritonTarget("sm_90"), Trace(None, "forward"))[1])
    assert [isinstance(step, KernelCall) for step in launched] == [generated]


def other_width(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return F.linear(x, a), F.linear(x, b)


def other_axis(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ a, x.T @ b


def one_after_the_other(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ a) @ b


def feeding_through_a_map(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of both products reads the first one, and so does the operand of the second."""
    first = x @ a
    return first + (torch.relu(first) * b) @ a


def nothing_shared(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (x @ a) * ((x + 1.0) @ b)


SQUARE = ((32, 32), (32, 32), (32, 32))
REFUSED: dict[str, tuple[Function, tuple[tuple[int, ...], ...], str]] = {
    "other width": (other_width, ((32, 32), (48, 32), (64, 32)), ""),
    "other axis": (other_axis, SQUARE, ""),
    "one after the other": (one_after_the_other, SQUARE, ""),
    "feeding through a map": (feeding_through_a_map, SQUARE, ""),
    "nothing shared": (nothing_shared, SQUARE, "two contractions that share no operand"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_products_that_cannot_share_a_loop_do_not(name: str) -> None:
    function, shapes, reason = REFUSED[name]
    schedule = grown(function, random_tensors(shapes))
    results = [len(dots(kernel)) for kernel in kernels(schedule)]
    assert (max(results), sum(results)) == (1, 2)
    assert not reason or any(reason in refusal.reason for refusal in schedule.refusals)


def test_a_loop_takes_no_more_products_than_registers_hold() -> None:
    def many(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(F.linear(x, weight) for weight in weights)

    with FakeTensorMode():
        given = [torch.empty(shape, dtype=BF16) for shape in [(4096, 1024), *[(1024, 1024)] * 12]]
    counts = [len(dots(kernel)) for kernel in kernels(grown(many, given))]
    assert sum(counts) == 12 and 2 <= max(counts) <= 4
    four, eight, sixteen = (divided(count, ReferenceTarget().capabilities.tiles) for count in (4, 8, 16))
    assert sixteen > eight > four


def mixed(x: torch.Tensor, first: torch.Tensor, bias: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return x + F.linear(F.gelu(F.linear(x.transpose(1, 2), first, bias)), second).transpose(1, 2)


def forward_of(function: Function, *shapes: tuple[int, ...]) -> Schedule:
    """Return the schedule of its forward; backward recomputes results that are larger than their operands."""
    target, result = TritonTarget("sm_90"), list[Schedule]()

    def compile_one(graph: GraphModule, label: str) -> Boxed:
        result.append(schedule_graph(graph, target, Trace(None, label))[1])
        return lambda inputs: graph(*inputs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        given = [torch.empty(shape, dtype=BF16, requires_grad=True) for shape in shapes]
        torch.compile(function, backend=aot_backend(compile_one, of_everything))(*given)
    return result[0]


def test_a_function_of_a_product_is_computed_where_the_product_is() -> None:
    """As an operand of the next product it would be computed for each block of its columns, and loaded by pointers."""
    products = forward_of(mixed, (64, 196, 768), (384, 196), (384,), (196, 384)).launches()
    first, second = (call.kernel for call in products if dots(call.kernel))
    assert [len(dots(kernel)) for kernel in (first, second)] == [1, 1]
    assert [param.dtype for param in first.params if param.written] == [BF16]  # rounded, as it is multiplied
    assert all(isinstance(factor, Load) for kernel in (first, second) for factor in dots(kernel)[0].args)
