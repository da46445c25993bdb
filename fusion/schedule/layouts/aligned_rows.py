"""Pads the rows of intermediate matrices so that they start at addresses the hardware can fetch from.

    gradient of logits bf16[8192, 50257] strides [50257, 1]   →   strides [50264, 1]

Tensor memory, asynchronous copies and libraries all want rows at multiples of 16 bytes; a product of rows that are not
so is several times slower.  Where a program makes such rows to multiply them, they are made apart.  Where they are
given, or seen outside generated kernels, products read a copy, if that is predicted to pay.

Input: a Program; output: the same one over buffers with other strides, and with library calls that take an odd size
apart.  Left as they are: rows so short that what they would gain is lost in the gaps, and what calls of the library
read in another way than as matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import sympy
from typing_extensions import assert_never

from fusion.codegen.target import Capabilities
from fusion.lowering.chunks import Chunked
from fusion.lowering.expr import Load, loads, renamed
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.program import (
    Axis,
    Buffer,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    Scan,
    Scatter,
    reads,
    writes,
)
from fusion.lowering.sizes import estimate
from fusion.schedule.chunks.matrices import product_calls
from fusion.schedule.clusters.misaligned_rows import BYTES, is_odd, padded_strides
from fusion.schedule.iteration.naming import unused


def align_rows(
    program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int] | None = None
) -> Program:
    """`program` with rows that are multiplied at aligned addresses; the same object where all are, or nothing is."""
    if not capabilities.lone_products or "dot" not in capabilities.fold_ops:
        return program
    odd = {name for name in _multiplied(program) if is_odd(program.buffers[name])} & set(_fixed(program))
    odd = {name for name in odd if _pays(name, program, capabilities, hints or {})}
    if odd:
        program = _with_copies(program, odd)
    found = {name: strides for name in _multiplied(program) if (strides := padded_strides(program.buffers[name]))}
    for name in {*_fixed(program), *_otherwise(program)}.intersection(found):
        del found[name]
    if not found:
        return program
    buffers = {name: replace(b, strides=found.get(name, b.strides)) for name, b in program.buffers.items()}
    origins: dict[str, str] = {}
    library: dict[str, tuple[Node, ...]] = {}
    for node in program.nodes:
        if isinstance(node, Contract) and node.out in program.library and not found.keys().isdisjoint(reads(node)):
            calls = product_calls(node, buffers, BYTES)
            library[node.out] = calls or program.library[node.out]
            origins.update((name, node.out) for call in calls for name in writes(call))
    return program.edited(buffers=buffers.values(), origins=origins, library=library)


def _pays(name: str, program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int]) -> bool:
    """Do the products of a matrix with odd rows lose more time than a copy of it takes?"""

    def moved(buffers: Iterable[str]) -> float:
        found = (program.buffers[each] for each in buffers)
        return sum(estimate(b.numel, hints) * b.dtype.itemsize for b in found) / capabilities.bandwidth

    lost = 0.0
    for node in program.nodes:
        if isinstance(node, Contract) and name in reads(node):
            points = math.prod(estimate(axis.size, hints) for axis in (*node.axes, *node.over))
            multiplied, memory = 2 * points / capabilities.matrix_flops, moved({node.out, *reads(node)})
            lost += max(multiplied / capabilities.odd_rows.product, memory) - max(multiplied, memory)
    return lost > 2 * moved([name]) + capabilities.launch_us


def _with_copies(program: Program, odd: Collection[str]) -> Program:
    """The program with products that read copies of `odd` matrices."""
    buffers = dict(program.buffers)
    copies: dict[str, str] = {}
    origins: dict[str, str] = {}
    library = dict(program.library)
    nodes: list[Node] = []
    for name in sorted(set(odd) - {name for node in program.nodes for name in writes(node)}):
        nodes.append(_copy(name, buffers, copies))
    for node in program.nodes:
        if isinstance(node, Contract):
            lhs, rhs = renamed(node.exprs, copies)
            if (lhs, rhs) != node.exprs:
                node = replace(node, lhs=lhs, rhs=rhs)
                if node.out in library:  # its calls read copies where they take matrices as they lie
                    library[node.out] = product_calls(node, buffers, BYTES) or library[node.out]
            made = (*reads(node), *(name for call in library.get(node.out, ()) for name in writes(call)))
            origins.update((name, node.out) for name in made if name not in program.origins and name not in origins)
        nodes.append(node)
        nodes.extend(_copy(name, buffers, copies) for name in writes(node) if name in odd)
    return program.edited(nodes, buffers=buffers.values(), origins=origins, library=library)


def _copy(name: str, buffers: dict[str, Buffer], copies: dict[str, str]) -> Map:
    """A node that copies a matrix into a new one with aligned rows, which is noted down."""
    given = buffers[name]
    copies[name] = unused(f"{name}_aligned", buffers)
    buffers[copies[name]] = replace(given, name=copies[name])
    axes = tuple(Axis(axis_symbol(position), size) for position, size in enumerate(given.shape))
    return Map(copies[name], axes, Load(name, tuple(axis.symbol for axis in axes), given.dtype))


def _otherwise(program: Program) -> Iterator[str]:
    """What is read by the library's calls of products, where they do not take matrices as they are stored."""
    for node in program.nodes:
        if isinstance(node, Contract) and not product_calls(node, dict(program.buffers), BYTES):
            for call in program.library.get(node.out, ()):
                yield from reads(call)


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
    made = {name for node in program.nodes if not isinstance(node, (Extern, Chunked, Scatter)) for name in writes(node)}
    yield from program.buffers.keys() - made
    for node in program.nodes:
        match node:
            case Extern() | Chunked():
                yield from reads(node)
            case Scatter():
                yield node.out
            case Map() | Reduce() | Scan() | Contract():
                pass
            case _:
                assert_never(node)
