"""Chains that loop over each other's rows become one loop nest on targets that can keep the results of all rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import fusion
from fusion.codegen.triton import TritonTarget
from fusion.inspect.report import KernelReport
from fusion.lowering.ir.kernel import Fold, Role, outer_axes, statements
from tests.fusion.agreement import error
from tests.fusion.attentions import ATTENTIONS


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads, which the tests of one process share."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.125).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return (q @ k.mT * 0.125).masked_fill(~seen, float("-inf")).softmax(-1) @ v


def both_sides(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the rows and over the columns of a matrix that is no attention's."""
    tile = torch.tanh(x @ y.mT)
    return tile @ columns, tile.mT @ rows


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n, shape in enumerate(shapes)]


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    result = function(*leaves)
    weights = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).view(result.shape).to(result.dtype)
    result.backward(weights)
    return [x.grad for x in leaves if x.grad is not None]


def run(
    function: Callable[..., Tensor], inputs: list[Tensor], *, dynamic: bool = False, numerics: str = "default"
) -> tuple[list[Tensor], list[KernelReport]]:
    """Return the gradients of a program on CPUs, and the kernels that compute them from products of tiles."""
    backend = fusion.Backend(fusion.Options(target="c", strict=True, numerics=numerics))
    results = gradients(torch.compile(function, backend=backend, dynamic=dynamic), inputs)
    return results, multiplying(backend.reports[-1].kernels)


def multiplying(kernels: tuple[KernelReport, ...]) -> list[KernelReport]:
    return [kernel for kernel in kernels if products(kernel)]


def products(report: KernelReport) -> list[int]:
    """Return the number of products of each kernel of a launch."""
    assert report.kernel is not None
    folds = (list(statements(part.body, Fold)) for part in report.kernel.launched)
    counts = [sum(fold.op == "dot" for fold in part) for part in folds]
    return [count for count in counts if count]


def assert_near(function: Callable[..., Tensor], inputs: list[Tensor], got: list[Tensor]) -> None:
    eager, exact = (gradients(function, x) for x in (inputs, [x.double() for x in inputs]))
    for mine, theirs, true in zip(got, eager, exact, strict=True):
        assert error(mine, true) <= 2 * error(theirs, true) + 1e-6 * float(true.abs().max())


# Decisions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [attended, causal])
def test_scores_are_computed_once_for_all_gradients(function, threads) -> None:
    threads(2)
    inputs = drawn(*[(1, 4, 413, 40)] * 3)
    got, (nest,) = run(function, inputs)
    assert products(nest) == [5]
    (kernel,) = (part for part in nest.kernel.launched if outer_axes(part))
    assert len(kernel.with_role(Role.GRID)) == 1  # heads
    body = nest.source[nest.source.rindex("\nint ") :]
    assert body.count("exp_float(") == 1
    assert body.count("+= dot") == 1  # of one gradient all rows are kept, of the others those of a block
    assert_near(function, inputs, got)


def test_few_heads_leave_no_thread_idle(threads) -> None:
    """Two kernels of all rows and all columns take 7 products, but on each thread."""
    threads(4)
    inputs = drawn(*[(1, 2, 800, 32)] * 3)
    got, kernels = run(causal, inputs)
    assert sorted(count for kernel in kernels for count in products(kernel)) == [3, 4]
    assert_near(causal, inputs, got)


def test_the_order_of_additions_may_not_depend_on_blocks(threads) -> None:
    threads(1)
    _, kernels = run(attended, drawn(*[(1, 2, 500, 32)] * 3), numerics="batch_invariant")
    assert not any(outer_axes(part) for kernel in kernels for part in kernel.kernel.launched)


def test_targets_without_memory_for_all_rows_keep_two_kernels() -> None:
    assert TritonTarget("sm_90").capabilities.outer_block == 0


