"""Aligns loops over rows that start and end at any address, so that threads load full words.

    for r in 0 … 50257:  x[50257*i + r]      becomes      for r in s … s + 50257:  x[8*(50257*i // 8) + r],  s = i % 8

`shifted`, given a kernel over a dimension of rows and a loop dimension, returns an equal kernel whose loop index
counts from an aligned address of as many of the streamed tensors as possible, and `Dim.shift`, the index at which the
row begins.  A thread then moves 16 bytes at a time, except in the first block and in the last one.

Unchanged: loops that scan or update, loops over rows that are aligned or of unknown length, and loops in which an index
is not linear in the loop index.  (measured: docs/performance.md, `aligned_rows`)

`word_load` tells which loads read the word in which a row ends, `word_store` which stores write all others at once.

    ri < 50257      becomes      ri < 50264      for 8 elements in a word

A mask that may end anywhere makes each thread load one element at a time, which takes more instructions and registers
than the rest of a kernel.  A word that contains an element of the row can be read as a whole: no allocation begins or
ends within one.  The elements beyond the row are not used, since folds and stores have separate masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.triton.blocks.dims import WORD, Blocked, Dim
from fusion.lowering.indexing import FloorDiv, Mod, coefficient, simplify, substitute_all
from fusion.lowering.ir.expr import Expr, Load, index_of, loads, postorder, rewrite
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    Loop,
    Param,
    Prefix,
    Role,
    Stmt,
    Store,
    map_statements,
    statements,
    values_of,
    with_values,
)

_LEAST = 1 << 13
"""The shortest rows that are worth three loops instead of one."""

_ALIGNED_INDEX = sympy.Symbol("place", integer=True, nonnegative=True)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The elements that a loop moves: for each row from `base` (in elements) on, `word` elements at a time where
    aligned.

    `strides` are the strides of the other axes, and the constant term; None where they are not numbers.
    """

    base: sympy.Expr
    word: int
    strides: tuple[int, ...] | None

    def is_aligned(self) -> bool:
        return self.strides is not None and all(stride % self.word == 0 for stride in self.strides)

    def follows(self, other: _Stream) -> bool:
        """Return whether this stream is aligned wherever `other` is."""
        if self.strides is None or other.strides is None or other.word % self.word:
            return False
        return all((a - b) % other.word == 0 for a, b in zip(self.strides, other.strides, strict=True))


def shifted(kernel: Kernel, dims: Sequence[Dim]) -> tuple[Kernel, tuple[Dim, ...]]:
    """Return the kernel with its loop shifted, if that pays, and its dimensions; the shift is still over axes."""
    long = _candidate(kernel, dims)
    if long is None:
        return kernel, tuple(dims)
    (axis,) = long.axes
    streams = list(_streams(kernel, axis.symbol))
    now = sum(stream.is_aligned() for stream in streams)
    odd = [stream for stream in streams if stream.strides is not None and not stream.is_aligned()]
    best = max(odd, key=lambda each: sum(stream.follows(each) for stream in streams), default=None)
    if best is None or sum(stream.follows(best) for stream in streams) <= now:
        return kernel, tuple(dims)
    shift = Mod(best.base, best.word)
    sizes = {each.symbol: each.size for each in kernel.axes} | {axis.symbol: axis.size + best.word - 1}
    aligned = {stream.base for stream in streams if stream.follows(best)}
    body = _from_aligned(kernel.body, axis.symbol, shift, aligned, sizes)
    return replace(kernel, body=body), tuple(replace(dim, shift=shift) if dim is long else dim for dim in dims)


def _candidate(kernel: Kernel, dims: Sequence[Dim]) -> Dim | None:
    """Return the dimension that could be shifted: one long axis, looped over alone, in which all indices are linear."""
    if [dim.role for dim in dims] != [Role.GRID, Role.LOOP] or len(dims[1].axes) != 1:
        return None
    (axis,) = dims[1].axes
    every = list(statements(kernel.body))
    loops = [stmt for stmt in every if isinstance(stmt, Loop)]
    simple = all(isinstance(stmt, (Fold, Loop)) or (isinstance(stmt, Store) and stmt.axes is None) for stmt in every)
    if not axis.size.is_Integer or axis.size < _LEAST or not simple or any(loop.where is not None for loop in loops):
        return None
    roots = [value for stmt in every for value in values_of(stmt)]
    indices = [index for node in postorder(*roots) for index in index_of(node)]
    indices += [stmt.offset for stmt in every if isinstance(stmt, Store) and not isinstance(stmt.offset, Expr)]
    return dims[1] if all(coefficient(index, axis.symbol) is not None for index in indices) else None


