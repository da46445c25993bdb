"""Multiplied rows that only the program sees are allocated at aligned addresses."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.codegen.triton import TritonTarget
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.ir.program import BufferRef, Contract, Extern
from fusion.lowering.lower import lower
from fusion.schedule import Schedule
from fusion.schedule.clusters.misaligned_rows import generated_share
from fusion.schedule.kernels import KernelCall
from tests.fusion.agreement import assert_as_eager

ROWS, WORDS, WIDTH = 512, 1001, 256
ALIGNED = 1008


def gradients(scores: torch.Tensor, scale: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A product along the odd axis and one over the other, of a softmax whose rows are too long to be recomputed."""
    g = (torch.softmax(scores.float(), -1) * scale[:, None]).to(scores.dtype)
    return g @ w, g.t() @ x


def inputs(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = ((ROWS, WORDS), (ROWS,), (WORDS, WIDTH), (ROWS, WIDTH))
    return [torch.randn(shape).to(torch.float32 if len(shape) == 1 else dtype) for shape in shapes]


def scheduled(function: object, *given: torch.Tensor) -> Schedule:
    graph = make_fx(function, tracing_mode="fake", decomposition_table=decompositions())(*given)
    target = TritonTarget("sm_90")
    return schedule_graph(graph, target, Trace(None, "graph"))[1]


def strides_of_results(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the strides of the ROWS × WORDS results of kernels."""
    calls = [step for step in schedule.steps if isinstance(step, KernelCall)]
    names = {name for call in calls for name in call.buffers if name.startswith(("_to_copy", "mul", "softmax", "div"))}
    results = (schedule.program.buffers[name] for name in names)
    return [tuple(map(int, buffer.strides)) for buffer in results if buffer.shape == (ROWS, WORDS)]


def test_misaligned_rows_are_padded() -> None:
    schedule = scheduled(gradients, *inputs())
    assert strides_of_results(schedule) == [(ALIGNED, 1)]
    products = [s for s in schedule.steps if isinstance(s, Extern) and "product" in getattr(s.target, "__name__", "")]
    assert all(step.target.__name__ == "aligned_product" for step in products)


def test_a_returned_tensor_keeps_its_strides() -> None:
    def returned(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        g = (torch.softmax(given[0].float(), -1) * given[1][:, None]).to(given[0].dtype)
        return g, g @ given[2]

    schedule = scheduled(returned, *inputs())
    assert sorted(strides_of_results(schedule)) == [(WORDS, 1), (ALIGNED, 1)]
    result, _ = schedule.program.outputs
    assert isinstance(result, BufferRef) and schedule.program.buffers[result.name].strides == (WORDS, 1)


def test_products_of_given_rows_read_a_copy() -> None:
    def given(g: torch.Tensor, w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return g @ w, g.t() @ x

    rows, words, width = 8192, 5001, 768
    inputs = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, words), (words, width), (rows, width))]
    schedule = scheduled(given, *inputs)
    buffers = schedule.program.buffers
    copied = [name for name in buffers if name.endswith("_aligned")]
    assert [tuple(map(int, buffers[name].strides)) for name in copied] == [(5008, 1)]
    copies = [step for step in schedule.steps if isinstance(step, KernelCall) and copied[0] in step.buffers]
    assert copies[0].buffers == ("g_1", *copied)

    narrow = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, words), (words, 16), (rows, 16))]
    assert not any(name.endswith("_aligned") for name in scheduled(given, *narrow).program.buffers)


def test_a_weight_is_copied_for_a_product_that_the_library_needs_a_copy_for() -> None:
    """Rows of transposed matrices are one matrix for a kernel, and none for the library."""

    def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.transpose(1, 2), w)

    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 196, 768), (384, 196))]
    schedule = scheduled(linear, *given)
    buffers = schedule.program.buffers
    assert [(name, tuple(map(int, b.strides))) for name, b in buffers.items() if name.endswith("_aligned")] == [
        ("w_1_aligned", (200, 1))
    ]
    copy, product = (step for step in schedule.steps if isinstance(step, KernelCall))
    assert copy.buffers == ("w_1", "w_1_aligned") and "w_1_aligned" in product.buffers


def test_the_library_is_slower_the_odder_rows_are() -> None:
    """H200, bf16, 8192 × 1024 × n: 30 µs of 1024, 80 of 1020 and 1022, 138 of 1021."""

    def predicted(columns: int) -> float:
        given = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((8192, 1024), (1024, columns))]
        (choice,) = (each for each in scheduled(torch.mm, *given).choices if each.trials)
        return next(trial.microseconds for trial in choice.trials if "library" in trial.name)

    even, four, two, odd = map(predicted, (1024, 1020, 1022, 1021))
    assert four == pytest.approx(two, rel=0.01)
    assert even < four < odd


@pytest.mark.parametrize(
    ("rows", "inner", "columns", "tiles", "rounds"),
    [
        (1000, 1001, 1003, 32, 1),
        (1000, 4001, 1003, 32, 1),
        (8000, 1001, 1003, 252, 2),
        (64, 1001, 1003, 4, 1),
    ],
)
def test_a_generated_product_of_odd_rows_takes_whole_rounds_of_tiles(
    rows: int, inner: int, columns: int, tiles: int, rounds: int
) -> None:
    capabilities = TritonTarget("sm_90").capabilities
    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, inner), (inner, columns))]
    (product,) = lower(make_fx(torch.mm, tracing_mode="fake")(*given)).nodes
    assert isinstance(product, Contract)
    share = generated_share(product, int, capabilities)
    assert share == pytest.approx(capabilities.misaligned_rows.product * tiles / (132 * rounds))
    assert generated_share(product, lambda size: 0, capabilities) > 0, "a symbolic size was 0"


def test_a_small_product_of_odd_rows_reads_copies() -> None:
    """H200, bf16, 1000 × 1001 × 1003: 11 µs with copies, 35 without."""

    def rectified(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w)

    given = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((1000, 1001), (1001, 1003))]
    copies, product = (step for step in scheduled(rectified, *given).steps if isinstance(step, KernelCall))
    assert sorted(copies.buffers) == ["w_1", "w_1_aligned", "x_1", "x_1_aligned"]
    assert {"w_1_aligned", "x_1_aligned"} < set(product.buffers)


def test_even_and_wide_rows_stay() -> None:
    given = inputs()
    even = [given[0][:, :1000].contiguous(), given[1], given[2][:1000], given[3]]
    schedule = scheduled(gradients, *even)
    assert {b.strides[-2] for b in schedule.program.buffers.values() if b.shape == (ROWS, 1000)} == {1000}
    schedule = scheduled(gradients, *inputs(torch.float32))
    steps = {b.strides[-2] for b in schedule.program.buffers.values() if b.shape == (ROWS, WORDS)}
    assert steps and ALIGNED not in steps


def test_other_readers_do_not_use_the_aligned_copy() -> None:
    def given(g: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sort(g * 2, -1).values
        return h, h @ w, h + g

    inputs = [torch.empty((4096, 5001), dtype=torch.bfloat16), torch.empty((5001, 1024), dtype=torch.bfloat16)]
    schedule = scheduled(given, *inputs)
    strides = {name: tuple(map(int, b.strides)) for name, b in schedule.program.buffers.items() if len(b.shape) == 2}
    assert strides[schedule.program.outputs[0].name] == (5001, 1)
    assert strides["sort_aligned"] == (5008, 1)


def test_chained_products_keep_their_cluster_beside_an_aligned_copy() -> None:
    """Clusters that exist before the copy keep their members."""

    def given(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.softmax(q @ k.mT, -1) @ k, g @ w

    shapes = ((2, 1024, 64), (2, 1024, 64), (4096, 5001), (5001, 1024))
    schedule = scheduled(given, *(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes))
    calls = [step.buffers for step in schedule.steps if isinstance(step, KernelCall)]
    assert ("g_1", "g_1_aligned") in calls and any(buffers[:2] == ("q_1", "k_1") for buffers in calls)


def test_numbers() -> None:
    given = inputs()
    fused = fusion.fuse(gradients, options={"target": "reference", "strict": True})
    exact = gradients(*(x.double() for x in given))
    for mine, theirs, true in zip(fused(*given), gradients(*given), exact, strict=True):
        assert_as_eager(mine, theirs, true)
