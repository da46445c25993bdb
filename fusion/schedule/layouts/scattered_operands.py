"""Copies operands of products that are contiguous along no axis of the product, so that it reads them in rows.

    flattened images with channels last, as the rows of a product: x[k % 36 * 256 + k // 36]

`Program → Program`, for targets that price memory requests (`Capabilities.sector`).  A tile of a product is contiguous
along its rows, its columns or the folded axis; where an operand is along none of them, every element is a separate
memory request, in each tile that multiplies it.  The copy is a map, which is read and written in rows; clusters still
take it in where their price says so.  (measured: docs/performance.md, `scattered_operands`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from fusion.codegen.target import Capabilities
from fusion.lowering.indexing import axis_symbol, flatten, substitute
from fusion.lowering.ir.expr import Expr, Load, free_axes, loads
from fusion.lowering.ir.program import Axis, Buffer, Contract, Map, Node, Program, axis_sizes
from fusion.lowering.ir.sizes import estimate
from fusion.lowering.value import contiguous_strides
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.iteration.contiguity import SCATTERED, is_scattered, requests_per_element
from fusion.schedule.iteration.dependences import bytes_of
from fusion.schedule.iteration.naming import unused


def copy_scattered_operands(
    program: Program,
    capabilities: Capabilities,
    chains: Sequence[Cluster],
    hints: Mapping[sympy.Symbol, int] | None = None,
) -> tuple[Program, tuple[Cluster, ...]]:
    """Copy scattered operands of the products outside the chains `chains`; return the program, and the chains in it.

    >>> from dataclasses import replace
    >>> from fusion.inspect.examples import TARGET, show_program
    >>> from torch import channels_last, empty
    >>> requests = replace(TARGET.capabilities, sector=32)
    >>> show_program(
    ...     lambda program: copy_scattered_operands(program, requests, ())[0],
    ...     lambda x, w: x.flatten(1) @ w,
    ...     empty(1024, 32, 6, 6).to(memory_format=channels_last),
    ...     empty(1152, 48),
    ... )
      input x: f32[1024, 32, 6, 6] strides (1152, 1, 192, 32)
      input w: f32[1152, 48]
    + mm_operand: f32[1024, 1152] = map(i0:1024, i1:1152) x[i0, i1//36, (i1//6)%6, i1%6]
    - mm: f32[1024, 48] = contract(i0:1024, i1:48 over r0:1152; rows i0, columns i1; in f32) x[i0, r0//36,
            (r0//6)%6, r0%6], w[r0, i1]
    + mm: f32[1024, 48] = contract(i0:1024, i1:48 over r0:1152; rows i0, columns i1; in f32) mm_operand[i0, r0],
            w[r0, i1]
      return mm
    """
    if not capabilities.sector:
        return program, tuple(chains)
    chained = {member for cluster in chains for member in cluster.members}
    copies: dict[str, tuple[Buffer, str]] = {}
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        if isinstance(node, Contract) and position not in chained:
            lhs, rhs = (
                _copied(program, node, operand, capabilities, hints or {}, nodes, copies)
                for operand in (node.lhs, node.rhs)
            )
            node = replace(node, lhs=lhs, rhs=rhs)
        nodes.append(node)
    if not copies:
        return program, tuple(chains)
    origins = {name: out for name, (_, out) in copies.items()}
    copied = program.edited(nodes, buffers=[buffer for buffer, _ in copies.values()], origins=origins)
    return copied, positions_in(copied, program, chains)


def _copied(
    program: Program,
    product: Contract,
    operand: Expr,
    capabilities: Capabilities,
    hints: Mapping[sympy.Symbol, int],
    nodes: list[Node],
    copies: dict[str, tuple[Buffer, str]],
) -> Expr:
    """Return an operand, or the load of its copy, whose node is appended to `nodes`."""
    if not any(_is_costly(program, product, load, capabilities, hints) for load in loads(operand)):
        return operand
    varied = free_axes(operand)
    axes = [axis for axis in (*product.axes, *product.over) if axis.symbol in varied]
    name = unused(f"{product.out}_operand", {*program.buffers, *copies})
    buffer, node = contiguous_copy(name, operand, axes, program.buffers[product.out].device)
    copies[name] = buffer, product.out
    nodes.append(node)
    return Load(name, tuple(axis.symbol for axis in axes), operand.dtype)


def contiguous_copy(name: str, value: Expr, axes: Sequence[Axis], device: torch.device) -> tuple[Buffer, Map]:
    """Return the buffer and the node of a copy of `value`, which varies along `axes`, contiguous in their order."""
    own = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate(axes))
    names = {old.symbol: new.symbol for old, new in zip(axes, own, strict=True)}
    shape = tuple(axis.size for axis in own)
    copied = substitute(value, names, {axis.symbol: axis.size for axis in own})
    return Buffer(name, value.dtype, shape, contiguous_strides(shape), device), Map(name, own, copied)


def _is_costly(
    program: Program, product: Contract, load: Load, capabilities: Capabilities, hints: Mapping[sympy.Symbol, int]
) -> bool:
    """Return whether each element that a load reads is a request, and these take as long as the launch of a copy.

    Tensors that no cache holds are copied in any case: the kernel that makes them may write the rows itself.
    """
    sizes, buffer = axis_sizes(product), program.buffers[load.buffer]
    offset = flatten(load.index, buffer.strides, sizes)
    if isinstance(offset, Expr) or not is_scattered(offset, sizes, hints):
        return False
    if bytes_of(buffer, hints) >= SCATTERED:
        return True
    spanned = offset.free_symbols
    elements = math.prod(estimate(size, hints) for axis, size in sizes.items() if axis in spanned)
    apart = (estimate(axis.size, hints) for axis in product.axes if axis.symbol not in spanned)
    width = capabilities.sector // buffer.dtype.itemsize
    each = requests_per_element(offset, sizes, product.columns, width, hints)
    requests = each * elements * math.ceil(math.prod(apart) / capabilities.tiles.side)
    return capabilities.rates.memory_us(requests * capabilities.sector) > capabilities.rates.launch_us
