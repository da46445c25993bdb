"""Splitting: a reduction with too few rows to fill the device is done in two stages.

`Program → Program`.  The first stage folds chunks of the longest reduced axis, one more parallel axis; the second
folds the chunks.  Chunks are whole where the length has a fitting divisor, and guarded at the end where it has none.
"""

from __future__ import annotations

import math
from dataclasses import replace

import sympy
import torch

from codegen.target import Capabilities
from lowering.expr import Expr, IndexValue, Load, Op, const, guarded, postorder
from lowering.indexing import axis_symbol, coefficient, flatten, over_symbol, substitute_all
from lowering.program import Axis, Buffer, Node, Program, Reduce, axis_sizes
from lowering.scalar_ops import identity
from lowering.value import contiguous_strides

SMALL = 1 << 17
"""Elements below which a second launch costs more than an idle device."""

LANES = 32
"""Columns that one program takes at least when the reduced axis is not the contiguous one."""

SPLITTABLE = frozenset({"sum", "prod", "max", "min", "any", "all"})


def split_reductions(program: Program, capabilities: Capabilities) -> Program:
    """The program with long, few-rowed reductions in two stages; the same object when there are none."""
    buffers = dict(program.buffers)
    origins, inlined = dict(program.origins), dict(program.inlined)
    nodes: list[Node] = []
    for node in program.nodes:
        chunks = _chunks(program, node, capabilities) if isinstance(node, Reduce) else 1
        if chunks == 1:
            nodes.append(node)
            continue
        assert isinstance(node, Reduce)
        first, second, part = _split(program, node, chunks)
        buffers[part.name] = part
        origins[part.name] = program.origins[node.out]
        inlined[part.name] = inlined.pop(node.out, ())
        nodes += [first, second]
    if len(nodes) == len(program.nodes):
        return program
    return replace(program, nodes=tuple(nodes), buffers=buffers, origins=origins, inlined=inlined)


def _chunks(program: Program, node: Reduce, capabilities: Capabilities) -> int:
    """Into how many parts the longest reduced axis is cut; 1 leaves the node as it is."""
    sizes = [axis.size for axis in (*node.axes, *node.over)]
    if node.op not in SPLITTABLE or not all(size.is_Integer for size in sizes):
        return 1
    rows = math.prod(int(axis.size) for axis in node.axes)
    length = math.prod(int(axis.size) for axis in node.over)
    if _walks_contiguously(program, node):
        programs, enough, shortest = rows, capabilities.parallelism, 1024
    else:  # a program that takes a few columns has little in flight: it takes many of them
        programs, enough, shortest = -(-rows // LANES), 4 * capabilities.parallelism, 64
    if rows * length < SMALL or programs >= enough:
        return 1
    longest = max(int(axis.size) for axis in node.over)
    wanted = min(-(-2 * enough // programs), length // shortest or 1, longest)
    if wanted < 2:
        return 1
    near = [d for d in range(max(2, wanted // 2), 2 * wanted + 1) if longest % d == 0 and d <= longest]
    return min(near, key=lambda d: abs(d - wanted)) if near else wanted


def _walks_contiguously(program: Program, node: Reduce) -> bool:
    """Is some reduced axis the one along which the largest tensor read is contiguous?"""
    sizes = axis_sizes(node)
    found = [part for part in postorder(*node.args) if isinstance(part, Load)]
    largest = max((program.buffers[load.buffer].numel for load in found), key=int, default=sympy.Integer(0))
    for load in found:
        if program.buffers[load.buffer].numel != largest:
            continue
        offset = flatten(load.index, program.buffers[load.buffer].strides, sizes)
        if not isinstance(offset, Expr) and any(coefficient(offset, axis.symbol) == 1 for axis in node.over):
            return True
    return False


def _split(program: Program, node: Reduce, chunks: int) -> tuple[Reduce, Reduce, Buffer]:
    cut = max(node.over, key=lambda axis: int(axis.size))
    length = -(-int(cut.size) // chunks)
    chunk = Axis(axis_symbol(len(node.axes)), sympy.Integer(chunks))
    inner = Axis(cut.symbol, sympy.Integer(length))
    over = tuple(inner if axis is cut else axis for axis in node.over)
    position = chunk.symbol * length + inner.symbol
    sizes = {**axis_sizes(node), chunk.symbol: chunk.size, inner.symbol: inner.size}
    args = substitute_all(node.args, {cut.symbol: position}, sizes)
    if length * chunks != cut.size:
        limit = IndexValue(cut.size)
        inside = Op("lt", (IndexValue(position), limit), torch.bool)
        neutral = identity(node.op, node.dtype)
        args = [Op("where", (inside, guarded(arg, inside), const(neutral, arg.dtype)), arg.dtype) for arg in args]
    old = program.buffers[node.out]
    rows = tuple(axis.size for axis in node.axes)
    # Chunks lie outermost in memory: neighbouring columns stay neighbours in what the first stage writes.
    strides = (*contiguous_strides(rows), sympy.Mul(*rows))
    part = Buffer(f"{node.out}_part", node.dtype, (*rows, chunk.size), strides, old.device)
    first = replace(node, out=part.name, axes=(*node.axes, chunk), over=over, args=tuple(args))
    last = Axis(over_symbol(0), chunk.size)
    index = (*(axis.symbol for axis in node.axes), last.symbol)
    second = replace(node, over=(last,), args=(Load(part.name, index, node.dtype),))
    return first, second, part
