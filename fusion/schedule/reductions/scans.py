"""Splits scans with too few rows to fill the device along the scanned axis.

    total[p]  = op over the points of part p            an ordinary reduction
    before[p] = op of the totals up to part p           a short scan
    out[n]    = before[n // L - 1] joined with the scan of part n // L by itself

`Program → Program`.  The last step is a scan of parts and a map, which become one kernel; it reads the scanned tensor a
second time.  Parts are joined by the operation itself; positions by comparing the extremes, of which the later wins a
tie.  Sums and products of float32 are carried from part to part in float64, so that the error does not grow with their
number.

Scans of symbolic length, or of a length without a suitable divisor, stay unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import sympy
import torch

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import FloorDiv, Mod, axis_symbol, over_symbol, substitute_all
from fusion.lowering.ir.expr import Expr, IndexValue, Load, const, make_cast, make_op
from fusion.lowering.ir.program import Axis, Buffer, Map, Node, Program, Reduce, Scan
from fusion.lowering.ir.scalar_ops import EXTREMES, FoldName, ScanName, identity, keeps_position
from fusion.lowering.value import contiguous_strides
from fusion.schedule.iteration.contiguity import reads_contiguously
from fusion.schedule.iteration.naming import unused
from fusion.schedule.reductions.divisors import near_divisor
from fusion.schedule.reductions.split import wanted_parts

COLUMNS_PER_PROGRAM = 8
"""The columns of one program if the scanned axis is not contiguous: a sector of float32."""

ENOUGH_ROWS, ENOUGH_BLOCKS = 0.2, 1.5
"""The number of rows, or of blocks of columns, from which a scan is faster in one piece, relative to the parallelism of
the device (measured: docs/performance.md, `ENOUGH_ROWS`)."""


def split_scans(program: Program, capabilities: Capabilities) -> Program:
    """Split long scans of few rows; the same object when there are none.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import empty
    >>> show_program(lambda p: split_scans(p, TARGET.capabilities), lambda x: x.double().cumsum(0), empty(1 << 17))
      input x: f32[131072]
      _to_copy: f64[131072] = map(i0:131072) f64(x[i0])
    + cumsum_part: f64[128] = sum(i0:128 over r0:1024) _to_copy[1024*i0 + r0]
    + cumsum_before: f64[128] = running sum(i0:128 along i0) cumsum_part[i0]
    - cumsum: f64[131072] = running sum(i0:131072 along i0) _to_copy[i0]
    + cumsum_block: f64[128, 1024] = running sum(i0:128, i1:1024 along i1) _to_copy[1024*i0 + i1]
    + cumsum: f64[131072] = map(i0:131072) cumsum_before[i0//1024 - 1 if index(i0//1024) >= 1] +
            cumsum_block[i0//1024, i0%1024]
      return cumsum
    """
    nodes: list[Node] = []
    additions = _Additions(program)
    for node in program.nodes:
        count = _parts(program, node, capabilities) if isinstance(node, Scan) else 1
        nodes.extend(_Split(additions, node, count).nodes() if isinstance(node, Scan) and count > 1 else [node])
    if not additions.buffers:
        return program
    origins = {buffer.name: out for buffer, out in additions.buffers}
    return program.edited(nodes, buffers=(buffer for buffer, _ in additions.buffers), origins=origins)


def _parts(program: Program, node: Scan, capabilities: Capabilities) -> int:
    """Return the number of equal parts of the scanned axis; 1 for no split."""
    if capabilities.invariant or not all(axis.size.is_Integer for axis in node.axes):
        return 1
    length = int(node.scanned.size)
    rows = math.prod(int(axis.size) for axis in node.axes) // max(1, length)
    contiguous = reads_contiguously(program, node, [node.scanned])
    programs, enough = (rows, ENOUGH_ROWS) if contiguous else (-(-rows // COLUMNS_PER_PROGRAM), ENOUGH_BLOCKS)
    if not rows or programs >= enough * capabilities.parallelism:  # the second read costs half as much again
        return 1
    wanted = wanted_parts(rows, length, capabilities, contiguous=contiguous)
    return near_divisor(length, wanted) or 1 if wanted > 1 else 1


@dataclass(slots=True)
class _Additions:
    """The additions so far: buffers with the buffer whose origin each has, and nodes by their computation."""

    program: Program
    buffers: list[tuple[Buffer, str]] = field(default_factory=list)
    known: dict[tuple[object, ...], Load] = field(default_factory=dict)

    def name(self, wish: str) -> str:
        """Return an unused name for a buffer."""
        return unused(wish, {*self.program.buffers, *(buffer.name for buffer, _ in self.buffers)})


class _Split:
    """One scan in `count` parts."""

    def __init__(self, additions: _Additions, node: Scan, count: int) -> None:
        self.additions, self.node = additions, node
        self.length = node.scanned.size / count
        others = [axis for axis in node.axes if axis.symbol != node.along]
        self.others = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate(others))
        self.part = Axis(axis_symbol(len(others)), sympy.Integer(count))
        self.old = [axis.symbol for axis in others]
        self.added: list[Node] = []

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes that replace the scan; the last one has its result."""
        node = self.node
        ops = (EXTREMES[node.op], node.op) if node.op in EXTREMES else (node.op,)
        totals = self._totals()
        pairs = [(self._before(op, totals), self._block(op)) for op in ops]
        expr = self._joined(*(side for pair in pairs for side in pair))
        return (*self.added, Map(node.out, node.axes, expr))

    # Totals of parts --------------------------------------------------------------------------------------------------

    def _totals(self) -> tuple[Expr, ...]:
        """Return the value of each part (for positions, also its position), over the other axes and the part."""
        op, over = self.node.op, Axis(over_symbol(0), self.length)
        args = self._at(over.symbol)
        if op == "logsumexp":
            largest = self._reduced("max", args[0], over)
            shift = make_op("where", make_op("isinf", largest), const(0.0, largest.dtype), largest)
            total = self._reduced("sum", make_op("exp", make_op("sub", args[0], shift)), over)
            return (make_op("add", make_op("log", total), shift),)
        if not keeps_position(op):
            return (self._reduced(op, make_cast(args[0], self._carried(op)), over),)
        extreme = self._reduced(EXTREMES[op], args[0], over)
        is_it = make_op("eq", args[0], extreme)
        if extreme.dtype.is_floating_point:
            is_it = make_op("or", is_it, make_op("isnan", args[0]))  # then the extreme is NaN and equals nothing
        last = self._reduced("max", make_op("where", is_it, args[1], const(-1, torch.int64)), over)
        return extreme, last

    def _reduced(self, op: FoldName, arg: Expr, over: Axis) -> Load:
        axes = (*self.others, self.part)
        return self._load(Reduce("", axes, (over,), op, (arg,), arg.dtype), axes, "part")

    def _at(self, inner: sympy.Symbol) -> list[Expr]:
        """Return the operands at point `inner` of the part."""
        names = dict(zip(self.old, (axis.symbol for axis in self.others), strict=True))
        place = {**names, self.node.along: self.part.symbol * self.length + inner}
        sizes = {axis.symbol: axis.size for axis in (*self.others, self.part)} | {inner: self.length}
        return substitute_all(self.node.args, place, sizes)

    # Scans ------------------------------------------------------------------------------------------------------------

    def _before(self, op: ScanName, totals: Sequence[Expr]) -> Expr:
        """Return the exclusive prefix of the part totals: the fold of all parts before that of the current point."""
        axes = (*self.others, self.part)
        args = tuple(totals) if op.startswith("arg") else tuple(totals[:1])
        dtype = self._carried(op)
        load = self._load(Scan("", axes, self.part.symbol, op, args, dtype), axes, "before")
        part = FloorDiv(self.node.along, self.length)
        later = make_op("ge", IndexValue(part), const(1, torch.int64))
        total_before = Load(load.buffer, (*self.old, part - 1), dtype, later)
        start = 0 if op.startswith("arg") else identity(op, dtype)
        return total_before if start == 0 else make_op("where", later, total_before, const(start, dtype))

    def _block(self, op: ScanName) -> Expr:
        """Return the scan of each part by itself, over the axes of the scan."""
        inner = Axis(axis_symbol(len(self.others) + 1), self.length)
        axes = (*self.others, self.part, inner)
        args = self._at(inner.symbol)
        kept = tuple(args) if op.startswith("arg") else tuple(args[:1])
        load = self._load(Scan("", axes, inner.symbol, op, kept, self._dtype(op)), axes, "block")
        point = self.node.along
        index = (*self.old, FloorDiv(point, self.length), Mod(point, self.length))
        return Load(load.buffer, index, load.dtype)

    def _dtype(self, op: ScanName) -> torch.dtype:
        return torch.int64 if keeps_position(op) else self.node.args[0].dtype

    def _carried(self, op: ScanName) -> torch.dtype:
        """Return the dtype in which `op` is carried from part to part."""
        dtype = self._dtype(op)
        return torch.float64 if op in ("sum", "prod") and dtype.is_floating_point else dtype

    # Joining ----------------------------------------------------------------------------------------------------------

    def _joined(
        self, before: Expr, here: Expr, position: Expr | None = None, position_here: Expr | None = None
    ) -> Expr:
        """Combine earlier parts with the part up to the current point; for positions, the later one of equals."""
        op = self.node.op
        if op in ("sum", "prod"):
            combined = make_op("add" if op == "sum" else "mul", before, make_cast(here, before.dtype))
            return make_cast(combined, here.dtype)
        if op == "logsumexp":
            same = make_op("eq", before, here)
            negative_gap = make_op("neg", make_op("abs", make_op("sub", before, here)))
            scale = make_op("exp", make_op("where", same, const(0.0, negative_gap.dtype), negative_gap))
            return make_op("add", make_op("maximum", before, here), make_op("log1p", scale))
        later = make_op("ge" if op in ("max", "argmax") else "le", here, before)
        if here.dtype.is_floating_point:
            later = make_op("or", later, make_op("isnan", here))
        if position is None or position_here is None:
            return make_op("where", later, here, before)
        return make_op("where", later, position_here, position)

    def _load(self, node: Reduce | Scan, axes: Sequence[Axis], ending: str) -> Load:
        """Return a load of the node's result, which is computed once for all scans that need it."""
        key = (type(node), node.op, node.args, tuple(axes))
        if key not in self.additions.known:
            name = self.additions.name(f"{self.node.out}_{ending}")
            device = self.additions.program.buffers[self.node.out].device
            shape = tuple(axis.size for axis in axes)
            strides = contiguous_strides(shape)
            if len(axes) == len(self.others) + 1:  # the part is outermost, so neighbours within it stay neighbours
                strides = (*contiguous_strides(shape[:-1]), sympy.Mul(*shape[:-1]))
            self.additions.buffers.append((Buffer(name, node.dtype, shape, strides, device), self.node.out))
            self.added.append(replace(node, out=name))
            self.additions.known[key] = Load(name, tuple(axis.symbol for axis in axes), node.dtype)
        return self.additions.known[key]


__all__ = ["split_scans"]
