"""Scatters with many sources, forward and as gradients of reads: on each target they are generated, and right."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch

from fusion import fuse, report
from fusion.codegen.targets import TARGETS
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.ir.kernel import Kernel, Store, statements
from fusion.lowering.ir.program import Extern
from fusion.runtime import Boxed
from fusion.schedule.kernels import KernelCall
from tests.fusion.capabilities import of_everything
from tests.fusion.schedule.scatters import EXTREMES, FOLDED, GRADIENTS, STORED, SUMS, Function, arguments, inputs
from tests.fusion.schedule.test_quantised import calls

pytestmark = pytest.mark.usefixtures("without_disassembly")

FORWARD = {"sums": SUMS, "folded": FOLDED, "extremes": EXTREMES, "stored": STORED}


def together(functions: Mapping[str, Function], names: list[str]) -> Function:
    """Return one function of all inputs with the results of each of `functions`."""

    def call(*tensors: torch.Tensor) -> list[object]:
        given = dict(zip(names, tensors, strict=True))
        return [function(*arguments(function, given)) for function in functions.values()]

    return call


def precise(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


def flat(result: object) -> torch.Tensor:
    parts = result if isinstance(result, tuple) else (result,)
    return torch.cat([part.detach().flatten() for part in parts])


def assert_as_near(name: str, got: object, eager: object, want: object) -> None:
    """No further from the values in float64 than twice eager's error; integers are equal."""
    assert [part.dtype for part in [got] if isinstance(part, torch.Tensor)] == [
        part.dtype for part in [eager] if isinstance(part, torch.Tensor)
    ]
    mine, theirs, exact = flat(got), flat(eager), flat(want)
    if not exact.is_floating_point():
        assert torch.equal(mine, theirs), name
        return
    error, allowed = (float((each.double() - exact).abs().max()) for each in (mine, theirs))
    assert error <= 2 * allowed + 1e-4, f"{name}: {error}, eager {allowed}"


