"""Pads the rows of intermediate matrices so that they start at aligned addresses.

    gradient of logits bf16[8192, 50257] strides [50257, 1]   →   strides [50264, 1]

TMA, asynchronous copies and libraries require rows at multiples of 16 bytes; a product of misaligned rows is several
times slower.  Where a program computes such rows for products, they are padded.  Where they are inputs, or visible
outside generated kernels, products read a copy, if that is predicted to pay off.

Input: a Program; output: the same one over buffers with other strides, and with library calls that split a misaligned
size.  Unchanged: rows so short that the padding would cost more than it gains, and operands that library calls do not
read as matrices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import sympy
from typing_extensions import assert_never

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import axis_symbol
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Load, loads, renamed
from fusion.lowering.ir.program import (
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
from fusion.lowering.ir.sizes import estimate
from fusion.schedule.chunks.matrices import product_calls
from fusion.schedule.clusters.misaligned_rows import BYTES, generated_share, is_odd, padded_strides
from fusion.schedule.iteration.naming import unused


def align_rows(
    program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int] | None = None
) -> Program:
    """Align the rows of multiplied matrices; the same object where all are aligned, or no product is chained.

    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import bfloat16, empty
    >>> show_program(
    ...     lambda program: align_rows(program, TARGET.capabilities),
    ...     lambda x: x.to(bfloat16) @ x[0].to(bfloat16)[:, None],
    ...     empty(512, 1001),
    ... )
      input x: f32[512, 1001]
    - _to_copy: bf16[512, 1001] = map(i0:512, i1:1001) bf16(x[i0, i1])
    + _to_copy: bf16[512, 1001] strides (1008, 1) = map(i0:512, i1:1001) bf16(x[i0, i1])
      _to_copy_1: bf16[1001] = map(i0:1001) bf16(x[0, i0])
      mm: bf16[512, 1] = contract(i0:512, i1:1 over r0:1001; rows i0, columns i1; in f32) _to_copy[i0, r0],
            _to_copy_1[r0]
      return mm
    """
    if not capabilities.lone_products or "dot" not in capabilities.fold_ops:
        return program
    misaligned = {name for name in _multiplied(program) if is_odd(program.buffers[name])} & set(_fixed(program))
    misaligned = {name for name in misaligned if _pays(name, program, capabilities, hints or {})}
    if misaligned:
        program = _with_copies(program, misaligned)
    strides_of = {name: strides for name in _multiplied(program) if (strides := padded_strides(program.buffers[name]))}
    for name in {*_fixed(program), *_read_unlike_stored(program)}.intersection(strides_of):
        del strides_of[name]
    if not strides_of:
        return program
    buffers = {name: replace(b, strides=strides_of.get(name, b.strides)) for name, b in program.buffers.items()}
    origins: dict[str, str] = {}
    library: dict[str, tuple[Node, ...]] = {}
    for node in program.nodes:
        if isinstance(node, Contract) and node.out in program.library and not strides_of.keys().isdisjoint(reads(node)):
            calls = product_calls(node, buffers, BYTES)
            library[node.out] = calls or program.library[node.out]
            origins.update((name, node.out) for call in calls for name in writes(call))
    return program.edited(buffers=buffers.values(), origins=origins, library=library)


def _pays(name: str, program: Program, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int]) -> bool:
    """Return whether the products of a matrix with misaligned rows lose more time than a copy of it takes."""

    def moved(buffers: Iterable[str]) -> float:
        touched = (program.buffers[each] for each in buffers)
        return capabilities.rates.memory_us(sum(estimate(b.numel, hints) * b.dtype.itemsize for b in touched))

    lost = 0.0
    for node in program.nodes:
        if isinstance(node, Contract) and name in reads(node):
            points = math.prod(estimate(axis.size, hints) for axis in (*node.axes, *node.over))
            multiplied = capabilities.rates.product_us_of(2 * points, node.lhs.dtype.itemsize)
            memory = moved({node.out, *reads(node)})
            share = generated_share(node, partial(estimate, hints=hints), capabilities)
            lost += max(multiplied / share, memory) - max(multiplied, memory)
    return lost > 2 * moved([name]) + capabilities.rates.launch_us


def _with_copies(program: Program, misaligned: Collection[str]) -> Program:
    """Redirect products to aligned copies of misaligned matrices."""
    buffers = dict(program.buffers)
    copies: dict[str, str] = {}
    origins: dict[str, str] = {}
    library = dict(program.library)
    nodes: list[Node] = []
    for name in sorted(set(misaligned) - {name for node in program.nodes for name in writes(node)}):
        nodes.append(_copy(name, buffers, copies))
    for node in program.nodes:
        if isinstance(node, Contract):
            lhs, rhs = renamed(node.exprs, copies)
            if (lhs, rhs) != node.exprs:
                node = replace(node, lhs=lhs, rhs=rhs)
                if node.out in library:  # its calls read the copies where they can use the strides
                    library[node.out] = product_calls(node, buffers, BYTES) or library[node.out]
            matrices = (*reads(node), *(name for call in library.get(node.out, ()) for name in writes(call)))
            origins.update((name, node.out) for name in matrices if name not in program.origins and name not in origins)
        nodes.append(node)
        nodes.extend(_copy(name, buffers, copies) for name in writes(node) if name in misaligned)
    return program.edited(nodes, buffers=buffers.values(), origins=origins, library=library)


def _copy(name: str, buffers: dict[str, Buffer], copies: dict[str, str]) -> Map:
    """Return a node that copies a matrix into a new one, which is added to `buffers` and `copies`."""
    original = buffers[name]
    copies[name] = unused(f"{name}_aligned", buffers)
    buffers[copies[name]] = replace(original, name=copies[name])
    axes = tuple(Axis(axis_symbol(position), size) for position, size in enumerate(original.shape))
    return Map(copies[name], axes, Load(name, tuple(axis.symbol for axis in axes), original.dtype))


def _read_unlike_stored(program: Program) -> Iterator[str]:
    """Yield operands of library products that cannot use the matrices in the layout in which they are stored."""
    for node in program.nodes:
        if isinstance(node, Contract) and not product_calls(node, dict(program.buffers), BYTES):
            for call in program.library.get(node.out, ()):
                yield from reads(call)


def _multiplied(program: Program) -> Iterator[str]:
    """Yield the 16-bit matrices that contractions read row by row."""
    for node in program.nodes:
        if isinstance(node, Contract):
            axes = {axis.symbol for axis in (*node.axes, *node.over)}
            for load in loads(*node.exprs):
                if load.dtype.itemsize == 2 and len(load.index) > 1 and load.index[-1] in axes:
                    yield load.buffer


def _fixed(program: Program) -> Iterator[str]:
    """Yield the buffers whose strides are visible outside generated kernels."""
    yield from program.output_names()
    computed = {
        name for node in program.nodes if not isinstance(node, (Extern, Chunked, Scatter)) for name in writes(node)
    }
    yield from program.buffers.keys() - computed
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
