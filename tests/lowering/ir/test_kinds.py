"""Every function over a union of types handles all of them: an unknown one raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import pytest
import torch

from fusion.lowering.ir.expr import ConcreteExpr, Const, Expr, index_of
from fusion.lowering.ir.kernel import values_of
from fusion.lowering.ir.program import Axis, Program, reads, with_exprs, writes
from fusion.lowering.ir.scalar_ops import (
    EXTREMES,
    FOLD_OPS,
    SCALAR_OPS,
    SCAN_OPS,
    FoldName,
    JoinName,
    ScalarName,
    ScanName,
    ScatterName,
)
from fusion.lowering.printer import format_program
from fusion.lowering.verify import verify_program

ONE = Const(1.0, torch.float32)


@dataclass(frozen=True, slots=True)
class Novel:
    """A node, or a statement, of a kind that nothing knows."""

    out: str = "y"
    axes: tuple[Axis, ...] = ()
    over: tuple[Axis, ...] = ()
    exprs: tuple[Expr, ...] = (ONE,)
    lhs: Expr = ONE
    rhs: Expr = ONE
    where: Expr | None = None


def test_each_class_of_expressions_is_a_concrete_one() -> None:
    named = {part.strip() for part in ConcreteExpr.split("|")}  # type: ignore[attr-defined]  # an alias is its text
    assert named == {kind.__name__ for kind in Expr.__subclasses__()}


@pytest.mark.parametrize(
    "function",
    [reads, writes, lambda node: with_exprs(node, node.exprs), values_of],
    ids=["reads", "writes", "with_exprs", "values_of"],
)
def test_an_unknown_kind_is_refused(function) -> None:
    with pytest.raises(AssertionError, match="Novel"):
        function(Novel())


def test_an_unknown_node_is_neither_verified_nor_printed() -> None:
    whole = Program((), {}, (Novel(),), ())
    with pytest.raises(AssertionError, match="Novel"):
        verify_program(whole)
    with pytest.raises(AssertionError, match="Novel"):
        format_program(whole)


def test_an_unknown_expression_has_no_index() -> None:
    with pytest.raises(AssertionError, match="Novel"):
        index_of(Novel())


@pytest.mark.parametrize(
    ("names", "table"),
    [(ScalarName, SCALAR_OPS), (FoldName, FOLD_OPS), (ScanName, SCAN_OPS)],
    ids=["op", "fold", "scan"],
)
def test_each_operation_has_its_name(names: object, table: Mapping[str, object]) -> None:
    assert get_args(names) == tuple(table)


def test_joins_are_folds_scans_and_scatters() -> None:
    joins = {*get_args(JoinName)}
    assert joins == {*get_args(ScatterName)} - {"store"}
    assert joins < {*FOLD_OPS} & {*SCAN_OPS} and {*EXTREMES.values()} < joins
    assert {name for name, op in (*FOLD_OPS.items(), *SCAN_OPS.items()) if op.result == "position"} == {*EXTREMES}
