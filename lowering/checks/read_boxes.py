"""Determines the elements of tensors that a call certainly reads, as ranges of their dimensions (boxes).

Input: a call lowered by itself, and the boxes of its results that are read; output: boxes of its operands.  Elements
that may not be read are left out: those at positions that are data, under conditions on data, or between strided
indices.  Indices, never counts, prove that a tensor is read in full: overlapping parts may have as many elements as the
whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.indexing import ONE, ZERO, FloorDiv, Mod, Sizes, axis_symbol, coefficient, invert, symbols_of
from fusion.lowering.indexing.intervals import expanded
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Const, Expr, Index, IndexValue, Load, Op, loads
from fusion.lowering.ir.program import Axis, Contract, Extern, Map, Node, Reduce, Scan, Scatter, reads
from fusion.lowering.ir.scalar_ops import ORDERINGS
from fusion.lowering.ir.sizes import may_be_empty
from fusion.lowering.value import Shape, Value, axis_bounds

Range = tuple[sympy.Expr, sympy.Expr]
"""The first index, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor within a range of each of some dimensions; the other dimensions are whole."""

    ranges: tuple[tuple[int, Range], ...] = ()


WHOLE = Box()
Boxes = Mapping[str, Sequence[Box]]
"""By tensor that is read at all: boxes of it that certainly are."""


def boxes_read(
    results: Iterable[tuple[Value, Sequence[Box]]], nodes: Sequence[Node], shapes: Mapping[str, Shape]
) -> Boxes:
    """Return the boxes of tensors that are read by a call of which boxes of the results are read.

    Args:
        results: the results, each with its boxes.
        nodes: the nodes that compute them.  Maps are evaluated where they are read, other nodes in full.
        shapes: of the tensors.

    >>> shape = (sympy.Integer(4), sympy.Integer(3))
    >>> load = Load("x", (axis_symbol(0) + 2, axis_symbol(1)), torch.float32)
    >>> rows = Value((sympy.Integer(2), shape[1]), torch.float32, torch.device("cpu"), load)
    >>> boxes_read([(rows, [WHOLE])], [], {"x": shape})
    {'x': [Box(ranges=((0, (2, 4)),))]}
    """
    found: dict[str, list[Box]] = {}

    def evaluate(exprs: Sequence[Expr], sizes: Sizes, box: Box | None) -> None:
        for load in loads(*exprs):
            read = None if box is None else _image(load, box, sizes, shapes[load.buffer])
            found.setdefault(load.buffer, []).extend([] if read is None else [read])

    for value, boxes in results:
        for box in boxes or (None,):
            evaluate([value.expr], axis_bounds(value.shape), box)
    for node in reversed(nodes):
        match node:
            case Map() if node.out in found:
                for box in merged(found[node.out], shapes[node.out]) or (None,):
                    evaluate([node.expr], _sizes(node.axes), box)
            case Reduce() | Scan() | Contract() if node.out in found:
                over = () if isinstance(node, Scan) else node.over
                evaluate(node.exprs, _sizes((*node.axes, *over)), WHOLE)
            case Scatter() if node.out in found:
                certain = node.exprs if node.where is None else (*node.index, node.where)
                evaluate(certain, _sizes(node.axes), WHOLE)
                evaluate([node.value], _sizes(node.axes), None)
                found.setdefault(node.start, []).append(WHOLE)
            case Extern() | Chunked():
                for name in reads(node):
                    found.setdefault(name, []).append(WHOLE)
            case Map() | Reduce() | Scan() | Contract() | Scatter():
                pass  # nothing reads it
            case unknown:
                assert_never(unknown)
    return found


def merged(boxes: Sequence[Box], shape: Shape) -> Sequence[Box]:
    """Return boxes of a tensor; only `WHOLE` if they certainly cover it, in one piece or in pieces along a dimension.

    >>> ends = [Box(((1, (ZERO, ONE)),)), Box(((1, (ONE, sympy.Integer(3))),))]
    >>> merged(ends, (ONE, sympy.Integer(3)))
    [Box(ranges=())]
    >>> merged(ends, (ONE, sympy.Integer(4))) is ends
    True
    """
    if WHOLE in boxes or any(_covers(dict(pieces), shape) for pieces in _along_one_dimension(boxes)):
        return [WHOLE]
    return boxes


def _along_one_dimension(boxes: Iterable[Box]) -> Iterator[list[tuple[int, list[Range]]]]:
    """Yield each dimension with the ranges of the boxes that span all other dimensions."""
    slabs = sorted((box.ranges[0] for box in boxes if len(box.ranges) == 1), key=lambda slab: slab[0])
    for dim, ranges in itertools.groupby(slabs, key=lambda slab: slab[0]):
        yield [(dim, [each for _, each in ranges])]


def _covers(pieces: Mapping[int, Sequence[Range]], shape: Shape) -> bool:
    """Return whether the ranges are known to cover their dimension."""
    ((dim, ranges),) = pieces.items()
    ends, left = [ZERO], list(ranges)
    for end in ends:  # everything before it is covered
        if _at_most(shape[dim], end):
            return True
        ends += [last for first, last in left if _at_most(first, end)]
        left = [(first, last) for first, last in left if not _at_most(first, end)]
    return False


def _at_most(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Return whether a number is certainly at most another one."""
    return not may_be_empty(expanded(second - first + 1))


