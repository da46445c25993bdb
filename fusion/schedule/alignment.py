"""Alignment: rows of a matrix that only the program itself sees start at addresses that the hardware can fetch from.

    gradient of logits bf16[8192, 50257] strides [50257, 1]   →   strides [50264, 1]

Tensor memory, asynchronous copies and libraries all want rows at multiples of 16 bytes; a product of rows that are not
so is several times slower.  Where a program makes such rows to multiply them, they are made apart.

What enters is a Program; what leaves is the same one over buffers with other strides, and with library calls that take
an odd size apart.  Left as they are: what is given or returned, what an extern makes or reads, and rows so short that
what they would gain is lost in the gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import sympy

from codegen.target import Capabilities
from fusion.schedule.chunks.body import product_calls
from lowering.expr import loads
from lowering.program import Buffer, Contract, Extern, Program, Scatter, reads, writes

BYTES = 16
SHORTEST = 8 * BYTES
"""Bytes of the shortest row that is aligned."""


def align_rows(program: Program, capabilities: Capabilities) -> Program:
    """`program` with rows that are multiplied at aligned addresses; the same object where all are, or nothing is."""
    if not capabilities.lone_products or "dot" not in capabilities.fold_ops:
        return program
    found = {name: strides for name in _multiplied(program) if (strides := _aligned(program.buffers[name]))}
    for name in {*_fixed(program), *_otherwise(program)}.intersection(found):
        del found[name]
    if not found:
        return program
    buffers = {name: replace(b, strides=found.get(name, b.strides)) for name, b in program.buffers.items()}
    origins, nodes = dict(program.origins), list(program.nodes)
    for position, node in enumerate(program.nodes):
        if isinstance(node, Contract) and node.library and not found.keys().isdisjoint(reads(node)):
            calls = product_calls(node, buffers)
            nodes[position] = replace(node, library=calls)
            origins.update((name, origins[node.out]) for call in calls for name in writes(call))
    return replace(program, buffers=buffers, nodes=tuple(nodes), origins=origins)


def _otherwise(program: Program) -> Iterator[str]:
    """What is read by products whose library calls do not take matrices as they are stored."""
    for node in program.nodes:
        if isinstance(node, Contract) and node.library and not product_calls(node, dict(program.buffers)):
            yield from reads(node)


def _multiplied(program: Program) -> Iterator[str]:
    """The matrices of halves that contractions read row by row."""
    for node in program.nodes:
        if isinstance(node, Contract):
            axes = {axis.symbol for axis in (*node.axes, *node.over)}
            for load in loads(*node.exprs):
                if load.dtype.itemsize == 2 and len(load.index) > 1 and load.index[-1] in axes:
                    yield load.buffer


def _fixed(program: Program) -> Iterator[str]:
    """The buffers whose strides are seen outside generated kernels."""
    yield from program.output_names()
    made = {name for node in program.nodes if not isinstance(node, (Extern, Scatter)) for name in writes(node)}
    yield from program.buffers.keys() - made
    for node in program.nodes:
        if isinstance(node, Extern):
            yield from reads(node)
        elif isinstance(node, Scatter):
            yield node.out


def _aligned(buffer: Buffer) -> tuple[sympy.Expr, ...] | None:
    """The strides of a row-major buffer with aligned rows; None where it is not one, or has them."""
    size = buffer.dtype.itemsize
    if len(buffer.shape) < 2 or not all(length.is_Integer and length > 0 for length in buffer.shape):
        return None
    row = int(buffer.shape[-1])
    if row * size % BYTES == 0 or row * size < SHORTEST:
        return None
    strides: list[sympy.Expr] = []
    plain, apart = sympy.Integer(1), sympy.Integer(1)
    for position, (length, stride) in enumerate(reversed(list(zip(buffer.shape, buffer.strides, strict=True)))):
        if stride != plain and length != 1:
            return None
        strides.append(apart)
        plain *= length
        apart *= length if position else sympy.Integer(-(-row * size // BYTES) * BYTES // size)
    return tuple(reversed(strides))