def _streams(kernel: Kernel, axis: sympy.Symbol) -> Iterator[_Stream]:
    """Yield the contiguous loads and stores along the axis in each loop."""
    others = [each.symbol for each in kernel.axes if each.symbol != axis]
    for loop in (stmt for stmt in kernel.body if isinstance(stmt, Loop)):
        streamed = [(load.buffer, load.index[0]) for load in loads(*(v for stmt in loop.body for v in values_of(stmt)))]
        streamed += [(stmt.param, stmt.offset) for stmt in loop.body if isinstance(stmt, Store)]
        for name, offset in streamed:
            if isinstance(offset, Expr) or coefficient(offset, axis) != 1:
                continue
            base = sympy.expand(offset - axis)
            strides = [coefficient(base, other) for other in others]
            strides.append(base.xreplace(dict.fromkeys(others, sympy.Integer(0))))
            known = tuple(int(stride) for stride in strides if stride is not None and stride.is_Integer)
            word = max(1, WORD // kernel.param(name).dtype.itemsize)
            yield _Stream(base, word, known if len(known) == len(strides) else None)


def _from_aligned(
    body: Sequence[Stmt],
    axis: sympy.Symbol,
    shift: sympy.Expr,
    aligned: set[sympy.Expr],
    sizes: Mapping[sympy.Symbol, sympy.Expr],
) -> tuple[Stmt, ...]:
    """Return `body` with its loop counted from `shift` elements before the row; bases in `aligned` are rounded down by
    it.
    """
    word = shift.args[1]
    bounds = {**sizes, _ALIGNED_INDEX: sizes[axis]}

    def rounded(offset: sympy.Expr) -> sympy.Expr:
        base = sympy.expand(offset - axis)
        if coefficient(offset, axis) == 1 and base in aligned:
            return word * FloorDiv(base, word) + _ALIGNED_INDEX
        return offset.xreplace({axis: _ALIGNED_INDEX - shift})

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Load) or isinstance(node.index[0], Expr):
            return None
        return Load(node.buffer, (rounded(node.index[0]),), node.dtype, node.mask)

    def rewritten(values: Sequence[Expr]) -> list[Expr]:
        rewritten_values = substitute_all(rewrite(values, rule), {axis: _ALIGNED_INDEX - shift}, bounds)
        return list(substitute_all(rewritten_values, {_ALIGNED_INDEX: axis}, dict(sizes)))

    def rebuilt(stmt: Stmt) -> Stmt:
        assert not isinstance(stmt, Prefix)
        stmt = with_values(stmt, rewritten(values_of(stmt)))
        if not isinstance(stmt, Store) or isinstance(stmt.offset, Expr):
            return stmt
        return replace(stmt, offset=simplify(rounded(stmt.offset).xreplace({_ALIGNED_INDEX: axis}), dict(sizes)))

    return map_statements(body, rebuilt)


def word_load(blocked: Blocked, load: Load) -> tuple[Dim, int] | None:
    """Return the dimension that `load` reads in words, and the elements of a word; None for any other load."""
    return None if load.mask is not None else _in_words(blocked, load.buffer, load.index[0])


def word_store(blocked: Blocked, store: Store) -> tuple[Dim, int] | None:
    """Return the dimension that `store` writes in words, but for the elements of the words in which a row begins and
    ends, and the elements of a word; None for any other store.
    """
    return None if store.where is not None else _in_words(blocked, store.param, store.offset)


def _in_words(blocked: Blocked, name: str, offset: sympy.Expr | Expr) -> tuple[Dim, int] | None:
    """Return the last dimension and the elements of a word, if a loop over it moves words, of which some are no part of
    a row.
    """
    if blocked.contraction or isinstance(offset, Expr) or not blocked.dims:
        return None
    param, dim = blocked.kernel.param(name), blocked.dims[-1]
    word = WORD // param.dtype.itemsize
    if dim.role is not Role.LOOP or not dim.size.is_Integer or not starts_with_word(param, offset, dim):
        return None
    ends_with_word = dim.shift == 0 and int(dim.size) % word == 0
    return None if word < 2 or ends_with_word else (dim, word)


def starts_with_word(param: Param, offset: sympy.Expr, dim: Dim) -> bool:
    """Return whether the elements along a dimension follow each other, and its first index is the start of a word."""
    if not param.aligned or coefficient(offset, dim.symbol) != 1:
        return False
    word, start = WORD // param.dtype.itemsize, sympy.expand(offset - dim.symbol)
    return all(int(term.as_coeff_Mul()[0]) % word == 0 for term in sympy.Add.make_args(start))
