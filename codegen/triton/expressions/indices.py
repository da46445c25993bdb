"""Writes index expressions as Triton text, and proves which indices need 64 bits or a mask.

Input: a sympy expression over linear indices and sizes; output: integer text, every index broadcast along its own
dimension of the tile (`xi[:, None] * 4096 + ri[None, :]`).  Bounds decide which indices must be int64 (an offset could
reach 2³¹, or a size is not known), and which dimensions need a mask (the size is not a multiple of the block).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy

from fusion.codegen.triton.blocks import Blocked, Config, Dim, LaneDim
from fusion.codegen.triton.blocks.dims import constant_quotients
from fusion.codegen.triton.expressions.code import (
    ATOM,
    PRODUCT,
    SUM,
    UNARY,
    Code,
    Operand,
    as_code,
    compose,
    listed,
    minus,
)
from fusion.lowering.indexing import FloorDiv, Mod, bounds
from fusion.lowering.ir.division import may_be_negative
from fusion.lowering.ir.expr import Expr, Load, index_of, postorder
from fusion.lowering.ir.kernel import Loop, Role, Stmt, Store, statements, values_of

INT32_END = 2**31


@dataclass(frozen=True, slots=True)
class Layout:
    """The properties of each dimension once the blocks are chosen.

    Attributes:
        tiled: dimensions that tiles span; a GRID dimension in blocks of 1 is one value per program.
        depth: the loop depth at which the index of a dimension is defined.
        wide: dimensions whose index is an int64.
        grid_depth: the loop depth at which GRID indices are defined: 0 where a program computes one block, more where
            it computes several in sequence (persistent programs).
        parts: the number of parts into which a tile divides the dimensions `parted`.
        parted: dimensions of which a tile spans only a part of the block.
        within_limit: the sizes are assumed to be such that all indices fit into 32 bits (`limits`).
    """

    blocked: Blocked
    config: Config
    tiled: tuple[Dim, ...]
    depth: Mapping[Dim, int]
    wide: frozenset[Dim]
    grid_depth: int = 0
    parts: int = 1
    parted: tuple[Dim, ...] = ()
    within_limit: bool = False

    @property
    def constants(self) -> dict[str, int]:
        """Return the block sizes that the function of the kernel takes, by name."""
        return {dim.constant: self.config.block(dim.name) for dim in self.blocked.dims if dim in self.tiled}

    def with_parts(self, dim: Dim) -> Layout:
        """Return the layout of the epilogue, in which a loop divides `dim` into parts."""
        if self.parts == 1:
            return self
        return replace(self, parted=(dim,), depth={**self.depth, dim: self.depth[dim] + 1})

    def width(self, dim: Dim) -> Code:
        """Return the elements of `dim` in a tile: the threads, where each has one."""
        if isinstance(dim, LaneDim):
            return as_code(dim.count)
        return compose("{} // {}", dim.constant, self.parts) if dim in self.parted else as_code(dim.constant)

    def dim(self, symbol: sympy.Symbol) -> Dim | None:
        """Return the dimension whose linear index is `symbol`."""
        return next((dim for dim in self.blocked.dims if dim.symbol == symbol), None)

    def within(self, index: sympy.Expr) -> tuple[Dim, ...]:
        """Return the dimensions `index` depends on, in tile order."""
        return tuple(dim for dim in self.blocked.dims if dim.symbol in index.free_symbols)

    def spanned(self, index: sympy.Expr) -> tuple[Dim, ...]:
        """Return the tiled dimensions `index` depends on, in tile order."""
        return tuple(dim for dim in self.within(index) if dim in self.tiled)

    def by_block(self, index: sympy.Expr) -> sympy.Expr:
        """Return `index` with quotients that are constant in a block of a loop (the group of a scale) taken at its
        start.
        """
        constant = {
            quotient: FloorDiv(start_symbol(dim), quotient.args[1])
            for dim in self.within(index)
            if dim.role is Role.LOOP and dim not in self.wide
            for quotient in constant_quotients(index, dim, self.config.block(dim.name))
        }
        return index.xreplace(constant) if constant else index

    def masked(self, dim: Dim) -> bool:
        """Return whether a block of `dim` can extend past its end."""
        return dim in self.tiled and (
            dim.size == 0 or dim.shift != 0 or not (dim.size / self.config.block(dim.name)).is_integer
        )

    def narrow(self, index: sympy.Expr) -> bool:
        """Return whether int32 suffices to compute `index` exactly."""
        dims = self.within(index)
        if self.within_limit:
            return True
        if any(dim in self.wide for dim in dims) or len(index.free_symbols) > len(dims):
            return False
        return fits(_reach([index], self.blocked.sizes()))

    def shape(self, dims: Sequence[Dim], *before: int) -> Code:
        """Return the shape of a tile over `dims`, perhaps with further dimensions `before` them."""
        return compose("[{}]", listed([*before, *(self.width(dim) for dim in dims)]))

    def summands(self, offset: sympy.Expr) -> list[sympy.Expr]:
        """Return `offset` as terms in the order in which to add them to a pointer.

        Terms with one value per program come first, then terms that vary over the tile; terms known before a loop come
        before terms known only inside it.
        """
        terms: dict[tuple[int, bool], list[sympy.Expr]] = {}
        for term in sympy.Add.make_args(sympy.expand_mul(offset)):
            dims = self.within(term)
            depth = max((self.depth[dim] for dim in dims), default=0)
            terms.setdefault((depth, any(dim in self.tiled for dim in dims)), []).append(term)
        return [sympy.Add(*terms[key]) for key in sorted(terms)]


def start_symbol(dim: Dim) -> sympy.Symbol:
    """Return the symbol of the first index of the current block of a loop over `dim`."""
    return sympy.Symbol(f"{dim.name} start", integer=True, nonnegative=True)


def lay_out(
    blocked: Blocked, config: Config, grid_depth: int = 0, *, parts: int = 1, within_limit: bool = False
) -> Layout:
    """Return the layout of `blocked` under `config`; the other arguments: see `Layout`."""
    tiled = tuple(dim for dim in blocked.dims if dim.role is not Role.GRID or config.block(dim.name) > 1)
    assert not any(blocked.single(dim) for dim in tiled), "rows with different shifts need a program each"
    depth = {dim: grid_depth if dim.role is Role.GRID else 0 for dim in blocked.dims}

    def descend(body: Sequence[Stmt], level: int) -> None:
        for stmt in body:
            if isinstance(stmt, Loop):
                depth.update(dict.fromkeys(blocked.of(stmt.axes), level + 1))
                descend(stmt.body, level + 1)

    descend(blocked.body, grid_depth)
    unproven = Layout(blocked, config, tiled, depth, frozenset(), grid_depth, parts, within_limit=within_limit)
    return unproven if within_limit else replace(unproven, wide=_wide(unproven))


def fits(span: tuple[int, int] | None) -> bool:
    """Return whether all values between these bounds fit into int32."""
    return span is not None and span[0] > -INT32_END and span[1] < INT32_END


def _wide(layout: Layout) -> frozenset[Dim]:
    """Return the dimensions that must be indexed in int64 so that no sum or product overflows."""
    sizes = layout.blocked.sizes()
    wide: set[Dim] = set()
    for dim in layout.blocked.dims:
        reach = dim.reach + layout.config.block(dim.name)
        if not (reach.is_Integer and int(reach) < INT32_END):
            wide.add(dim)
    for index in summands(layout):
        for widen_grid in (True, False):
            terms = [term for term in sympy.Add.make_args(index) if _is_int32(layout, term, wide)]
            if fits(_reach(terms, sizes)):
                break
            dims = {dim for term in terms for dim in layout.within(term)}
            wide |= {dim for dim in dims if dim.role is Role.GRID} if widen_grid else dims
    return frozenset(wide)


def summands(layout: Layout) -> list[sympy.Expr]:
    """Return every sum of indices that the source will compute."""
    sums: list[sympy.Expr] = []
    body = list(statements(layout.blocked.body))
    for node in postorder(*(value for stmt in body for value in values_of(stmt))):
        for index in index_of(node):
            sums.extend(layout.summands(index) if isinstance(node, Load) else [index])
    for stmt in body:
        if isinstance(stmt, Store) and not isinstance(stmt.offset, Expr):
            sums.extend(layout.summands(stmt.offset))
    return sums


def _is_int32(layout: Layout, term: sympy.Expr, wide: set[Dim]) -> bool:
    """Return whether this term would be computed in int32: no factor of it is a wide index or a size (always int64)."""
    dims = layout.within(term)
    return len(term.free_symbols) == len(dims) and not any(dim in wide for dim in dims)


def _reach(terms: Sequence[sympy.Expr], sizes: Mapping[sympy.Symbol, sympy.Expr]) -> tuple[int, int] | None:
    """Return bounds on every partial sum of `terms`, and on all intermediate values of each.

    The operand of `(i + 7) % n` may be larger than the result.
    """
    low, high = 0, 0
    inner: list[tuple[int, int]] = []
    for term in terms:
        span = bounds(term, sizes)
        if span is None:
            return None
        low, high = low + min(int(span[0]), 0), high + max(int(span[1]), 0)
        for atom in term.atoms(FloorDiv, Mod):
            whole, by = atom.args
            reached = _reach(sympy.Add.make_args(whole), sizes)
            if reached is None:
                return None
            inner.append((reached[0], max(reached[1], 2 * int(by)) if may_be_negative(whole) else reached[1]))
    return min([low, *(span[0] for span in inner)]), max([high, *(span[1] for span in inner)])


# Text -----------------------------------------------------------------------------------------------------------------


def expand(code: Code, has: Sequence[Dim], wants: Sequence[Dim]) -> Code:
    """Return `code`, a tile over `has`, as one over `wants`, with size 1 along the new dimensions.

    A value without dimensions is unchanged; it combines with every tile.  A value per thread becomes one per element.
    """
    if not has or tuple(has) == tuple(wants):
        return code
    if isinstance(has[0], LaneDim):
        (along,) = wants
        return compose("{}({}, {}, {}, {})", "_of_lanes", code, along.constant, has[0].count, has[0].word)
    index = listed(Code(":" if dim in has else "None") for dim in wants)
    return compose("{}[{}]", code.at(ATOM), index)


def index_code(index: sympy.Expr, layout: Layout, variable: Callable[[sympy.Symbol], Operand]) -> Code:
    """Return `index` as integer code over the dimensions it spans; `variable` names the symbols in it."""
    wants = layout.spanned(index)

    def code_of(expr: sympy.Expr) -> Code:
        if expr.is_Integer:
            positive = Code(str(abs(int(expr))))
            return positive if expr >= 0 else minus(positive)
        if isinstance(expr, sympy.Symbol):
            dim = layout.dim(expr)
            has = (dim,) if dim is not None and dim in layout.tiled else ()
            return expand(as_code(variable(expr)), has, wants)
        if expr.is_Add:
            first, *others = sorted(expr.args, key=_written_order)
            total = code_of(first).at(SUM)
            for term in others:
                factor, rest = term.as_coeff_Mul()
                if factor < 0:
                    total = compose("{} - {}", total, code_of(-factor * rest).at(PRODUCT))
                else:
                    total = compose("{} + {}", total, code_of(term).at(SUM))
            return replace(total, binds=SUM)
        if expr.is_Mul:
            first, *others = sorted(expr.args, key=lambda arg: (arg.is_Integer, str(arg)))
            factors = [code_of(first).at(PRODUCT), *(code_of(other).at(UNARY) for other in others)]
            return listed(factors, " * ", PRODUCT)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return listed([code_of(expr.base).at(UNARY)] * int(expr.exp), " * ", PRODUCT)
        assert isinstance(expr, (FloorDiv, Mod)), f"no text for index {expr}"
        whole, divisor = expr.args
        by = code_of(divisor).at(UNARY)
        left = compose("{} % {}", code_of(whole).at(PRODUCT), by, binds=PRODUCT)
        if may_be_negative(whole):  # the device's division rounds to zero
            left = compose("({0} + {1}) % {1}", left.at(SUM), by, binds=PRODUCT)
            multiple = compose("{} - {}", code_of(whole).at(SUM), left.at(PRODUCT), binds=SUM)
        else:
            multiple = code_of(whole)
        if isinstance(expr, Mod):
            return left
        return compose("{} // {}", multiple.at(PRODUCT), by, binds=PRODUCT)

    return code_of(index)


def _written_order(term: sympy.Expr) -> tuple[bool, bool, int, str]:
    """Return the sort key of a term: added ones before subtracted ones, large strides first, constants last."""
    factor, rest = term.as_coeff_Mul()
    return bool(factor < 0), rest == 1, -abs(int(factor)), str(rest)
