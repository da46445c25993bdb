"""Emits the expressions of a kernel, each computed once, as far out of the loops as possible.

Input: an expression over linear indices; output: a `Tile`: code and the dimensions it spans.  Lines are added to the
scope of the innermost loop that the expression depends on, so that loop-invariant values are computed before it.
Loads, shared expressions and long ones get a name; others are written where they are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from typing_extensions import assert_never

from fusion.codegen.interior import conditional, unconditional
from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.blocks.aligned_rows import word_load
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions.code import Code, as_code, compose, listed, widened
from fusion.codegen.triton.expressions.indices import Layout, expand
from fusion.codegen.triton.expressions.matrices import Hosted, Stack
from fusion.codegen.triton.expressions.pointers import Pointers
from fusion.codegen.triton.expressions.random_numbers import drawn
from fusion.codegen.triton.expressions.scalar_code import cast, literal, scalar_code, typed
from fusion.codegen.triton.expressions.scopes import Identifiers, Tile, Transfer
from fusion.codegen.triton.expressions.widths import int32_ranges
from fusion.codegen.triton.rewrites.absolute_errors import is_reciprocal
from fusion.lowering.ir.expr import Cast, Const, Expr, IndexValue, Load, Op, Random, TileRef, concrete, loads, postorder
from fusion.lowering.ir.kernel import Loop, Store, statements, values_of
from fusion.lowering.ir.scalar_ops import CHECKED, SCALAR_OPS

_INLINE = 48  # characters of an expression that is used once and written in place


class Values(Pointers):
    """Emits expressions as lines of a kernel.

    Args:
        fast: see `scalar_code`.
        zero_fill: masked lanes of loads are 0 (operands of `dot` need it).
        behind: parameters that other programs of this launch wrote; the first-level cache may hold old values.
    """

    def __init__(
        self, layout: Layout, names: Identifiers, *, fast: bool, zero_fill: bool, behind: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(layout, names)
        self.fast, self.zero_fill, self.behind = fast, zero_fill, behind
        self.quick: frozenset[Expr] = frozenset()  # expressions that are fast even if others are not
        self.program = Code("tl.program_id(0)")  # the number of the program
        self.block: Code | None = None  # the number of its block of rows and columns in a contraction
        self.load_through: dict[Load, Transfer] = {}
        self.emitters: dict[Expr, Callable[[], Tile]] = {}  # functions that emit expressions in a form of their own
        self.stack: Stack | None = None  # two products computed as one
        self.hosted: dict[str, Hosted] | None = None  # descriptors that are passed; None: programs create them
        self.store_through: dict[str, Transfer] = {}  # parameter name → descriptor
        self.eviction: dict[Load, str] = {}  # policies of loads in the current loop
        body = layout.blocked.body
        stmts = list(statements(body))
        roots = [value for stmt in stmts if not isinstance(stmt, Loop) for value in values_of(stmt)]
        self._uses, self._user = _uses(roots)
        narrowed = [stmt for stmt in stmts if isinstance(stmt, Loop) and stmt.where is not None]
        interiors = [part for loop in narrowed for part in (unconditional(loop), conditional(loop)) if part is not loop]
        inside = [value for loop in interiors for stmt in statements(loop.body) for value in values_of(stmt)]
        inside_uses, inside_user = _uses(inside)
        self._uses |= inside_uses
        self._user = {**inside_user, **self._user}
        self._ranges = int32_ranges([*roots, *inside], layout)
        self._mutable = {stmt.param for stmt in stmts if isinstance(stmt, Store)}
        self._mutable &= {load.buffer for load in loads(*roots)}
        self.written: set[str] = set()  # parameters that have been stored to so far
        self._numbers = frozenset(param.name for param in layout.blocked.kernel.params if param.number)

    @property
    def device(self) -> Device:
        """Return the device for which code is generated."""
        return self.layout.blocked.device

    def stored(self, param: str) -> None:
        """Drop values loaded from `param`, which has just been written."""
        self.written.add(param)
        if param in self._mutable:
            for scope in self.scopes:
                stale = [key for key in scope.known if isinstance(key, Expr) and _reads(key, param)]
                for key in stale:
                    del scope.known[key]

    def is_overwritten(self, roots: Sequence[Expr]) -> bool:
        """Return whether this kernel writes any tensor that `roots` load."""
        return any(load.buffer in self._mutable for load in loads(*roots))

    # Memory -----------------------------------------------------------------------------------------------------------

    def _load(self, node: Load) -> Tile:
        if node.buffer in self._numbers:
            number, zero = Tile(as_code(node.buffer)), Tile(literal(0, node.dtype))
            return number if node.mask is None else self.select(self.value(node.mask), number, zero)
        transfer = self.load_through.get(node)
        if transfer is not None:
            return self._fetched(transfer)
        offset = node.index[0]
        pointer = self.pointer(node.buffer, offset)
        condition = None if node.mask is None else self.value(node.mask)
        dims = self.join((pointer.dims, () if condition is None else condition.dims))
        word = word_load(self.layout.blocked, node)
        in_edge = word is not None and [dim for dim in dims if self.is_edge(dim)] == [word[0]]
        mask = self.mask(*word) if word is not None and in_edge else self.masks(dims, condition)
        depth = max(pointer.depth, 0 if mask is None else mask.depth)
        code = expand(pointer.code, pointer.dims, dims)
        if dims and not pointer.dims:
            code = compose("tl.broadcast_to({}, {})", code, self.layout.shape(dims))
        arguments = [code]
        if mask is not None:
            arguments.append(compose("mask={}", expand(mask.code, mask.dims, dims)))
            if node.mask is not None or self.zero_fill:
                arguments.append(compose("other={}", literal(0, node.dtype)))
        policy = self.eviction.get(node)
        if node.buffer in self.behind:
            arguments.append(Code('cache_modifier=".cg"'))
        elif policy:
            arguments.append(Code(f'eviction_policy="{policy}"'))
        if node.buffer in self.written and node.buffer in self._mutable:
            self.line("tl.debug_barrier()")  # other threads of this program wrote the elements read here
            depth = self.depth
        return Tile(compose("tl.load({})", listed(arguments)), dims, depth)

    def load_at(self, node: Load, dim: Dim, start: Code) -> Tile:
        """Return `node` for the block of `dim` that starts at `start`, on which only its index depends."""
        kept, self.starts[dim] = self.starts[dim], start
        tile = self._load(node)
        self.starts[dim] = kept
        return tile

    def load_now(self, node: Load) -> None:
        """Add the line that loads `node`, with the cast that it is written with."""
        self.value(self._user[node] if self._is_cast_at_once(node) else node)

    def _fetched(self, transfer: Transfer) -> Tile:
        """Return a block that is loaded through a descriptor."""
        dims, corner, turned = self.block_corner(transfer)
        depth = max(self.layout.depth[dim] for dim in dims)
        code = compose("{}.load({})", transfer.name, corner)
        if transfer.batch is not None:
            code = compose("tl.reshape({}, {})", code, self.layout.shape((transfer.rows, transfer.columns)))
        return Tile(compose(turned, code), dims, depth)

    # Expressions ------------------------------------------------------------------------------------------------------

    def value(self, root: Expr) -> Tile:
        """Return `root` as a tile, after adding the lines that compute it."""
        stack = [root]
        while stack:
            node = stack[-1]
            if self.find(node) is not None:
                stack.pop()
                continue
            children = () if node in self.emitters else node.children()
            missing = [child for child in children if self.find(child) is None]
            if missing:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            self._define(node)
        tile = self.find(root)
        assert tile is not None
        return tile

    def _define(self, node: Expr) -> None:
        tile = self._tile(node)
        if self._needs_name(node, tile):
            tile = self.name(self._wish(node), tile)
        self.bind(node, tile)

    def _needs_name(self, node: Expr, tile: Tile) -> bool:
        if tile.code.literal or tile.code.is_name:
            return False
        if isinstance(node, Load):
            return not self._is_cast_at_once(node)
        if isinstance(node, Cast) and isinstance(node.arg, Load) and self._is_cast_at_once(node.arg):
            return True
        if isinstance(node, Op) and node.name == CHECKED and tile.depth < self.depth:
            return True  # a loop would check it again in each block
        return (self._uses[node] > 1 and not isinstance(node, IndexValue)) or len(tile.code.text) > _INLINE

    def _is_cast_at_once(self, node: Load) -> bool:
        """Return whether this load is written as `x = tl.load(…).to(tl.float32)`, on one line."""
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
        if node in self.emitters:
            return self.emitters[node]()
        match concrete(node):
            case Const(value, dtype):
                return Tile(literal(value, dtype), narrow=node in self._ranges)
            case IndexValue() as position:
                return self._index_value(position)
            case Load() as load:
                return self._load(load)
            case Random(kind, key, counter):
                at = self._index_value(IndexValue(counter))
                wide = replace(at, code=typed(at.code, torch.int64), narrow=False)
                return drawn(self.layout, kind, self.value(key), counter, wide)
            case Cast() as cast:
                return self._cast(cast)
            case Op() as op:
                return self._op(op)
            case TileRef(name):
                raise AssertionError(f"{name} is read before its fold is complete")
            case unknown:
                assert_never(unknown)

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
        if node in self._ranges:  # an int64 that is computed in int32
            code = cast(arg.code, node.arg.dtype, torch.int32)
            return replace(arg, code=code, narrow=True)
        return replace(arg, code=cast(arg.code, node.arg.dtype, node.dtype), narrow=False)

    def _op(self, node: Op) -> Tile:
        if node.name == "bounded":  # its bounds are evaluated before the loop alone (`skips`)
            return self.value(node.args[0])
        condition = [self.value(node.args[0])] if node.name == "where" else []
        values = [self.value(arg) for arg in node.args[len(condition) :]]
        dtype, narrow = node.args[-1].dtype, node in self._ranges
        limited = values[:1] if node.name == CHECKED else values
        is_long = narrow and any(not (tile.narrow or tile.code.literal) for tile in limited)  # checked, clamped before
        if dtype is torch.int64 and not is_long:
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
        if self.fast and is_reciprocal(node):  # of 1 at the least: no scaling of the range
            text = compose("{}({}, {})", "libdevice.fast_dividef", *codes)
        else:
            text = scalar_code(node.name, codes, dtype, self.fast or node in self.quick)
        if is_long and narrow:
            text = cast(text, torch.int64, torch.int32)
        return Tile(text, wants, max(tile.depth for tile in values), narrow)

    def select(self, condition: Tile, a: Tile, b: Tile) -> Tile:
        """Return `a` where `condition` holds, else `b`."""
        parts = (condition, a, b)
        wants = self.join(tile.dims for tile in parts)
        codes = [expand(tile.code, tile.dims, wants) for tile in parts]
        if condition.dims not in ((), wants) and a.dims != wants:
            # Triton broadcasts a condition to its second operand only.
            codes[0] = compose("tl.broadcast_to({}, {})", codes[0], self.layout.shape(wants))
        return Tile(compose("tl.where({})", listed(codes)), wants, max(t.depth for t in parts))

    def widened(self, tile: Tile) -> Tile:
        """Return an int64 of the IR as an int64 of Triton."""
        if not tile.narrow or tile.code.literal:
            return tile
        return replace(tile, code=widened(tile.code), narrow=False)


def _uses(roots: Sequence[Expr]) -> tuple[Counter[Expr], dict[Expr, Expr]]:
    """Return how often each expression is used, and one expression that uses it (the last)."""
    count: Counter[Expr] = Counter(roots)
    user: dict[Expr, Expr] = {}
    for node in postorder(*roots):
        for child in node.children():
            count[child] += 1
            user[child] = node
    return count, user


def _reads(expr: Expr, param: str) -> bool:
    return any(load.buffer == param for load in loads(expr))
