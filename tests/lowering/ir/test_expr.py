"""Expressions: identity, constants, casts, and traversals of deep and wide ones."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import struct
from collections import Counter

import pytest
import sympy
import torch

from fusion.lowering.indexing import FloorDiv, axis_symbol
from fusion.lowering.ir.expr import (
    Cast,
    Const,
    Expr,
    IndexValue,
    Load,
    Op,
    Random,
    TileRef,
    as_stored,
    const,
    free_axes,
    index_of,
    loads,
    make_cast,
    make_op,
    passed_on,
    postorder,
    rewrite,
)

I0, I1 = axis_symbol(0), axis_symbol(1)
F32 = torch.float32


def x(name: str = "x", *index: sympy.Expr) -> Expr:
    return Load(name, index or (I0,), F32)


def chain(length: int) -> Expr:
    """((x + 0) + 1) + …: an operation deep per step."""
    root = x()
    for k in range(length):
        root = Op("add", (root, Const(float(k), F32)), F32)
    return root


def test_equal_expressions_are_one_object() -> None:
    def build() -> Expr:
        masked = Load("y", (2 * I0 + I1, x()), F32, Op("lt", (IndexValue(I0), IndexValue(I1)), torch.bool))
        return Op("mul", (masked, Random("normal", Load("seed", (), torch.int64), I0)), F32)

    assert build() is build()
    assert IndexValue(I0) is not IndexValue(I0, torch.int32)
    assert TileRef("t", F32) is not TileRef("t", torch.float64)
    assert Cast(x(), torch.float16) is not Cast(x(), torch.float16, implicit=True)


def test_the_identity_of_a_constant_is_its_dtype_and_bits() -> None:
    values = [
        Const(0.0, F32),
        Const(-0.0, F32),
        Const(0, torch.int64),
        Const(False, torch.bool),
        Const(0.0, torch.float64),
    ]
    assert len(set(values)) == len(values)
    assert Const(0.0, F32) is Const(0.0, F32)
    assert struct.pack("<d", Const(-0.0, F32).value) == struct.pack("<d", -0.0)
    assert Const(1.0, F32) is not Const(True, torch.bool)
    assert Const(math.nan, F32) is Const(-math.nan, F32)


def test_nan_is_equal_to_itself() -> None:
    assert Const(float("nan"), F32) is Const(float("nan"), F32)
    assert rewrite([Op("neg", (Const(float("nan"), F32),), F32)], lambda e: None)[0] is Op(
        "neg", (Const(float("nan"), F32),), F32
    )


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [(2.7, torch.int64, 2), (-1, torch.bool, True), (3, F32, 3.0), (float("inf"), F32, float("inf"))],
)
def test_const_takes_the_type_of_its_dtype(value: float, dtype: torch.dtype, expected: float) -> None:
    actual = const(value, dtype).value
    assert actual == expected
    assert type(actual) is type(expected)


@pytest.mark.parametrize(
    "source", [torch.float64, F32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
)
@pytest.mark.parametrize(
    "target", [torch.float64, F32, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("value", [0, 1, -1, 0.1, 100.7])
def test_casts_of_constants_agree_with_torch(value: float, source: torch.dtype, target: torch.dtype) -> None:
    if source is torch.bool or not source.is_floating_point:
        value = int(value)
    if target is torch.uint8 and value < 0 and source.is_floating_point:
        return  # undefined in C
    result = make_cast(const(value, source), target)
    assert isinstance(result, Const)
    assert torch.tensor(result.value, dtype=target) == torch.tensor(value, dtype=source).to(target)


def test_an_implicit_rounding_disappears_in_other_floats() -> None:
    wide = x()
    assert make_cast(make_cast(wide, torch.bfloat16, implicit=True), F32) is wide
    assert make_cast(make_cast(wide, torch.bfloat16), F32) is Cast(Cast(wide, torch.bfloat16), F32)
    assert make_cast(make_cast(wide, torch.bfloat16, implicit=True), torch.float64) is Cast(wide, torch.float64)
    assert make_cast(make_cast(wide, torch.bfloat16, implicit=True), torch.float16) is Cast(wide, torch.float16)
    assert make_cast(Cast(wide, torch.bfloat16, implicit=True), torch.int32).children() != (wide,)
    assert make_cast(wide, F32) is wide


def test_an_implicit_rounding_inside_a_selection_disappears_too() -> None:
    mask, wide = Op("lt", (x("y"), const(1, F32)), torch.bool), x()
    kept = Load("h", (I0,), torch.float16)
    chosen = Op("where", (mask, make_cast(wide, torch.float16, implicit=True), kept), torch.float16)
    assert make_cast(chosen, F32) is Op("where", (mask, wide, Cast(kept, F32)), F32)
    rounded = Op("where", (mask, Cast(wide, torch.float16), kept), torch.float16)
    assert make_cast(rounded, F32) is Cast(rounded, F32)


def test_a_stored_selection_keeps_the_roundings_of_its_branches() -> None:
    wide, mask = x(), Load("m", (I0,), torch.bool)
    half = make_cast(wide, torch.bfloat16, implicit=True)
    assert as_stored(half) is Cast(wide, torch.bfloat16)
    assert as_stored(wide) is wide
    inner = make_op("where", mask, half, Load("y", (I0,), torch.bfloat16))
    outer = make_op("where", make_op("not", mask), inner, make_op("where", mask, inner, half))
    stored = as_stored(outer)
    assert as_stored(stored) is stored
    assert not any(isinstance(node, Cast) and node.implicit for node in postorder(stored))
    assert make_cast(stored, F32) is Cast(stored, F32)
    assert make_cast(outer, F32) is not Cast(outer, F32)


def test_operands_below_a_rounding_are_not_rounded_for_a_store() -> None:
    half = make_cast(x(), torch.bfloat16, implicit=True)
    condition = Op("lt", (half, Const(0.0, torch.bfloat16)), torch.bool)  # is not stored
    chosen = make_op("where", condition, half, Const(0.0, torch.bfloat16))
    assert as_stored(chosen) is make_op("where", condition, Cast(x(), torch.bfloat16), Const(0.0, torch.bfloat16))
    assert passed_on(chosen) == [half, Const(0.0, torch.bfloat16), chosen]


def test_a_long_chain_of_choices_is_stored() -> None:
    mask, chosen = Load("m", (I0,), torch.bool), make_cast(x(), torch.bfloat16, implicit=True)
    for k in range(10_000):
        chosen = Op("where", (mask, make_cast(x(f"x{k}"), torch.bfloat16, implicit=True), chosen), torch.bfloat16)
    assert sum(isinstance(node, Cast) and not node.implicit for node in postorder(as_stored(chosen))) == 10_001


def test_an_implicit_conversion_to_an_integer_truncates_and_stays() -> None:
    truncated = make_cast(x(), torch.int64, implicit=True)
    assert make_cast(truncated, F32) is Cast(truncated, F32)


def test_traversals_reach_ten_thousand_operations_deep() -> None:
    root = chain(10_000)
    order = postorder(root)
    assert len(order) == 2 * 10_000 + 1
    assert order[-1] is root
    replaced = rewrite([root], lambda e: x("y") if isinstance(e, Load) else None)[0]
    assert [load.buffer for load in loads(replaced)] == ["y"]
    assert free_axes(replaced) == {I0}
    back = rewrite([replaced], lambda e: x() if isinstance(e, Load) else None)[0]
    assert back is root


def test_deep_expressions_are_freed() -> None:
    from fusion.lowering.ir.expr import _Interned

    gc.disable()  # a whole collection takes seconds after other tests, and nothing here is in a cycle
    try:
        before = len(_Interned._table)
        root = chain(50_000)
        assert len(_Interned._table) > before + 50_000
        del root
        assert len(_Interned._table) == before
    finally:
        gc.enable()


def test_shared_parts_are_visited_once() -> None:
    root = x()
    for _ in range(100):  # 2¹⁰⁰ nodes if it were a tree
        root = Op("add", (root, root), F32)
    calls: Counter[Expr] = Counter()

    def rule(node: Expr) -> Expr | None:
        calls[node] += 1
        return None

    assert rewrite([root], rule)[0] is root
    assert len(calls) == 101
    assert set(calls.values()) == {1}


def test_postorder_puts_operands_first() -> None:
    shared = Op("exp", (x(),), F32)
    root = Op("add", (Op("neg", (shared,), F32), shared), F32)
    order = postorder(root, shared)
    for node in order:
        assert all(order.index(child) < order.index(node) for child in node.children())
    assert len(order) == len(set(order)) == 4


def test_rewrite_sees_gathered_indices_and_masks() -> None:
    where = Load("where", (I0,), torch.int64)
    mask = Load("mask", (I1,), torch.bool)
    root = Load("table", (where, I1), F32, mask)
    assert set(loads(root)) == {root, where, mask}
    renamed = rewrite(
        [root],
        lambda e: Load(e.buffer.upper(), e.index, e.dtype, e.mask) if isinstance(e, Load) else None,
    )[0]
    assert renamed is Load("TABLE", (Load("WHERE", (I0,), torch.int64), I1), F32, Load("MASK", (I1,), torch.bool))


def test_index_of_gives_only_its_own_indices() -> None:
    where = Load("where", (I0,), torch.int64)
    assert index_of(Load("table", (where, FloorDiv(I1, 2)), F32)) == (FloorDiv(I1, 2),)
    assert index_of(Op("neg", (where,), torch.int64)) == ()
    assert free_axes(Load("table", (where, FloorDiv(I1, 2)), F32)) == {I0, I1}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["deepcopy", "pickle"])
def test_copies_are_interned(copied: object) -> None:
    root = Op("mul", (Load("x", (2 * I0,), F32), Cast(Const(-0.0, torch.float64), F32)), F32)
    assert callable(copied)
    assert copied(root) is root