def assert_generated(fused: object) -> None:
    """All calls but views are kernels."""
    graphs = report(fused).graphs
    assert graphs and not [call for graph in graphs for call in graph.externs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("group", FORWARD)
def test_colliding_sources(group, dtype):
    agrees(group, dtype, "c")


@pytest.mark.parametrize("group", ["sums", "folded"])
def test_colliding_sources_as_on_a_gpu(group):
    """The evaluator updates elements from any program."""
    agrees(group, torch.float32, "reference")


def agrees(group: str, dtype: torch.dtype, target: str) -> None:
    given = inputs(dtype)
    functions = {name: f for name, f in FORWARD[group].items() if dtype.is_floating_point or "mean" not in name}
    call = together(functions, list(given))
    fused = fuse(call, options={"target": target, "strict": True})
    tensors = list(given.values())
    results = fused(*tensors), call(*tensors), call(*precise(tensors))
    for name, got, eager, want in zip(functions, *results, strict=True):
        assert_as_near(name, got, eager, want)
    assert_generated(fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, dtype):
    function, given = GRADIENTS[name], inputs(dtype)
    fused = fuse(together({name: function}, list(given)), options={"target": "c", "strict": True})

    def gradient(call, tensors):
        x = tensors[0].clone().requires_grad_()
        (result,) = call(x, *tensors[1:])
        weights = torch.linspace(-1, 2, result.numel(), dtype=result.dtype).view(result.shape)
        return torch.autograd.grad((result * weights).sum(), x)[0]

    tensors, plain = list(given.values()), together({name: function}, list(given))
    results = gradient(fused, tensors), gradient(plain, tensors), gradient(plain, precise(tensors))
    assert_as_near(name, *results)
    assert_generated(fused)


# What becomes of the nodes --------------------------------------------------------------------------------------------


def scheduled(function: Function, *tensors: torch.Tensor, target: str = "triton") -> list[KernelCall | Extern]:
    """Return the steps of a training step, without views."""
    backend = TARGETS[target]("sm_90") if target == "triton" else TARGETS[target]()
    results: list[KernelCall | Extern] = []

    def compile_one(graph: torch.fx.GraphModule, label: str) -> Boxed:
        _, schedule = schedule_graph(graph, backend, Trace(None, label))
        results.extend(step for step in schedule.steps if isinstance(step, KernelCall) or not step.is_view)

        def run(args: list[object]) -> tuple[object, ...]:
            given = tuple(args)
            args.clear()
            return graph(*given)

        return run

    torch._dynamo.reset()
    result = torch.compile(function, backend=aot_backend(compile_one, of_everything))(*tensors)
    if result.requires_grad:
        result.sum().backward()
    return results


def updates(kernel: Kernel) -> list[Store]:
    """The stores of a kernel at which sources may collide."""
    return [stmt for stmt in statements(kernel.body) if isinstance(stmt, Store) and stmt.axes is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_compile_to_machine_code(dtype):
    """Sums, extremes and gradients on sm_90, each with the operation of the device."""
    given, target = inputs(dtype), TARGETS["triton"]("sm_90")
    functions = [SUMS["of_row_sums"], FOLDED["amax"], FOLDED["amin"], FOLDED["mean_alone"], STORED["index_put"]]
    result: dict[Kernel, None] = {}
    for function in functions:
        steps = scheduled(function, *arguments(function, given))
        result.update(dict.fromkeys(step.kernel for step in steps if isinstance(step, KernelCall)))
    text = ""
    for kernel in (kernel for kernel in result if updates(kernel)):
        text += str(dict(target.stages(kernel, target.emit(kernel)))["ptx"])
    for operation in ("add.f32", "max.s32", "min.u32", "max.u32", "min.s32", "add.u32"):
        assert f".relaxed.{operation}" in text


def embedded(weight: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(rows, weight) * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_that_feed_a_scatter_share_its_kernel(dtype):
    """Three kernels: zeros; the gradient with its scatter, summed in float32; the rounding."""
    weight = torch.randn(5000, 256, dtype=dtype, requires_grad=True)
    given = (weight, torch.randint(0, 5000, (4, 600)), torch.randn(4, 600, 1, dtype=dtype))
    _, *backward = scheduled(embedded, *given)
    kernels = [step.kernel for step in backward if isinstance(step, KernelCall)]
    assert len(kernels) == len(backward) == (2 if dtype is torch.float32 else 3)
    (store,) = updates(kernels[1])
    assert (store.op, store.value.dtype) == ("sum", torch.float32)
    assert backward[1].over and not backward[1].written, "it takes the memory that was filled before it"


def test_sources_are_spread_over_programs_or_looped_over():
    """A GPU updates elements from any program, a CPU loops over colliding sources in order."""
    given = (torch.randn(5000, 256), torch.randint(0, 5000, (600,)), torch.randn(600, 256))
    for target, roles in (("triton", {"grid"}), ("c", {"grid", "loop"})):
        steps = scheduled(lambda x, i, s: x.index_add(0, i, s * 2), *given, target=target)
        kernel = next(step.kernel for step in steps if updates(step.kernel))
        assert {axis.role.value for axis in kernel.axes} == roles


@pytest.mark.parametrize("target", ["triton", "c"])
def test_no_order_is_left_to_chance_where_that_is_asked_for(target):
    given = (torch.randn(5000, 256), torch.randint(0, 5000, (600,)), torch.randn(600, 256))
    torch.use_deterministic_algorithms(True)
    try:
        steps = scheduled(lambda x, i, s: x.index_add(0, i, s * 2), *given, target=target)
        largest = scheduled(lambda x, i, s: x.index_reduce(0, i, s, "amax"), *given, target=target)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(isinstance(step, Extern) for step in steps) == (target == "triton")
    assert not any(isinstance(step, Extern) for step in largest)


def test_the_order_on_a_cpu_is_always_the_same():
    given = list(inputs().values())
    fused = fuse(together(SUMS, list(inputs())), options={"target": "c", "strict": True})
    first = [flat(result) for result in fused(*given)]
    assert all(torch.equal(a, flat(b)) for a, b in zip(first, fused(*given), strict=True))


# In whose memory ------------------------------------------------------------------------------------------------------


def put_into(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    cache[:, at] = new * 2
    return cache.sum(-1)


def copied_into(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, at, new)
    return cache.sum(-1)


def moved_within(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The written values are read from the memory they are written to."""
    cache[:, at] = cache[:, at.flip(0)] + new
    return cache.sum(-1)


def seen_before(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The old values are needed once more."""
    old = cache.sum(-1)
    cache[:, at] = new
    return old


def given_back(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    cache[:, at] = new
    return cache[:, 3:]


def put_into_slice(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    cache[:, 3:43] = new * 2
    return cache.sum(-1)


def put_into_every_third(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    cache[:, 2:122:3] = new.exp()
    return cache.sum(-1)


def put_at(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    cache[:, 7] = new[:, 1] + 1
    return cache.sum(-1)


def returned(cache: torch.Tensor, at: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return cache.index_add_(1, at, new)


IN_PLACE = (put_into, copied_into, put_into_slice, put_into_every_third, put_at, returned)
CACHED = {f.__name__: f for f in (*IN_PLACE, moved_within, seen_before, given_back)}


def cached() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 500, 16), torch.randperm(500)[:40], torch.randn(4, 40, 16)


@pytest.mark.parametrize("target", ["c", "reference"])
@pytest.mark.parametrize("name", CACHED)
def test_tensors_of_the_caller_are_updated(name, target):
    fused = fuse(CACHED[name], options={"target": target, "strict": True})
    for _ in range(2):
        mine = cached()
        yours = tuple(tensor.clone() for tensor in mine)
        torch.testing.assert_close(fused(*mine), CACHED[name](*yours))
        torch.testing.assert_close(mine[0], yours[0])


@pytest.mark.parametrize("function", IN_PLACE, ids=lambda function: function.__name__)
def test_a_cache_is_updated_in_place(function):
    """Only new elements are written; nothing is copied."""
    steps = scheduled(function, *cached())
    first, *others = [step for step in steps if isinstance(step, KernelCall)]
    assert updates(first.kernel) and not first.written and len(first.over) == 1
    assert not any(isinstance(step, Extern) for step in steps) and len(others) <= 1


def test_sums_one_after_the_other_go_to_one_tensor():
    """There is no copy and no rounding in between: zeros, all sums, the result in bfloat16."""

    def mixed(x, rows, others, new):
        out = torch.zeros_like(x)
        out.index_add_(0, rows, new)
        out.index_add_(0, others, new * 2)
        return out

    given = (torch.randn(5000, 256), torch.randint(0, 5000, (600,)), torch.randint(0, 5000, (600,)))
    given = (given[0].bfloat16(), *given[1:], torch.randn(600, 256).bfloat16())
    steps = scheduled(mixed, *given)
    assert [len(updates(step.kernel)) for step in steps if isinstance(step, KernelCall)] == [0, 2, 0]
    fused = fuse(mixed, options={"target": "c", "strict": True})
    assert_as_near("mixed", fused(*given), mixed(*given), mixed(*precise(list(given))))


def test_a_sum_that_is_wanted_by_itself_stays():
    def both(x, rows, source):
        first, second = (x.new_zeros(1031, 37).index_add(0, rows, part) for part in (source, source.sin()))
        return (first + second) * first, (first + second + first).sin(), second + second

    given = inputs()
    tensors = [given["x"], given["rows"], given["source"]]
    for function in (both, lambda *args: [each.sin() for each in both(*args)[:1]]):
        fused = fuse(function, options={"target": "c", "strict": True})
        results = fused(*tensors), function(*tensors), function(*precise(tensors))
        assert_as_near("both", *map(tuple, results))


def test_sums_that_are_added_up_are_one():
    """The four neighbours of a pixel: eager has a tensor and a kernel for each."""
    x = torch.randn(2, 3, 40, 50, requires_grad=True)
    _, *backward = scheduled(lambda x: torch.nn.functional.interpolate(x, size=(80, 90), mode="bilinear"), x)
    assert [len(updates(step.kernel)) for step in backward if isinstance(step, KernelCall)] == [0, 4]


def positions(rows: torch.Tensor) -> torch.Tensor:
    """The gradient of an embedding of positions."""
    total = rows.sum(0, keepdim=True)
    return torch.ops.aten.embedding_dense_backward(total, torch.arange(2000)[None], 2000, -1, False)


def shifted_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_zeros(2020, 8).index_put(
        (torch.arange(11, 2011)[:, None], torch.arange(8)), rows[0], accumulate=True
    )


def written_rows(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_full((2003, 8), 3.0).index_put((torch.arange(3, 2003)[:, None], torch.arange(8)), rows[1])


@pytest.mark.parametrize("function", [positions, shifted_rows, written_rows], ids=lambda function: function.__name__)
def test_sources_with_an_element_each_are_a_map(function):
    rows = torch.randn(3, 2000, 8)
    steps = [step for step in scheduled(function, rows) if isinstance(step, KernelCall)]
    assert len(steps) == 1 and not updates(steps[0].kernel)
    got = fuse(function, options={"target": "c", "strict": True})(rows)
    assert_as_near(function.__name__, got, function(rows), function(rows.double()))


def test_other_sources_stay_scattered():
    """Each source has an element of its own here, too, but most elements have no source."""

    def diagonal(rows: torch.Tensor) -> torch.Tensor:
        places = torch.arange(200)
        return rows.new_zeros(200, 200).index_put((places, places), rows[:, 0], accumulate=True)

    rows = torch.randn(200, 8)
    assert any(updates(step.kernel) for step in scheduled(diagonal, rows) if isinstance(step, KernelCall))
    got = fuse(diagonal, options={"target": "c", "strict": True})(rows)
    assert_as_near("diagonal", got, diagonal(rows), diagonal(rows.double()))


def counted(bins: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return weights.new_zeros(300).index_add(0, bins, weights)


def test_many_sources_of_few_elements_update_copies_of_these():
    """Where updates are atomic, so that those of one element wait for each other; not where they are in order."""
    given = torch.randint(0, 300, (1 << 17,)), torch.ones(1 << 17)
    _, parts, folded = (step.kernel for step in calls(counted, *given) if isinstance(step, KernelCall))
    (update,) = updates(parts)
    assert parts.param(update.param).shape == (300, 8) and not updates(folded)
    fused = fuse(counted, options={"target": "c", "strict": True})
    torch.testing.assert_close(fused(*given), counted(*given))
    assert not any("part" in kernel.name for kernel in report(fused).kernels)


def counted_by_heads(bins: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A table of positions, each with a number for every head: the gradient of a bias of relative positions."""
    return weights.new_zeros(32, 12).index_add(0, bins, weights.T)


def test_elements_whose_sources_are_neighbours_along_another_axis_have_copies():
    given = torch.randint(0, 32, (1 << 14,)), torch.randn(12, 1 << 14)
    kernels = [step.kernel for step in calls(counted_by_heads, *given) if isinstance(step, KernelCall)]
    (update,) = (update for kernel in kernels for update in updates(kernel))
    shapes = [kernel.param(update.param).shape for kernel in kernels if updates(kernel)]
    assert shapes == [(32, 12, 16)]


def added_rows(bins: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return weights.new_zeros(300, 64).index_add(0, bins, weights[:, None].expand(-1, 64))


@pytest.mark.parametrize(
    ("function", "count"), [(added_rows, 1 << 17), (counted, 1 << 14)], ids=["rows", "few sources"]
)
def test_other_elements_have_no_copies(function, count):
    """Rows are updated together; and few sources seldom collide."""
    given = torch.randint(0, 300, (count,)), torch.empty(count)
    assert len([step for step in calls(function, *given) if isinstance(step, KernelCall)]) == 2


def test_rows_at_loaded_indices_are_read_along_their_columns():
    """Columns are contiguous: a loop down a column would fetch a cache line for each number."""

    def add(out: torch.Tensor, bag: torch.Tensor, row: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return out.index_add(0, bag, table[row])

    fused = fuse(add)
    given = torch.zeros(4000, 64), torch.arange(512) * 7, torch.arange(512) % 100, torch.randn(100, 64)
    torch.testing.assert_close(fused(*given), add(*given))
    update = report(fused).kernels[-1].source
    *_, looped, innermost = re.findall(r"for \(int64_t (\w+)", update)
    assert (looped, innermost) == ("r0", "i0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_sums_at_computed_positions(dtype):
    """GCC 12 must not clear the sums by a call: each of several positions would get the total of one."""

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = x.new_ones(x.shape[0])
        sums = torch.zeros_like(ones).index_add(0, torch.arange(x.shape[0]) % (x.shape[0] // 2), ones)
        return sums @ sums, sums[-1]

    for count in (4, 6, 8, 12, 16):
        given = torch.empty(count, dtype=dtype)
        assert fuse(counted, options={"strict": True}, dynamic=False)(given) == counted(given), count
