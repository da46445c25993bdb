"""Values: expressions of a kernel as lines of Triton, each computed once, as far out of the loops as it can be.

What enters is an expression over linear indices; what leaves is a `Tile`: text and the dimensions it spans.  Lines go
into the scope of the innermost loop that the expression depends on, so that what does not change in a loop stands
before it.  Loads, shared expressions and long ones get a name; the rest is written where it is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import sympy
import torch

from codegen.triton.blocks import Dim
from codegen.triton.blocks.words import in_words
from codegen.triton.expressions.indices import Layout, expand, index_code, start_symbol
from codegen.triton.expressions.matrices import Stack
from codegen.triton.expressions.scopes import Lines, Names, Tile, Transfer
from codegen.triton.expressions.spell import AND, ATOM, COMPARE, SUM, Code, cast, literal, spell, typed
from codegen.triton.expressions.widths import int32_ranges
from codegen.triton.rewrites.interior import unconditional
from lowering.checks import CHECKED
from lowering.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, TileRef, loads, postorder
from lowering.kernel import Loop, Store, statements, values_of
from lowering.scalar_ops import SCALAR_OPS

_INLINE = 48  # characters of an expression that is used once and written in place


class Values(Lines):
    """Turns expressions into lines of a kernel.

    Args:
        fast: see `spell`.
        zero_fill: masked lanes of loads are 0 (operands of `dot` need it).
        behind: parameters that other programs of this launch have written, which the first-level cache may hold stale.
    """

    def __init__(
        self, layout: Layout, names: Names, *, fast: bool, zero_fill: bool, behind: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(names)
        self.layout = layout
        self.fast, self.zero_fill, self.behind = fast, zero_fill, behind
        self.program = "tl.program_id(0)"  # which program of the kernel this is, as text
        self.row_layout = ""  # of tiles of one dimension that begin as one number, where these need one
        self.starts: dict[Dim, str] = {}  # text of the first index of a program's or an iteration's block
        self.load_through: dict[Load, Transfer] = {}
        self.made_by: dict[Expr, Callable[[], Tile]] = {}  # expressions with lines of their own
        self.stack: Stack | None = None  # two products that are one
        self.store_through: dict[str, Transfer] = {}  # parameter name → descriptor
        self.full: frozenset[Dim] = frozenset()  # dimensions whose current block is known not to reach past the end
        self.eviction: dict[Load, str] = {}  # policies of loads in the loop being walked
        body = layout.blocked.body
        stmts = list(statements(body))
        roots = [value for stmt in stmts if not isinstance(stmt, Loop) for value in values_of(stmt)]
        self._uses, self._user = _uses(roots)
        interiors = [unconditional(stmt) for stmt in stmts if isinstance(stmt, Loop) and stmt.where is not None]
        inside = [value for loop in interiors for stmt in statements(loop.body) for value in values_of(stmt)]
        inside_uses, inside_user = _uses(inside)
        self._uses |= inside_uses
        self._user = {**inside_user, **self._user}
        self._ranges = int32_ranges([*roots, *inside], layout)
        self._mutable = {stmt.param for stmt in stmts if isinstance(stmt, Store)}
        self._mutable &= {load.buffer for load in loads(*roots)}
        self._stored: set[str] = set()
        self._numbers = frozenset(param.name for param in layout.blocked.kernel.params if param.number)

    def stored(self, param: str) -> None:
        """Forget what was loaded from `param`: it has just been written."""
        self._stored.add(param)
        if param in self._mutable:
            for scope in self.scopes:
                stale = [key for key in scope.known if isinstance(key, Expr) and _reads(key, param)]
                for key in stale:
                    del scope.known[key]

    def is_overwritten(self, roots: Sequence[Expr]) -> bool:
        """Is anything that `roots` load written by this kernel?"""
        return any(load.buffer in self._mutable for load in loads(*roots))

    def filled(self, dims: Sequence[Dim], number: str, dtype: str) -> Code:
        """A tile in which each element is `number`."""
        laid_out = f", {self.row_layout}" if self.row_layout else ""
        return Code(f"tl.full({self.layout.shape(dims)}, {number}, {dtype}{laid_out})")

    def forget(self, dim: Dim) -> None:
        """Forget the indices of `dim` and what follows from them: another layout needs its own."""
        for scope in self.scopes:
            for key in [key for key, tile in scope.known.items() if dim in tile.dims and not isinstance(key, TileRef)]:
                del scope.known[key]

    # Indices and masks ------------------------------------------------------------------------------------------------

    def index(self, dim: Dim) -> Tile:
        """The indices of the block of `dim`."""
        known = self.find(("index", dim))
        if known is not None:
            return known
        depth, text = self.layout.depth[dim], self.starts.get(dim, "")
        is_tile = dim in self.layout.tiled
        if is_tile:
            text = (f"{text} + " if text else "") + f"tl.arange(0, {self.layout.width(dim)})"
            if dim in self.layout.wide and ".to(tl.int64)" not in text:
                text = f"({text}).to(tl.int64)"
        tile = Tile(Code(text), (dim,) if is_tile else (), depth)
        if not text.isidentifier():
            tile = self.name(dim.symbol.name, tile)
        return self.bind(("index", dim), tile)

    def shift(self, dim: Dim) -> str:
        """Where on a shifted walk its first point lies, under a name."""
        known = self.find(("shift", dim)) or self.bind(
            ("shift", dim), self.name(f"{dim.name}_shift", self.index_tile(dim.shift))
        )
        return known.code.text

    def mask(self, dim: Dim, word: int = 1) -> Tile:
        """Where the indices of `dim` are inside it, or in a word of so many elements with one that is."""
        known = self.find(("mask", dim, word))
        if known is not None:
            return known
        index = self.index(dim)
        if word > 1:
            code = Code(f"{index.code.text} < {self._end_of_words(dim, word)}", COMPARE)
            return self.bind(("mask", dim, word), self.name(f"{dim.name}_words", replace(index, code=code)))
        limit = self.index_tile(dim.size).code.at(COMPARE + 1)
        code = Code(f"{index.code.text} < {limit}", COMPARE)
        if dim.shift != 0:
            start = self.shift(dim)
            code = Code(f"({index.code.text} >= {start}) & ({index.code.text} < {start} + {limit})", AND)
        return self.bind(("mask", dim, word), self.name(f"{dim.name}_mask", replace(index, code=code)))

    def _end_of_words(self, dim: Dim, word: int) -> str:
        """The index at which the last word of a walk ends."""
        if dim.shift == 0:
            return str(-(-int(dim.size) // word) * word)
        return f"({self.shift(dim)} + {int(dim.size) + word - 1}) // {word} * {word}"

    def masks(self, dims: Sequence[Dim], more: Tile | None = None) -> Tile | None:
        """Where a tile over `dims` is inside all of them and `more` holds; None if it always is."""
        edges = tuple(dim for dim in dims if self._is_edge(dim))
        inside = self.find(("masks", edges))
        if inside is None and edges:
            inside = self._both([self.mask(dim) for dim in edges])
            if len(edges) > 1:
                inside = self.name("mask", inside)
            self.bind(("masks", edges), inside)
        if inside is None or more is None:
            return inside or more
        return self._both([inside, more])

    def _is_edge(self, dim: Dim) -> bool:
        """Can the current block of `dim` reach past its end?"""
        return self.layout.masked(dim) and dim not in self.full

    def _both(self, parts: Sequence[Tile]) -> Tile:
        wants = self.join(part.dims for part in parts)
        codes = [expand(part.code, part.dims, wants) for part in parts]
        code = codes[0] if len(codes) == 1 else Code(" & ".join(c.at(AND + 1) for c in codes), AND)
        return Tile(code, wants, max(part.depth for part in parts))

    def join(self, spans: Iterable[Sequence[Dim]]) -> tuple[Dim, ...]:
        """The union of dimensions, in tile order."""
        found = {dim for span in spans for dim in span}
        return tuple(dim for dim in self.layout.blocked.dims if dim in found)

    def index_tile(self, index: sympy.Expr) -> Tile:
        """An index expression."""
        depth = max((self.layout.depth[dim] for dim in self.layout.within(index)), default=0)
        index = self.layout.by_block(index)
        return Tile(index_code(index, self.layout, self._variable), self.layout.spanned(index), depth)

    def _variable(self, symbol: sympy.Symbol) -> str:
        dim = self.layout.dim(symbol)
        if dim is not None:
            return self.index(dim).code.text
        return next((start for dim, start in self.starts.items() if start_symbol(dim) == symbol), symbol.name)

    # Memory -----------------------------------------------------------------------------------------------------------

    def pointer(self, param: str, offset: sympy.Expr | Expr) -> Tile:
        """The addresses `param + offset`; what a loop does not change is added before it."""
        pointer = Tile(Code(self.pointer_name(param)))
        if isinstance(offset, Expr):
            return self._advance(pointer, self.value(offset))
        for part in self.layout.parts(offset):
            if part == 0:
                continue
            step = self.index_tile(part)
            if step.depth > pointer.depth and pointer.code.binds != ATOM:
                key = ("pointer", pointer.code.text)
                pointer = self.find(key) or self.bind(key, self.name(f"{param}_at", pointer))
            pointer = self._advance(pointer, step)
        return pointer

    def moved(self, transfer: Transfer) -> tuple[tuple[Dim, ...], str, str]:
        """What a transfer moves: its dimensions in tile order, the text of its corner, `.T` if it has to be turned."""
        rows, columns = transfer.rows, transfer.columns
        dims = self.join(((rows,), (columns,)))
        placed = [dim for dim in (transfer.batch, rows, columns) if dim is not None]
        corner = transfer.corner or f"[{', '.join(self._coordinate(dim) for dim in placed)}]"
        return dims, corner, "" if dims[0] is rows else ".T"

    def _coordinate(self, dim: Dim) -> str:
        """Where a transfer begins along `dim`: an int32, whatever offsets are computed in."""
        start = self.starts.get(dim, "0")
        return f"tl.cast({start}, tl.int32)" if dim in self.layout.wide and start.isidentifier() else start

    def _advance(self, pointer: Tile, step: Tile) -> Tile:
        dims = self.join((pointer.dims, step.dims))
        text = f"{expand(pointer.code, pointer.dims, dims).at(SUM)} + {expand(step.code, step.dims, dims).at(SUM + 1)}"
        return Tile(Code(text, SUM), dims, max(pointer.depth, step.depth))

    def pointer_name(self, param: str) -> str:
        return f"{param}_ptr"

    def _load(self, node: Load) -> Tile:
        if node.buffer in self._numbers:
            number, zero = Tile(Code(node.buffer)), Tile(literal(0, node.dtype))
            return number if node.mask is None else self.select(self.value(node.mask), number, zero)
        transfer = self.load_through.get(node)
        if transfer is not None:
            dims, corner, turn = self.moved(transfer)
            depth = max(self.layout.depth[dim] for dim in dims)
            text = f"{transfer.name}.load({corner})"
            if transfer.batch is not None:
                text = f"tl.reshape({text}, {self.layout.shape((transfer.rows, transfer.columns))})"
            return Tile(Code(f"{text}{turn}"), dims, depth)
        offset = node.index[0]
        pointer = self.pointer(node.buffer, offset)
        condition = None if node.mask is None else self.value(node.mask)
        dims = self.join((pointer.dims, () if condition is None else condition.dims))
        words = in_words(self.layout.blocked, node)
        in_edge = words is not None and [dim for dim in dims if self._is_edge(dim)] == [words[0]]
        mask = self.mask(*words) if words is not None and in_edge else self.masks(dims, condition)
        depth = max(pointer.depth, 0 if mask is None else mask.depth)
        code = expand(pointer.code, pointer.dims, dims)
        if dims and not pointer.dims:
            code = Code(f"tl.broadcast_to({code.text}, {self.layout.shape(dims)})")
        text = code.text
        if mask is not None:
            text += f", mask={expand(mask.code, mask.dims, dims).text}"
            if node.mask is not None or self.zero_fill:
                text += f", other={literal(0, node.dtype).text}"
        policy = self.eviction.get(node)
        if node.buffer in self.behind:
            text += ', cache_modifier=".cg"'
        elif policy:
            text += f', eviction_policy="{policy}"'
        if node.buffer in self._stored and node.buffer in self._mutable:
            self.line("tl.debug_barrier()")  # other threads of this program wrote what is read now
            depth = self.depth
        return Tile(Code(f"tl.load({text})"), dims, depth)

    # Expressions ------------------------------------------------------------------------------------------------------

    def value(self, root: Expr) -> Tile:
        """`root`, after adding the lines that compute it."""
        stack = [root]
        while stack:
            node = stack[-1]
            if self.find(node) is not None:
                stack.pop()
                continue
            children = () if node in self.made_by else node.children()
            missing = [child for child in children if self.find(child) is None]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            self._define(node)
        found = self.find(root)
        assert found is not None
        return found

    def _define(self, node: Expr) -> None:
        tile = self._tile(node)
        if self._deserves_name(node, tile):
            tile = self.name(self._wish(node), tile)
        self.bind(node, tile)

    def _deserves_name(self, node: Expr, tile: Tile) -> bool:
        if tile.code.literal or tile.code.text.isidentifier():
            return False
        if isinstance(node, Load):
            return not self._is_cast_at_once(node)
        if isinstance(node, Cast) and isinstance(node.arg, Load) and self._is_cast_at_once(node.arg):
            return True
        if isinstance(node, Op) and node.name == CHECKED and tile.depth < self.depth:
            return True  # a loop would check it again in each block
        return (self._uses[node] > 1 and not isinstance(node, IndexValue)) or len(tile.code.text) > _INLINE

    def _is_cast_at_once(self, node: Load) -> bool:
        """Is this load written as `x = tl.load(…).to(tl.float32)`, on one line?"""
        return self._uses[node] == 1 and isinstance(self._user.get(node), Cast)

    def _wish(self, node: Expr) -> str:
        if isinstance(node, Cast) and isinstance(node.arg, Load):
            node = node.arg
        if isinstance(node, Load):
            return node.buffer
        if isinstance(node, Op):
            return node.name
        return node.kind if isinstance(node, Random) else type(node).__name__.lower()

    def _tile(self, node: Expr) -> Tile:
        if node in self.made_by:
            return self.made_by[node]()
        if isinstance(node, Const):
            return Tile(literal(node.value, node.dtype), narrow=node in self._ranges)
        if isinstance(node, IndexValue):
            return self._index_value(node)
        if isinstance(node, Load):
            return self._load(node)
        if isinstance(node, Random):
            seed, offset = self.value(node.seed), self._index_value(IndexValue(node.offset))
            function = {"uniform": "tl.rand", "normal": "tl.randn"}[node.kind]
            text = f"{function}({seed.code.text}, {typed(offset.code, torch.int64).text})"
            return Tile(Code(text), offset.dims, max(seed.depth, offset.depth))
        if isinstance(node, Cast):
            return self._cast(node)
        assert isinstance(node, Op), f"no text for {type(node).__name__}"
        return self._op(node)

    def _index_value(self, node: Expr) -> Tile:
        assert isinstance(node, IndexValue)
        if node.index.is_Integer:
            return Tile(literal(int(node.index), node.dtype), narrow=node in self._ranges)
        tile = replace(self.index_tile(node.index), narrow=self.layout.narrow(node.index))
        if node.dtype is torch.int64 or (node.dtype is torch.int32 and tile.narrow):
            return replace(tile, narrow=tile.narrow and node.dtype is torch.int64)
        return replace(tile, code=cast(tile.code, torch.int64, node.dtype), narrow=False)

    def _cast(self, node: Cast) -> Tile:
        arg = self.value(node.arg)
        if node in self._ranges:  # an int64 that is kept in int32
            code = cast(arg.code, node.arg.dtype, torch.int32)
            return replace(arg, code=code, narrow=True)
        return replace(arg, code=cast(arg.code, node.arg.dtype, node.dtype), narrow=False)

    def _op(self, node: Op) -> Tile:
        condition = [self.value(node.args[0])] if node.name == "where" else []
        values = [self.value(arg) for arg in node.args[len(condition) :]]
        dtype, narrow = node.args[-1].dtype, node in self._ranges
        if dtype is torch.int64:
            if narrow or (SCALAR_OPS[node.name].result == "bool" and all(tile.narrow for tile in values)):
                dtype = torch.int32
            elif all(tile.narrow or tile.code.literal for tile in values):
                # Triton computes int32 with int32 in int32: one operand must be wide.
                first = next((k for k, tile in enumerate(values) if not tile.code.literal), 0)
                values[first] = self.widened(values[first])
        if condition:
            if all(tile.code.literal for tile in values):
                values[0] = replace(values[0], code=typed(values[0].code, dtype))
            return replace(self.select(condition[0], *values), narrow=narrow)
        if node.name == CHECKED:
            values[-1] = self.masks(self.join(tile.dims for tile in values)) or Tile(Code("None"))
        wants = self.join(tile.dims for tile in values)
        codes = [expand(tile.code, tile.dims, wants) for tile in values]
        return Tile(spell(node.name, codes, dtype, self.fast), wants, max(tile.depth for tile in values), narrow)

    def select(self, condition: Tile, a: Tile, b: Tile) -> Tile:
        """`a` where `condition` holds, else `b`."""
        parts = (condition, a, b)
        wants = self.join(tile.dims for tile in parts)
        codes = [expand(tile.code, tile.dims, wants) for tile in parts]
        if condition.dims not in ((), wants) and a.dims != wants:
            # Triton spreads a condition over its second operand only.
            codes[0] = Code(f"tl.broadcast_to({codes[0].text}, {self.layout.shape(wants)})")
        return Tile(Code(f"tl.where({', '.join(code.text for code in codes)})"), wants, max(t.depth for t in parts))

    def widened(self, tile: Tile) -> Tile:
        """An int64 of the IR as an int64 of Triton."""
        if not tile.narrow or tile.code.literal:
            return tile
        return replace(tile, code=Code(f"{tile.code.at(ATOM)}.to(tl.int64)"), narrow=False)

    def spread(self, tile: Tile, dims: Sequence[Dim]) -> Tile:
        """`tile`, which has a type, as a full tile over `dims`."""
        if tile.dims == tuple(dims):
            return tile
        code = expand(tile.code, tile.dims, dims)
        code = Code(f"tl.broadcast_to({code.text}, {self.layout.shape(dims)})")
        return replace(tile, code=code, dims=tuple(dims))


def _uses(roots: Sequence[Expr]) -> tuple[Counter[Expr], dict[Expr, Expr]]:
    """How often each expression is used, and by which other one (the last seen)."""
    count: Counter[Expr] = Counter(roots)
    user: dict[Expr, Expr] = {}
    for node in postorder(*roots):
        for child in node.children():
            count[child] += 1
            user[child] = node
    return count, user


def _reads(expr: Expr, param: str) -> bool:
    return any(load.buffer == param for load in loads(expr))
