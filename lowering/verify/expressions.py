"""Verifies expressions and folds, in Programs and in Kernels.

Input: expressions, the tensors that they may load and the sizes of their axes; no output.  A violated rule raises
`Broken`, which the caller, who knows the node, turns into an error (`defect`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.errors import Origin, VerifyError
from fusion.lowering.indexing import FloorDiv, Mod, Sizes, bounds, symbols_of
from fusion.lowering.ir.expr import (
    Cast,
    Const,
    Expr,
    Index,
    IndexValue,
    Load,
    Op,
    Random,
    TileRef,
    concrete,
    index_of,
    postorder,
)
from fusion.lowering.ir.scalar_ops import (
    FOLD_OPS,
    SCALAR_OPS,
    SCAN_OPS,
    SCANNED,
    FoldName,
    ScalarName,
    ScanName,
    accumulator,
    keeps_position,
    result_dtype,
)
from fusion.lowering.ir.sizes import Computed


class Broken(Exception):
    """A rule is violated; the caller knows where."""


def require(holds: object, rule: str, *details: object) -> None:
    """Raise `rule`, its `{}` filled with `details`, unless it holds (formatted late, as sympy's text is slow)."""
    if not holds:
        raise Broken(rule.format(*details))


def defect(place: str, broken: Broken, origin: Origin | None = None) -> VerifyError:
    """Return the error for a rule that is violated at `place`."""
    return VerifyError(f"{place}: {broken}", hint="this is a defect of the compiler; please report it", origin=origin)


# Expressions ----------------------------------------------------------------------------------------------------------


class ExpressionRules:
    """Checks expressions, each once.

    Args:
        tensors: the tensors that may be loaded: name → dtype, shape.
        tiles: whether `TileRef` is allowed.
    """

    def __init__(self, tensors: Mapping[str, tuple[torch.dtype, tuple[sympy.Expr, ...]]], tiles: bool) -> None:
        self.tensors, self.tiles = tensors, tiles
        self.passed: set[Expr] = set()

    def check(self, roots: Iterable[Expr], sizes: Sizes, known: Collection[sympy.Symbol]) -> set[str]:
        """Check `roots` over axes of the given sizes, where the symbols `known` are sizes.

        Returns:
            The names of the buffers that they load.
        """
        empty = any(size == 0 for size in sizes.values())
        loaded: set[str] = set()
        for node in postorder(*roots):
            if node not in self.passed:
                self._check_node(node)
                self.passed.add(node)
            for index in index_of(node):
                check_symbols(index, sizes, known, computed=not self.tiles)
            if isinstance(node, Load):
                loaded.add(node.buffer)
                if node.mask is None and not empty:
                    for at, size in zip(node.index, self.tensors[node.buffer][1], strict=True):
                        check_bounds(node.buffer, at, size, sizes)
        return loaded

    def _check_node(self, node: Expr) -> None:
        """Check the rules that do not depend on an expression's context."""
        match concrete(node):
            case Op() as op:
                _check_op(op)
            case Load() as load:
                self._check_load(load)
            case Const(value, dtype):
                kind = bool if dtype is torch.bool else float if dtype.is_floating_point else int
                require(type(value) is kind, "the constant {!r} has dtype {}", value, dtype)
            case Random(kind=distribution, seed=seed):
                require(distribution in ("uniform", "normal"), "no random distribution {!r}", distribution)
                require(seed.dtype is torch.int64, "a seed is int64, not {}", seed.dtype)
            case TileRef(name=name):
                require(self.tiles, "{} names a tile, outside of any kernel", name)
            case IndexValue() | Cast():
                pass
            case unknown:
                assert_never(unknown)
        for index in index_of(node):
            _foreign_parts(index)

    def _check_load(self, node: Load) -> None:
        require(node.buffer in self.tensors, "{} is unknown", node.buffer)
        dtype, shape = self.tensors[node.buffer]
        require(node.dtype is dtype, "{} holds {}, it is loaded as {}", node.buffer, dtype, node.dtype)
        rank = len(node.index)
        require(rank == len(shape), "{} has {} dimensions, its index has {}", node.buffer, len(shape), rank)
        for index in node.index:
            wide = not isinstance(index, Expr) or index.dtype is torch.int64
            require(wide, "an index into {} is not int64", node.buffer)
        require(node.mask is None or node.mask.dtype is torch.bool, "the mask of a load of {} is no bool", node.buffer)


def _check_op(node: Op) -> None:
    op = SCALAR_OPS.get(node.name)
    if op is None:
        raise Broken(f"no scalar operation {node.name!r}")
    require(len(node.args) == op.arity, "{} takes {} operands, not {}", node.name, op.arity, len(node.args))
    values = node.args
    if node.name == "where":
        require(values[0].dtype is torch.bool, "where chooses by a bool, not by {}", values[0].dtype)
        values = values[1:]
    dtypes = [arg.dtype for arg in values]
    require(
        all(dtype is dtypes[0] for dtype in dtypes), "operands of {} differ: {}", node.name, ", ".join(map(str, dtypes))
    )
    expected = result_dtype(node.name, dtypes[0])
    require(node.dtype is expected, "{} of {} gives {}, not {}", node.name, dtypes[0], expected, node.dtype)
    require(_gives(node.name, dtypes[0]) is expected, "{} is not defined on {}", node.name, dtypes[0])


@lru_cache(maxsize=4096)
def _gives(name: ScalarName, operand: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the defining function for operands of this dtype; None if it does not accept them."""
    args = [torch.ones((), dtype=operand)] * SCALAR_OPS[name].arity
    if name == "where":
        args[0] = torch.ones((), dtype=torch.bool)
    try:
        return SCALAR_OPS[name].meaning(*args).dtype
    except (RuntimeError, NotImplementedError, TypeError):
        return None


@lru_cache(maxsize=1 << 16, typed=True)  # typed: 0 is equal to sympy's 0, but no index
def _foreign_parts(index: sympy.Expr) -> tuple[sympy.Basic, ...]:
    """Return the parts of an index that are not index arithmetic; sizes may contain them, axes not."""
    require(isinstance(index, sympy.Expr), "the index {!r} is no sympy expression", index)
    parts = []
    for part in sympy.preorder_traversal(index):
        arithmetic = part.is_Symbol or part.is_Number or part.is_Add or part.is_Mul or isinstance(part, (FloorDiv, Mod))
        if not arithmetic and not (isinstance(part, sympy.Pow) and part.exp.is_Integer and part.exp > 0):
            parts.append(part)
    return tuple(parts)


def check_symbols(index: sympy.Expr, sizes: Sizes, known: Collection[sympy.Symbol], *, computed: bool = False) -> None:
    """Refuse symbols of an index that are neither axes nor sizes, and other operations on axes than index arithmetic.

    Args:
        computed: whether sizes computed from known ones are known, too; a kernel must be passed each that it needs.
    """
    for symbol in symbols_of(index):
        derived = computed and isinstance(symbol, Computed) and all(size in known for size in symbol.given)
        require(symbol in sizes or symbol in known or derived, "{} is neither an axis nor a size", symbol)
    for part in _foreign_parts(index):
        require(part.free_symbols.isdisjoint(sizes), "an index has no operation {}: {}", part.func.__name__, index)


def check_bounds(name: str, index: Index, size: sympy.Expr, sizes: Sizes) -> None:
    """Refuse an unmasked access that is known to reach outside a dimension."""
    if isinstance(index, Expr) or (isinstance(index, sympy.Symbol) and sizes.get(index) == size):
        return
    limits = bounds(index, sizes)
    if limits is None:
        return
    low, high = int(limits[0]), int(limits[1])
    limit = int(size) if size.is_Integer else high + 1
    if low >= 0 and high < limit:
        return
    if _reaches_its_bounds(index) or high < 0 or low >= limit:
        raise Broken(f"{name} is accessed at {index}, which takes values from {low} to {high}, outside [0, {size})")


@lru_cache(maxsize=1 << 16)
def _reaches_its_bounds(index: sympy.Expr) -> bool:
    """Return whether the bounds of `index` are attained (see `indexing.bounds`)."""
    parts = list(sympy.preorder_traversal(index))
    used = [part for part in parts if part.is_Symbol]
    return len(used) == len(set(used)) and not any(isinstance(part, Mod) for part in parts)


# Folds ----------------------------------------------------------------------------------------------------------------


def check_fold(op: FoldName, args: Sequence[Expr], dtype: torch.dtype) -> None:
    """Check the operands and the result dtype of a fold."""
    fold = FOLD_OPS.get(op)
    if fold is None:
        raise Broken(f"no reduction {op!r}")
    require(len(args) == fold.arity, "{} takes {} values, not {}", op, fold.arity, len(args))
    first = args[0].dtype
    if op == "dot":
        require(args[1].dtype is first, "factors of a product differ: {}, {}", first, args[1].dtype)
        require(first is not torch.bool, "a product of bools is no dot")
    elif op in ("any", "all"):
        require(first is torch.bool, "{} takes bools, not {}", op, first)
    elif keeps_position(op):
        require(not args[1].dtype.is_floating_point, "the index of {} is {}", op, args[1].dtype)
    expected = accumulator(op, first) if op == "dot" else torch.int64 if keeps_position(op) else first
    require(dtype is expected, "{} of {} gives {}, not {}", op, first, expected, dtype)


def check_scan(op: ScanName, args: Sequence[Expr], dtype: torch.dtype) -> None:
    """Check the operands and the result dtype of a scan."""
    scan = SCAN_OPS.get(op)
    if scan is None:
        raise Broken(f"no scan {op!r}")
    require(len(args) == scan.arity, "{} takes {} values, not {}", op, scan.arity, len(args))
    first = args[0].dtype
    require(first in SCANNED, "values of {} are not scanned", first)
    require(op != "logsumexp" or first.is_floating_point, "{} of {}", op, first)
    if keeps_position(op):
        require(args[1].dtype is torch.int64, "the index of {} is {}", op, args[1].dtype)
    expected = torch.int64 if keeps_position(op) else first
    require(dtype is expected, "{} of {} gives {}, not {}", op, first, expected, dtype)


def check_sides(
    rows: Collection[sympy.Symbol],
    columns: Collection[sympy.Symbol],
    parallel: Collection[sympy.Symbol],
    lhs_spans: Collection[sympy.Symbol],
    rhs_spans: Collection[sympy.Symbol],
) -> None:
    """Check that rows and columns of a product are axes of its result along which only its own side varies."""
    for symbol in (*rows, *columns):
        require(symbol in parallel, "{} is no parallel axis, it cannot be a row or column of a product", symbol)
    for symbol in rows:
        require(symbol not in rhs_spans, "{} is a row axis of a product, but its right side varies along it", symbol)
    for symbol in columns:
        require(symbol not in lhs_spans, "{} is a column axis of a product, but its left side varies along it", symbol)
