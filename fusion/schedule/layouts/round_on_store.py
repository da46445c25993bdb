"""Stores values in 16 bits that every reader rounds to 16 bits.

    g float32[m, k] = gelu(…)          g bfloat16[m, k] = round(gelu(…))
    Σ_k round(g[m, k]) · w[k, n]   →   Σ_k g[m, k] · w[k, n]

`Program → Program`, with the same numbers.  A value that eager rounds where it stores it is rounded where it is read,
as long as it may stay in registers; if it is stored after all, half the bytes suffice.  If the program has the rounded
value as well, all read that.  Unchanged: values that some reader needs unrounded, in another type or as they are in
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import torch

from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Cast, Expr, Load, make_cast, postorder, rewrite
from fusion.lowering.ir.program import Compute, Extern, Map, Node, Program, reads, with_exprs
from fusion.lowering.ir.scalar_ops import HALVES
from fusion.schedule.layouts.private_maps import alternatives_with


def round_on_store(program: Program) -> Program:
    """Store maps in the dtype in which they are read; the same object where there are none.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import bfloat16, empty
    >>> show_program(round_on_store, lambda x: x.sin().to(bfloat16) * 2, empty(3, 4))
      input x: f32[3, 4]
    - sin: f32[3, 4] = map(i0:3, i1:4) sin(x[i0, i1])
    + sin: bf16[3, 4] = map(i0:3, i1:4) bf16(sin(x[i0, i1]))
    - _to_copy: bf16[3, 4] = map(i0:3, i1:4) bf16(sin[i0, i1])
    + _to_copy: bf16[3, 4] = map(i0:3, i1:4) sin[i0, i1]
      mul: bf16[3, 4] = map(i0:3, i1:4) ~bf16(f32(_to_copy[i0, i1]) * 2.0)
      return mul
    """
    stored_maps = {node.out for node in program.nodes if isinstance(node, Map)} - set(program.output_names())
    wide = {name for name in stored_maps if program.buffers[name].dtype is torch.float32}
    dtypes_of = {name: dtypes for name, dtypes in _read_as(program).items() if name in wide and len(dtypes) == 1}
    narrow = {name: dtype for name, (dtype,) in dtypes_of.items() if dtype in HALVES}
    if not narrow:
        return program
    copies = _rounded_copies(program, narrow)

    def rule(expr: Expr) -> Expr | None:
        load = expr.arg if isinstance(expr, Cast) else None
        if not isinstance(load, Load) or load.buffer not in narrow or load.dtype in HALVES:
            return None
        return Load(copies.get(load.buffer, load.buffer), load.index, narrow[load.buffer], load.mask)

    def read_rounded(node: Compute) -> Compute:
        if narrow.keys().isdisjoint(reads(node)) or node.out in copies.values():
            return node
        return with_exprs(node, rewrite(node.exprs, rule))

    nodes: list[Node] = []
    for node in program.nodes:
        if not isinstance(node, (Extern, Chunked)):
            node = read_rounded(node)
        if isinstance(node, Map) and node.out in narrow.keys() - copies.keys():
            node = replace(node, expr=make_cast(node.expr, narrow[node.out]))
        nodes.append(node)
    buffers = [replace(program.buffers[name], dtype=dtype) for name, dtype in narrow.items() if name not in copies]
    return program.edited(nodes, buffers=buffers, library=alternatives_with(program, read_rounded))


def _rounded_copies(program: Program, narrow: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Return the values of which the program has a rounded copy that its other readers can read, with these copies."""
    copies: dict[str, str] = {}
    early: set[str] = set()
    readers = Counter(name for node in program.nodes for name in set(reads(node)))
    for node in program.nodes:
        read = narrow.keys() & {*reads(node)}
        if isinstance(node, Map) and isinstance(node.expr, Cast) and isinstance(node.expr.arg, Load):
            load = node.expr.arg
            whole = load.mask is None and load.index == tuple(axis.symbol for axis in node.axes)
            name, is_first = load.buffer, load.buffer not in early | copies.keys()
            if whole and is_first and narrow.get(name) is node.expr.dtype and readers[name] > 1:
                copies[name] = node.out
        early |= read - copies.keys()
    return copies


def _read_as(program: Program) -> dict[str, set[torch.dtype | None]]:
    """Return the dtypes to which each tensor is rounded where it is read; None for a read without rounding."""
    dtypes: dict[str, set[torch.dtype | None]] = {}
    for node in (*program.nodes, *chain.from_iterable(program.library.values())):
        own = () if isinstance(node, (Extern, Chunked)) else node.exprs
        rounded_only = set[str]()
        for part in postorder(*own):
            if isinstance(part, Cast) and isinstance(part.arg, Load):
                rounded_only.add(part.arg.buffer)
                dtypes.setdefault(part.arg.buffer, set()).add(part.dtype)
            else:
                direct = [child.buffer for child in part.children() if isinstance(child, Load)]
                rounded_only.update(direct)
                for name in direct:
                    dtypes.setdefault(name, set()).add(None)
        roots = {part.buffer for part in own if isinstance(part, Load)}
        for name in roots | (set(reads(node)) - rounded_only):
            dtypes.setdefault(name, set()).add(None)
    return dtypes
