"""Masks in memory get bounds: exact numbers, bounds that hold, and one fold of a mask for all of its readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from torch import Tensor

from fusion.codegen.target import Capabilities
from fusion.codegen.tuning.inputs import open_bounds
from fusion.inspect.examples import TARGET, lowered
from fusion.lowering.errors import VerifyError
from fusion.lowering.interpret import run_kernel, run_program
from fusion.lowering.ir.expr import IndexValue, Load, Op, make_op, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, KernelAxis, Loop, Param, Role, Store
from fusion.lowering.ir.program import Map, Program, Reduce
from fusion.lowering.verify import verify_program
from fusion.schedule.chained import chain_products, mask_bounds
from tests.fusion.masks import added, masks
from tests.fusion.schedule.test_pack import kernel
from tests.fusion.schedule.test_quantised import calls

KINDS = tuple(masks(8))
INFINITE = float("-inf")


@pytest.fixture(autouse=True)
def _bounds_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_bounds, "_SHARE", float("inf"))


def capabilities() -> Capabilities:
    return replace(TARGET.capabilities, bounds=True)


def bounded(program: Program) -> Program:
    chained, chains = chain_products(program, capabilities())
    assert chains, "the scores are computed block by block"
    changed, _ = mask_bounds.bound_masks(chained, capabilities(), chains)
    verify_program(changed)
    return changed


def conditions(program: Program) -> list[Op]:
    exprs = (expr for node in program.nodes if isinstance(node, (Map, Reduce)) for expr in node.exprs)
    return [part for part in postorder(*exprs) if isinstance(part, Op) and part.name == "bounded"]


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~mask, INFINITE).softmax(-1) @ v


def drawn(rows: int, columns: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(6, n, 4, generator=generator) for n in (rows, columns, columns))


@pytest.mark.parametrize("shape", [(200, 221), (192, 256)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_and_change_no_number(kind: str, shape: tuple[int, int]) -> None:
    """The evaluator refuses a condition that does not keep its bounds."""
    inputs, mask = drawn(*shape), masks(*shape)[kind]
    program = lowered(attended, *inputs, mask)
    changed = bounded(program)
    assert conditions(changed)
    (before,), (after,) = run_program(program, [*inputs, mask]), run_program(changed, [*inputs, mask])
    assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@pytest.mark.parametrize("hidden", [INFINITE, torch.finfo(torch.float32).min], ids=["infinity", "least"])
@pytest.mark.parametrize("biased", [False, True], ids=["zeros", "slopes"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_added(kind: str, biased: bool, hidden: float) -> None:
    """Rows of which every number is the least one are as they were: a softmax of equal numbers."""
    inputs, mask = drawn(200, 221), added(masks(200, 221)[kind], torch.float32, hidden, biased=biased)

    def with_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    program = lowered(with_added, *inputs, mask)
    changed = bounded(program)
    assert conditions(changed)
    (before,), (after,) = run_program(program, [*inputs, mask]), run_program(changed, [*inputs, mask])
    assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


def test_nan_is_added() -> None:
    inputs, mask = drawn(200, 221), added(masks(200, 221)["causal"], torch.float32, INFINITE)
    mask[30, 150], mask[40, 20], mask[50, 60] = torch.nan, torch.inf, -3e38

    def with_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT + mask).softmax(-1) @ v

    program = lowered(with_added, *inputs, mask)
    (before,), (after,) = run_program(program, [*inputs, mask]), run_program(bounded(program), [*inputs, mask])
    assert bool(before[:, 30].isnan().all()) and torch.equal(before.isnan(), after.isnan())
    assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_added_to_rows_along_memory(kind: str) -> None:
    inputs, mask = drawn(221, 200), added(masks(200, 221)[kind], torch.float32, INFINITE)

    def turned(k: Tensor, q: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return (k @ q.mT + mask.mT).exp() @ g

    program = lowered(turned, *inputs, mask)
    changed = bounded(program)
    assert conditions(changed) and any("turned" in name for name in changed.buffers)
    (before,), (after,) = run_program(program, [*inputs, mask]), run_program(changed, [*inputs, mask])
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_lie_along_memory(kind: str) -> None:
    """As for the gradient of keys, whose rows are the columns of the mask."""
    inputs, mask = drawn(221, 200), masks(200, 221)[kind]

    def turned(k: Tensor, q: Tensor, g: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask.mT, k @ q.mT, INFINITE).exp() @ g

    program = lowered(turned, *inputs, mask)
    changed = bounded(program)
    assert conditions(changed) and any("turned" in name for name in changed.buffers)
    (before,), (after,) = run_program(program, [*inputs, mask]), run_program(changed, [*inputs, mask])
    assert torch.equal(before, after)


def test_bounds_are_those_of_the_mask() -> None:
    rows, columns = 192, 256
    inputs, mask = drawn(rows, columns), masks(rows, columns)["window"]
    program = bounded(lowered(attended, *inputs, mask))
    folds = [node for node in program.nodes if "group" in getattr(node, "out", "")]
    shown = replace(program, outputs=tuple(type(program.outputs[0])(node.out) for node in folds))
    first, end, whole_first, whole_end = run_program(shown, [*inputs, mask])
    for group in range(rows // 64):
        seen = mask[64 * group : 64 * group + 64]
        any_row, every_row = seen.any(0).nonzero().flatten(), seen.all(0).nonzero().flatten()
        assert (int(first[group]), int(end[group])) == (int(any_row[0]), int(any_row[-1]) + 1)
        assert range(int(whole_first[group]), int(whole_end[group])) == range(
            int(every_row[0]) if len(every_row) else 0, int(every_row[-1]) + 1 if len(every_row) else 0
        )


def test_one_fold_for_all_layers() -> None:
    def layers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attended(q, k, v, mask) + attended(k, v, q, mask)

    inputs, mask = drawn(221, 221), masks(221)["documents"]
    program = lowered(layers, *inputs, mask)
    changed = bounded(program)
    assert len(changed.nodes) == len(chain_products(program, capabilities())[0].nodes) + 7
    (before,), (after,) = run_program(program, [*inputs, mask]), run_program(changed, [*inputs, mask])
    assert torch.equal(before, after)


def refused(function: Callable[..., Tensor], mask: Tensor) -> None:
    inputs = drawn(221, 221)
    program, chains = chain_products(lowered(function, *inputs, mask), capabilities())
    assert chains and mask_bounds.bound_masks(program, capabilities(), chains)[0] is program


def test_a_mask_without_which_points_count_gets_no_bounds() -> None:
    refused(lambda q, k, v, mask: (q @ k.mT).masked_fill(mask, 1.0).softmax(-1) @ v, masks(221)["causal"])


def test_vectors_are_looked_up_and_indices_need_no_folds() -> None:
    causal = masks(221)["causal"]
    refused(lambda q, k, v, mask: attended(q, k, v, mask[:1]), causal)
    refused(lambda q, k, v, mask: attended(q, k, v, torch.ones(221, 221, dtype=torch.bool).tril()), causal)


def test_bounds_that_would_take_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_bounds, "_SHARE", 1e-9)
    refused(attended, masks(221)["causal"])


def test_targets_that_test_each_block_need_none() -> None:
    inputs = drawn(221, 221)
    others = replace(capabilities(), bounds=False)
    program, chains = chain_products(lowered(attended, *inputs, masks(221)["causal"]), others)
    assert chains and mask_bounds.bound_masks(program, others, chains)[0] is program


def test_made_inputs_keep_the_bounds_of_a_kernel() -> None:
    """A kernel that is timed or checked alone gets bounds that hold for any mask."""
    heads, mask = torch.empty(2, 16, 1024, 64, dtype=torch.bfloat16), torch.ones(1024, 1024, dtype=torch.bool)
    kernels = [kernel(call) for call in calls(attended, heads, heads + 0, heads + 0, mask)]
    bounds = [open_bounds(each, {}) for each in kernels]
    assert [sorted(numbers.values()) for numbers in bounds if numbers] == [[0, 0, 1024, 1024]]


def test_the_evaluator_refuses_a_kernel_whose_bounds_do_not_hold() -> None:
    row, column = sympy.Symbol("i0", integer=True), sympy.Symbol("r0", integer=True)
    end = Load("end", (row,), torch.int32)
    within = make_op("lt", IndexValue(column, torch.int32), end)
    shown = make_op("bounded", Load("mask", (4 * row + column,), torch.bool), within, within)
    total = Fold("total", "sum", (Load("x", (4 * row + column,), torch.float32),), (column,), torch.float32)
    four, two = sympy.Integer(4), sympy.Integer(2)
    sums = Kernel(
        "sums",
        (
            Param("mask", torch.bool, (two, four), (four, sympy.Integer(1)), written=False),
            Param("end", torch.int32, (two,), (sympy.Integer(1),), written=False),
            Param("x", torch.float32, (two, four), (four, sympy.Integer(1)), written=False),
            Param("out", torch.float32, (two,), (sympy.Integer(1),), written=True),
        ),
        (),
        (KernelAxis(row, two, Role.GRID), KernelAxis(column, four, Role.LOOP)),
        (Loop((column,), (total,), shown), Store("out", row, total.ref)),
    )
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    x, out = torch.ones(2, 4), torch.empty(2)
    run_kernel(sums, [mask, torch.tensor([2, 1], dtype=torch.int32), x, out])
    with pytest.raises(VerifyError, match="bounds"):
        run_kernel(sums, [mask, torch.tensor([2, 2], dtype=torch.int32), x, out])