@pytest.mark.parametrize(("rows", "columns"), [(413, 700), (1200, 333)])
def test_any_two_sums_of_a_matrix_of_tiles(rows: int, columns: int, threads) -> None:
    threads(1)
    inputs = drawn((3, rows, 8), (3, columns, 8), (3, rows, 20), (3, columns, 24))
    explanation = fusion.explain(both_sides, options={"target": "c", "strict": True})(*inputs)
    (nest,) = multiplying(explanation.kernels)
    assert products(nest) == [3]  # the matrix, and a sum of either side
    got = fusion.fuse(both_sides, options={"target": "c", "strict": True})(*inputs)
    for mine, theirs, true in zip(got, both_sides(*inputs), both_sides(*(x.double() for x in inputs)), strict=True):
        assert error(mine, true) <= 2 * error(theirs, true)


def test_a_running_value_crosses_no_loop(threads) -> None:
    """Sums of the columns of scores beside a softmax of their rows, whose sums are rescaled from block to block."""
    threads(1)

    def mixed(x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        scores = x @ y.mT
        return scores.softmax(-1) @ columns, torch.tanh(scores).mT @ rows

    inputs = drawn((3, 500, 8), (3, 400, 8), (3, 500, 20), (3, 400, 24))
    explanation = fusion.explain(mixed, options={"target": "c", "strict": True})(*inputs)
    assert not any(outer_axes(part) for kernel in explanation.kernels for part in kernel.kernel.launched)
    got = fusion.fuse(mixed, options={"target": "c", "strict": True})(*inputs)
    for mine, theirs, true in zip(got, mixed(*inputs), mixed(*(x.double() for x in inputs)), strict=True):
        assert error(mine, true) <= 2 * error(theirs, true) + 1e-6 * float(true.abs().max())


def test_sums_that_need_each_other_are_two_kernels(threads) -> None:
    """The second sum reads a matrix that the first one determines."""
    threads(1)

    def chained(x: Tensor, y: Tensor, columns: Tensor) -> Tensor:
        tile = torch.tanh(x @ y.mT)
        return tile.mT @ torch.cumsum(tile @ columns, -2)

    inputs = drawn((3, 500, 8), (3, 400, 8), (3, 400, 24))
    explanation = fusion.explain(chained, options={"target": "c", "strict": True})(*inputs)
    assert not any(outer_axes(part) for kernel in explanation.kernels for part in kernel.kernel.launched)
    got = fusion.fuse(chained, options={"target": "c", "strict": True})(*inputs)
    assert error(got, chained(*(x.double() for x in inputs))) <= 2e-4 * float(got.abs().max())


def test_a_product_beside_another_in_a_softmax_is_stored() -> None:
    """Keys of all blocks and of the own block share a softmax: over both, each product would be read past its end."""

    def both(q: Tensor, k: Tensor, common: Tensor) -> Tensor:
        near = torch.einsum("bnqf,bnkf->bnqk", q, k)
        far = torch.einsum("bnqf,bkf->bnqk", q, common)
        return torch.cat([far, near], -1).softmax(-1).square().sum(-1)

    inputs = drawn((4, 4, 512, 16), (4, 4, 512, 16), (4, 128, 16))
    got = fusion.fuse(both, options={"target": "c", "strict": True})(*inputs)
    assert error(got, both(*(x.double() for x in inputs))) <= 1e-5 * float(got.abs().max())


# Numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["causal", "boolean", "grouped", "sliding window"])
def test_narrow_gradients_are_summed_in_float32(name: str, dtype: torch.dtype, threads) -> None:
    threads(2)
    case = next(case for case in ATTENTIONS if case.name == name)
    inputs = case.inputs(dtype)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return case.function(q, k, v, *inputs[3:])

    got, kernels = run(function, list(inputs[:3]))
    assert [products(kernel) for kernel in kernels] == [[5]]
    assert_near(function, list(inputs[:3]), got)


def test_symbolic_lengths(threads) -> None:
    threads(2)
    backend = fusion.Backend(fusion.Options(target="c", strict=True))
    compiled = torch.compile(causal, backend=backend, dynamic=True)
    for queries, keys in ((413, 300), (77, 1000), (600, 5)):
        inputs = drawn((2, 3, queries, 32), (2, 3, keys, 32), (2, 3, keys, 32))
        assert_near(causal, inputs, gradients(compiled, inputs))
    assert len(backend.reports) == 2
    assert [products(kernel) for kernel in multiplying(backend.reports[-1].kernels)] == [[5]]
