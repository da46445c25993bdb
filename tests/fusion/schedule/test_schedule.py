"""Scheduling: which nodes become one kernel, refusals with reasons, and determinism."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
import torch.nn.functional as F  # the name everyone knows it by
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.codegen.price import Rates
from fusion.codegen.reference import ReferenceTarget
from fusion.codegen.target import Capabilities
from fusion.compilation.scheduling import plan
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.expr import loads
from fusion.lowering.ir.kernel import Loop, Role, Store, statements, values_of
from fusion.lowering.ir.program import Extern, writes
from fusion.lowering.ir.scalar_ops import FOLD_OPS
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_kernel, verify_program
from fusion.runner.contexts import Scheduling
from fusion.schedule import Schedule, grow
from fusion.schedule.kernels import KernelCall
from fusion.schedule.library.choice import prefer_library
from fusion.schedule.reductions.split import split_reductions
from fusion.schedule.rewrites.inline import inline_cheap_maps

GPU = Capabilities(
    fold_ops=frozenset(FOLD_OPS),
    whole_limit=16384,
    parallelism=132,
    tiles=ReferenceTarget().capabilities.tiles,
    rates=Rates(launch_us=4.0, bandwidth=4.3e6, flops=6e7, matrix_flops=7e8),
)
"""A machine with matrix units, to schedule for without having it."""


def schedule(function: Callable[..., object], *inputs: torch.Tensor, capabilities: Capabilities = GPU) -> Schedule:
    graph = make_fx(function, tracing_mode="fake", decomposition_table=decompositions())(*inputs)
    program = split_reductions(inline_cheap_maps(lower(graph)), capabilities)
    verify_program(program)
    clustering = grow(program, capabilities)
    left, _ = prefer_library(program, clustering, ReferenceTarget())
    result = plan(left, clustering if left is program else grow(left, capabilities), Scheduling(None))
    for call in kernels(result):
        verify_kernel(call.kernel)
    return result


def kernels(result: Schedule) -> list[KernelCall]:
    return [step for step in result.steps if isinstance(step, KernelCall)]


def test_matmul_takes_its_epilogue_and_keeps_plain_indices() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).view(4, 16, 128) + r

    scheduled = schedule(f, torch.randn(64, 32), torch.randn(32, 128), torch.randn(4, 16, 128))
    (call,) = kernels(scheduled)
    assert len(scheduled.steps) == 1
    store = next(s for s in statements(call.kernel.body) if isinstance(s, Store))
    assert isinstance(store.offset, sympy.Expr) and not store.offset.has(FloorDiv, Mod)


def test_lone_matmul_is_left_to_the_library() -> None:
    scheduled = schedule(lambda x, w: x @ w, torch.randn(64, 32), torch.randn(32, 128))
    (step,) = scheduled.steps
    assert isinstance(step, Extern) and step.target is torch.ops.aten.mm.default


def test_a_result_that_a_call_reads_is_what_later_kernels_read() -> None:
    """Recomputed from its operand, a rectified sum would be stored twice: with and without negative elements."""

    def block(x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x + x.sin())
        return torch.relu(x + torch.linalg.inv(x).sin())

    scheduled = schedule(block, torch.randn(64, 32, 32))
    first, last = kernels(scheduled)
    assert len(first.written) == 1 and set(first.written) < set(last.buffers)


def test_a_cast_of_an_input_is_recomputed_after_a_call_that_reads_it() -> None:
    """The input has half as many bytes."""

    def f(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide + torch.linalg.inv(wide).sin()

    scheduled = schedule(f, torch.randn(64, 32, 32, dtype=torch.bfloat16))
    first, last = kernels(scheduled)
    assert set(first.buffers) - set(first.written) == set(last.buffers) & set(scheduled.program.inputs)


def test_a_row_longer_than_the_limit_is_looped_over() -> None:
    scheduled = schedule(lambda x: F.softmax(x, -1), torch.randn(200, 20_000))
    (call,) = kernels(scheduled)
    assert call.kernel.with_role(Role.LOOP)
    assert sum(isinstance(s, Loop) for s in call.kernel.body) == 2  # maximum and sum, result


def test_interleaved_clusters_do_not_depend_on_each_other() -> None:
    """The rows need the count, the total needs the rows; count and total read the same weights, but cannot be one."""

    def both(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        top = x.exp().sum(-1)
        count = (weight * 2).sum()
        total = (top * weight).sum()
        result = total / count
        return result, x * torch.tanh(1.0 / count) / top[:, None]

    scheduled = schedule(both, torch.randn(5000, 300), torch.randn(5000))
    results: set[str] = {str(name) for name in scheduled.program.inputs}
    for call in kernels(scheduled):
        assert {name for name in call.buffers if name not in call.written} <= results | set(call.written)
        results.update(call.written)


@pytest.mark.parametrize("turned", [False, True])
def test_parts_are_pieces_of_memory(turned: bool) -> None:
    """Rows are cut, though columns are more; of a turned matrix its second axis."""
    few = replace(GPU, parallelism=2)
    scheduled = schedule(lambda x: (x.t() if turned else x).sum(), torch.randn(1001, 1003), capabilities=few)
    first = kernels(scheduled)[0].kernel
    (load,) = (load for stmt in statements(first.body) for value in values_of(stmt) for load in loads(value))
    sizes = first.axis_sizes()
    assert isinstance(load.index[0], sympy.Expr)
    (looped,) = (symbol for symbol in load.index[0].free_symbols if load.index[0].coeff(symbol) == 1)
    assert sizes[looped] % 1003 == 0


def test_few_rows_are_reduced_in_two_stages_in_one_launch() -> None:
    scheduled = schedule(lambda x: x.sum(), torch.randn(1024, 1024))
    (call,) = kernels(scheduled)
    assert call.kernel.then is not None
    assert int(sympy.Mul(*(a.size for a in call.kernel.with_role(Role.GRID)))) >= GPU.parallelism


def test_column_sum_keeps_columns_parallel() -> None:
    (call,) = kernels(schedule(lambda x: x.sum(0), torch.randn(64, 8192)))
    assert [int(a.size) for a in call.kernel.with_role(Role.GRID)] == [8192]


def test_loss_over_rows_is_one_launch() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y)

    scheduled = schedule(f, torch.randn(64, 1000), torch.randint(0, 1000, (64,)))
    assert len(kernels(scheduled)) == len(scheduled.steps) == 1


@pytest.mark.parametrize("saved", [False, True])
def test_a_reader_of_one_position_keeps_no_earlier_layer_alive(saved: bool) -> None:
    """Every sum of a residual stream is stored for the next layer, so that no reader has to recompute it."""

    def f(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        sums = []
        for weight in weights:
            x = x + torch.tanh(x) @ weight
            sums.append(x)
        return [F.layer_norm(x, (64,))[:, 0].sin(), *(sums if saved else ())]

    scheduled = schedule(f, torch.randn(8, 256, 64), *(torch.randn(64, 64) for _ in range(5)))
    last = kernels(scheduled)[-1]
    products = {name for name in last.buffers if name in scheduled.program.buffers} - set(scheduled.program.inputs)
    assert len(products - set(last.written)) <= 4  # the last product, the sum before it, and statistics of a row


def test_a_product_that_is_finished_and_stored_is_not_stored_before_that_too() -> None:
    """A loss of classes over logits that have another reader stores them once."""

    def f(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.addmm(b, x, w)
        return logits, logits.gather(1, labels[:, None]).float()

    classes, half = 1000, torch.bfloat16
    given = torch.randn(512, 256, dtype=half), torch.randn(256, classes, dtype=half), torch.randn(classes, dtype=half)
    scheduled = schedule(f, *given, torch.randint(classes, (512,)))
    results = [
        name for step in scheduled.steps for name in (writes(step) if isinstance(step, Extern) else step.written)
    ]
    assert [name for name in results if scheduled.program.buffers[name].numel == 512 * classes] == ["addmm_1"]


def test_copies_that_are_results_follow_the_last_reader_of_their_source() -> None:
    """If they ran at the end, where the graph has them, all their sources would stay alive until then."""

    def f(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for weight in weights:
            results.append((x @ weight).sort()[0])
            x = results[-1].sort(0)[0] @ weight.t()
        return [x, *(each.view(-1, 16, 32).transpose(0, 1).clone() for each in results)]

    scheduled = schedule(f, torch.randn(4096, 64), *(torch.randn(64, 2048) for _ in range(4)))
    copies = [
        k for k, step in enumerate(scheduled.steps) if isinstance(step, KernelCall) and "clone" in step.kernel.name
    ]
    assert len(copies) == 4
    sorts = [k for k, step in enumerate(scheduled.steps) if isinstance(step, Extern) and "sort" in step.name]
    assert all(copy < later for copy, later in zip(copies, sorts[2::2], strict=False))


def test_siblings_that_read_the_same_tensor_share_a_kernel() -> None:
    (call,) = kernels(schedule(lambda x: (x.sum(-1), (x * x).sum(-1)), torch.randn(64, 100)))
    assert len(call.written) == 2


def test_independent_small_nodes_share_a_launch() -> None:
    def f(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [x.mul(0.9).add(1) for x in tensors]

    scheduled = schedule(f, *(torch.randn(65) for _ in range(6)))
    (call,) = kernels(scheduled)
    assert len(call.written) == 6


def test_independent_large_nodes_keep_their_launches() -> None:
    scheduled = schedule(lambda a, b: (a + 1, b + 1), torch.randn(1 << 24), torch.randn(1 << 24))
    assert len(kernels(scheduled)) == 2


def test_result_in_between_is_not_jumped_over() -> None:
    """a → extern → b: a and b may not be one kernel, since the extern must run in between."""

    def f(x: torch.Tensor) -> torch.Tensor:
        a = x.exp()
        return a.sin() + a.sort(-1)[0]

    scheduled = schedule(f, torch.randn(64, 100))
    names = [getattr(step, "target", None) for step in scheduled.steps]
    assert torch.ops.aten.sort.default in names
    assert len(kernels(scheduled)) == 2


def test_refusal_names_reason_and_cost() -> None:
    scheduled = schedule(lambda x: x.exp().sort(-1)[0] * 2, torch.randn(64, 100))
    reasons = [r for r in scheduled.refusals if "extern" in r.reason]
    assert reasons and all(r.bytes > 0 and r.microseconds > 0 for r in reasons)


def test_same_graph_gives_same_kernels() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (64,)).exp().sum(0) * w

    inputs = torch.randn(32, 64), torch.randn(64)
    assert [c.kernel for c in kernels(schedule(f, *inputs))] == [c.kernel for c in kernels(schedule(f, *inputs))]


def test_equal_layers_are_equal_kernels() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = F.layer_norm(x, (65,)).topk(65)[0]
        return x

    built = [c.kernel for c in kernels(schedule(f, torch.randn(32, 65)))]
    assert len(built) == 3 and len(set(built)) == 1


@pytest.mark.parametrize("length", [300, 900])
def test_long_chains_are_cut_and_fast(length: int) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        for _ in range(length):
            x = torch.sin(x) + x
        return x

    started = time.perf_counter()
    scheduled = schedule(f, torch.randn(8, 8))
    assert len(kernels(scheduled)) <= length // 8
    assert time.perf_counter() - started < 30