def _sizes(axes: Sequence[Axis]) -> Sizes:
    return {axis.symbol: axis.size for axis in axes}


# A load ---------------------------------------------------------------------------------------------------------------


def _image(load: Load, box: Box, sizes: Sizes, shape: Shape) -> Box | None:
    """Return the box that a load reads while its axes run over a box; None if it is not known to be one."""
    index = [each for part in load.index if (each := _number(part)) is not None]
    if len(index) < len(load.index):
        return None
    ranges = {symbol: (ZERO, size) for symbol, size in sizes.items()}
    ranges.update((axis_symbol(dim), limits) for dim, limits in box.ranges)
    if load.mask is not None and not _narrow(ranges, load.mask):
        return None
    used = {symbol for each in index for symbol in symbols_of(each)}
    if any(may_be_empty(end - first) for symbol, (first, end) in ranges.items() if symbol not in used):
        return None
    if all(limits == (ZERO, sizes[symbol]) for symbol, limits in ranges.items()):
        values = sympy.symbols(f"v:{len(shape)}", integer=True, nonnegative=True)
        if invert(index, values, shape, list(sizes), sizes) is not None:
            return WHOLE
    return _moved(index, ranges, shape)


def _number(part: Index) -> sympy.Expr | None:
    """Return an index, or the value of an expression, as a number computed from axes and sizes alone."""
    match part:
        case IndexValue(index=index, dtype=torch.int64):
            return index
        case Const(value=value, dtype=torch.int64):
            return sympy.Integer(int(value))
        case Expr():
            return None
        case _:
            return part


def _moved(index: Sequence[sympy.Expr], ranges: Mapping[sympy.Symbol, Range], shape: Shape) -> Box | None:
    """Return the box that indices run over, each with axes of its own; None where one leaves something out."""
    axes = [symbol for each in index for symbol in symbols_of(each) if symbol in ranges]
    if len(set(axes)) < len(axes):
        return None
    limits: list[tuple[int, Range]] = []
    for dim, (each, size) in enumerate(zip(index, shape, strict=True)):
        run = _run(each, ranges)
        if run is None:
            return None
        if run != (ZERO, size):
            limits.append((dim, run))
    return Box(tuple(limits))


def _run(index: sympy.Expr, ranges: Mapping[sympy.Symbol, Range]) -> Range | None:
    """Return the interval of values of an index if it takes every integer in it (no gaps); else None."""
    if isinstance(index, (FloorDiv, Mod)):
        inner, divisor = index.args
        run = _run(inner, ranges)
        if run is None or any(axis in ranges for axis in symbols_of(divisor)):
            return None
        first, end = run
        if isinstance(index, FloorDiv):
            return FloorDiv(first, divisor), FloorDiv(end - 1, divisor) + 1
        return (ZERO, divisor) if _at_most(divisor, expanded(end - first)) else None
    start, steps = index, list[tuple[sympy.Expr, sympy.Expr]]()
    for axis in symbols_of(index):
        if axis not in ranges:
            continue
        (first, end), step = ranges[axis], coefficient(index, axis)
        if step is None or not step.is_Integer:
            return None
        start += step * ((first if step > 0 else end - 1) - axis)
        steps.append((abs(step), end - first))
    if len(steps) > 1 and any(may_be_empty(count) for _, count in steps):
        return None
    length: sympy.Expr = ONE
    for step, count in sorted(steps, key=lambda each: int(each[0])):
        if not _at_most(step, length):
            return None
        length += step * (count - 1)
    return expanded(start), expanded(start + length)


def _narrow(ranges: dict[sympy.Symbol, Range], mask: Expr) -> bool:
    """Narrow the ranges of axes to where a mask holds; return whether it is known to bound single axes."""
    if not isinstance(mask, Op):
        return False
    if mask.name == "and":
        return all(_narrow(ranges, part) for part in mask.args)
    left, right = map(_number, mask.args) if mask.name in ORDERINGS else (None, None)
    axes = [] if left is None or right is None else [axis for axis in symbols_of(left - right) if axis in ranges]
    if left is None or right is None or len(axes) != 1:
        return False
    (axis,) = axes
    difference = expanded(left - right)
    bound, (first, end) = expanded(axis - difference), ranges[axis]
    if axis in symbols_of(bound):
        return False
    if mask.name in ("gt", "le"):
        bound += 1
    if mask.name in ("gt", "ge"):
        ranges[axis] = (bound if _at_most(first, bound) else first, end)
        return _at_most(first, bound) or _at_most(bound, first)
    ranges[axis] = (first, bound if _at_most(bound, end) else end)
    return _at_most(bound, end) or _at_most(end, bound)
