"""Narrows int64 expressions of the IR to int32 where their values are known to fit.

Index arithmetic in the IR is int64 (`i < j` of a causal mask, a position, a bucket); on a GPU that costs two to four
times as much as int32.  Input: expressions; output: the range of every int64 expression whose own values and whose
operands' values all fit int32, and of clamped ones, whose operands may be wider.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from fusion.codegen.triton.expressions.indices import INT32_END, Layout
from fusion.lowering.algebra.positions import clamped
from fusion.lowering.indexing import bounds
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Op, postorder
from fusion.lowering.ir.scalar_ops import CHECKED, ScalarName

Range: TypeAlias = "tuple[int, int]"

_AT_MOST_32_BITS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)


def int32_ranges(roots: Sequence[Expr], layout: Layout) -> dict[Expr, Range]:
    """Return the least and greatest value of each int64 expression below `roots` that can be computed in int32."""
    ranges: dict[Expr, Range] = {}
    for node in postorder(*roots):
        if node.dtype is torch.int64:
            span = _range(node, ranges, layout)
            if span is not None and span[0] >= -INT32_END and span[1] < INT32_END:
                ranges[node] = span
    return ranges


def _range(node: Expr, known: dict[Expr, Range], layout: Layout) -> Range | None:
    if isinstance(node, Const):
        return int(node.value), int(node.value)
    if isinstance(node, IndexValue) and layout.narrow(node.index):
        span = bounds(node.index, layout.blocked.sizes())
        return None if span is None else (int(span[0]), int(span[1]))
    if isinstance(node, Cast) and node.arg.dtype in _AT_MOST_32_BITS:
        if node.arg.dtype is torch.bool:
            return 0, 1
        info = torch.iinfo(node.arg.dtype)
        return info.min, info.max
    if isinstance(node, Op) and node.name in _RULES:
        operands = {"where": node.args[1:], CHECKED: node.args[2:3]}.get(node.name, node.args)
        if all(arg in known for arg in operands):
            return _RULES[node.name](*(known[arg] for arg in operands))
    low, high = clamped(node)
    return None if low is None or high is None else (low, high)


def _corners(operate: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    def rule(a: Range, b: Range) -> Range:
        values = [operate(x, y) for x in a for y in b]
        return min(values), max(values)

    return rule


def _divided(a: Range, b: Range) -> Range | None:
    return _corners(lambda x, y: x // y)(a, b) if b[0] > 0 else None


def _rest(a: Range, b: Range) -> Range | None:
    return (0, b[1] - 1) if b[0] > 0 else None


_RULES: Mapping[ScalarName, Callable[..., Range | None]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _corners(lambda x, y: x * y),
    "neg": lambda a: (-a[1], -a[0]),
    "abs": lambda a: (0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1])), max(abs(a[0]), abs(a[1]))),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "floordiv": _divided,
    "remainder": _rest,
    "where": lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
    CHECKED: lambda last: (0, last[1]),
}
