"""Verifies a Kernel: names, roles, placement and use of folds, dtypes, bounds, spans."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.indexing import ZERO, symbols_of
from fusion.lowering.ir.expr import Expr, TileRef, loads, postorder
from fusion.lowering.ir.kernel import (
    Fold,
    Kernel,
    Loop,
    Prefix,
    Role,
    Spans,
    Stmt,
    Store,
    crossing_folds,
    loaded,
    loop_folds,
    running,
    spans,
    statements,
    stored,
    values_of,
)
from fusion.lowering.ir.program import SCATTER_OPS
from fusion.lowering.verify.expressions import (
    Broken,
    ExpressionRules,
    check_bounds,
    check_fold,
    check_scan,
    check_sides,
    check_symbols,
    defect,
    require,
)


def verify_kernel(kernel: Kernel) -> None:
    """Check the rules of a Kernel: names, roles, placement and use of folds, dtypes, bounds, spans.

    Raises:
        VerifyError: with the kernel, the statement and the rule.
    """
    chain = [kernel]
    while chain[-1].then is not None:
        chain.append(chain[-1].then)
    written = frozenset[str]().union(*(stored(part) for part in (*chain, *kernel.beside)))
    for part in (*chain, *kernel.beside):
        checker = _KernelRules(part)
        try:
            checker.check_header(written)
            if part is not kernel:
                checker.check_launch(kernel, follows=part in chain)
            checker.check_body(part.body)
            checker.check_overwrites()
            checker.check_spans()
        except Broken as broken:
            raise defect(f"kernel {part.name}, {checker.place}", broken) from None


class _KernelRules:
    """Checks a Kernel in the order of its statements."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.params = {param.name: param for param in kernel.params}
        self.roles = {axis.symbol: axis.role for axis in kernel.axes}
        self.sizes = kernel.axis_sizes()
        self.reduced = {axis.symbol for axis in kernel.axes if axis.role is not Role.GRID}
        self.expressions = ExpressionRules({p.name: (p.dtype, (p.extent,)) for p in kernel.params}, tiles=True)
        self.folds: dict[str, Fold | Prefix] = {}
        self.running: set[str] = set()
        self.crossing: set[str] = set()  # folds over a loop that is not over, which stand in a loop inside it
        self.closed: set[str] = set()  # prefixes whose loop is over
        self.place = "header"

    def check_launch(self, first: Kernel, *, follows: bool) -> None:
        """Check that a kernel in the launch of `first` has arguments of the launch, and conflicts with no other."""
        relation = "follows" if follows else "runs beside others"
        for param in self.kernel.params:
            require(param in first.params, "it {} in a launch that does not take {}", relation, param.name)
        for symbol in self.kernel.sizes:
            require(symbol in first.sizes, "it {} in a launch that does not take {}", relation, symbol)
        require(not self.kernel.beside, "others run beside it, which is not the first of its launch")
        if follows:
            self._check_tiles(first)
            return
        require(first.then is None and self.kernel.then is None, "it runs beside others in a launch that goes on")
        own_stores, others = stored(self.kernel), [part for part in first.parts if part is not self.kernel]
        require(len(others) == len(first.beside), "it runs beside itself")
        for part in others:
            conflicts = (own_stores & (loaded(part) | stored(part))) | (loaded(self.kernel) & stored(part))
            require(
                not conflicts, "it runs beside {}, and one of them writes {}", part.name, ", ".join(sorted(conflicts))
            )

    def _check_tiles(self, first: Kernel) -> None:
        """Check that a kernel that follows tile by tile is the last, and reads only its own tile's results."""
        grid = self.kernel.with_role(Role.GRID)
        if not grid:
            require(not first.awaited, "it follows what follows tile by tile")
            return
        require(first.then is self.kernel, "it has grid axes, but follows another one that follows")
        require(set(grid) < set(first.with_role(Role.GRID)), "its grid axes are not some of those of what it follows")
        single = {axis.symbol: ZERO for axis in first.axes if axis.size == 1}
        awaited = {**single, **{axis.symbol: ZERO for axis in first.awaited}}
        stores = list(statements(first.body, Store))
        read = loads(*(value for stmt in statements(self.kernel.body) for value in values_of(stmt)))
        for load in read:
            for store in (stmt for stmt in stores if stmt.param == load.buffer):
                read_at, written_at = load.index[0], store.offset
                affine = not isinstance(read_at, Expr) and not isinstance(written_at, Expr)
                require(affine, "it reads {} at positions that are computed", load.buffer)
                differing = symbols_of(sympy.expand(read_at.xreplace(single) - written_at.xreplace(awaited)))  # type: ignore[union-attr]  # both are affine
                require(self.reduced.issuperset(differing), "it reads {} where other tiles are written", load.buffer)

    def check_header(self, stored: Collection[str]) -> None:
        kernel = self.kernel
        require(next(statements(kernel.body, Store), None) is not None, "it stores nothing")
        require(len(self.params) == len(kernel.params), "two params have the same name")
        require(len(self.roles) == len(kernel.axes), "an axis occurs twice")
        for axis in kernel.axes:
            for symbol in symbols_of(axis.size):
                require(symbol in kernel.sizes, "the size {} of axis {} is not passed", symbol, axis.symbol)
        for param in kernel.params:
            require(len(param.shape) == len(param.strides), "{} has strides for another rank", param.name)
            require(
                not param.number or not (param.shape or param.written),
                "{} is a number, but has dimensions or is to be written",
                param.name,
            )
            require(
                not param.written or param.name in stored, "{} is to be written, but nothing stores to it", param.name
            )

    def check_body(self, body: Sequence[Stmt], *loops: Loop) -> None:
        """Check the statements of a kernel, or of the last of nested loops, and the names that they use."""
        folded: set[str] = set()
        scanned: set[str] = set()
        loop = loops[-1].axes if loops else ()
        for stmt in body:
            if isinstance(stmt, Loop):
                self._check_loop(stmt, loops)
                self.check_body(stmt.body, *loops, stmt)
                self.crossing -= {fold.name for fold in crossing_folds(stmt)}
                continue
            self.place = _place_of(stmt)
            match stmt:
                case Prefix():
                    self._check_prefix(stmt, loop)
                    self._check_values(stmt)
                    self.folds[stmt.name] = stmt
                    if loop:
                        scanned.add(stmt.name)
                case Fold():
                    self._check_fold(stmt, loops)
                    self._check_values(replace(stmt, carry=None))
                    self.folds[stmt.name] = stmt
                    if self._is_loop_fold(stmt) and set(stmt.over) != set(loop):
                        self.crossing.add(stmt.name)
                    elif self._is_loop_fold(stmt):
                        self.running.add(stmt.name)
                        folded.add(stmt.name)
                    self._check_carry(stmt)
                case Store():
                    self._check_values(stmt)
                    self._check_store(stmt)
                case _:
                    assert_never(stmt)
        self.running -= folded
        self.closed |= scanned

    def _check_carry(self, fold: Fold) -> None:
        if fold.carry is not None:
            require(fold.name in self.running, "it carries, but stands in no loop of its own axes")
            require(fold.carry.dtype is fold.dtype, "it is {}, it carries {}", fold.dtype, fold.carry.dtype)
            self._check_values(fold)

    def check_overwrites(self) -> None:
        """Check that an overwritten param is loaded only at the stored element, and not afterwards."""
        overwritten: set[str] = set()
        for stmt in statements(self.kernel.body):
            self.place = "loop" if isinstance(stmt, Loop) else _place_of(stmt)
            read = list(loads(*values_of(stmt)))
            lost = overwritten.intersection(load.buffer for load in read)
            require(not lost, "it reads {}, which was overwritten", ", ".join(sorted(lost)))
            if isinstance(stmt, Store) and stmt.axes is None:
                alike = all(load.index == (stmt.offset,) for load in read if load.buffer == stmt.param)
                require(alike, "it overwrites {} at another place than it reads", stmt.param)
                overwritten.add(stmt.param)

    def _check_loop(self, stmt: Loop, loops: Sequence[Loop]) -> None:
        """Check a loop's axes and condition, and which statements it may hold."""
        self.place = f"loop over {', '.join(map(str, stmt.axes))}"
        for axis in stmt.axes:
            require(self.roles.get(axis) is Role.LOOP, "{} is no loop axis", axis)
        outer = {axis for loop in loops for axis in loop.axes}
        require(outer.isdisjoint(stmt.axes), "an axis is looped over inside its own loop")
        if stmt.where is not None:
            require(stmt.where.dtype is torch.bool, "it is skipped by {}, no bool", stmt.where.dtype)
            self._check_values(stmt)
        if running(stmt):
            ordered = {fold.op for fold in loop_folds(stmt) if len(fold.args) > 1}
            require(ordered <= {"dot"}, "positions of extremes cannot be carried from block to block")
            scans = any(isinstance(inner, Prefix) for inner in stmt.body)
            require(not scans, "a scan stands beside running values")
            crosses = any(not outer.isdisjoint(fold.over) for fold in statements(stmt.body, Fold))
            require(not crosses, "a fold over an outer loop stands beside running values")

    def _check_values(self, stmt: Stmt) -> None:
        values = values_of(stmt)
        self.expressions.check(values, self.sizes, self.kernel.sizes)
        for node in postorder(*values):
            if isinstance(node, TileRef):
                require(node.name in self.folds, "{} is named before its fold", node.name)
                require(node.name not in self.crossing, "{} is named before the loop that it folds is over", node.name)
                require(node.name not in self.closed, "{} is named after the loop in which it is known", node.name)
                inside = not node.before or node.name in self.running
                require(inside, "{} is named as it was before a block, outside of its loop", node.name)
                dtype = self.folds[node.name].dtype
                require(node.dtype is dtype, "{} is {}, it is named as {}", node.name, dtype, node.dtype)

    def _check_fold(self, stmt: Fold, loops: Sequence[Loop]) -> None:
        require(stmt.name not in self.folds, "two folds have the same name")
        check_fold(stmt.op, stmt.args, stmt.dtype)
        require(len(set(stmt.over)) == len(stmt.over), "it folds an axis twice")
        roles = {self.roles.get(axis) for axis in stmt.over}
        require(roles <= {Role.WHOLE, Role.LOOP}, "it folds an axis that is not reduced")
        require(len(roles) < 2, "it folds whole and loop axes at once")
        if roles == {Role.LOOP}:
            around = any(set(stmt.over) == set(loop.axes) for loop in loops)
            require(around, "a fold over loop axes stands in a loop over exactly these")

    def _check_prefix(self, stmt: Prefix, loop: tuple[sympy.Symbol, ...]) -> None:
        require(stmt.name not in self.folds, "two folds have the same name")
        check_scan(stmt.op, stmt.args, stmt.dtype)
        role = self.roles.get(stmt.along)
        require(role in (Role.WHOLE, Role.LOOP), "it runs along an axis that is not reduced")
        inside = loop == (stmt.along,) if role is Role.LOOP else stmt.along not in loop
        require(inside, "a scan along a loop axis stands in a loop over exactly this axis")

    def _is_loop_fold(self, stmt: Fold) -> bool:
        return any(self.roles[axis] is Role.LOOP for axis in stmt.over)

    def _check_store(self, stmt: Store) -> None:
        require(stmt.param in self.params, "{} is no param", stmt.param)
        param = self.params[stmt.param]
        require(param.written, "{} is not a param that may be written", param.name)
        require(stmt.value.dtype is param.dtype, "{} is stored to a param of {}", stmt.value.dtype, param.dtype)
        require(stmt.op in SCATTER_OPS, "a store has no operation {}", stmt.op)
        plain = stmt.op == "store" and stmt.where is None
        require(plain or stmt.axes is not None, "an update of elements does not name its axes")
        require(stmt.where is None or stmt.where.dtype is torch.bool, "its condition is no bool")
        if isinstance(stmt.offset, Expr):
            require(stmt.offset.dtype is torch.int64, "its offset is {}, not int64", stmt.offset.dtype)
            return
        check_symbols(stmt.offset, self.sizes, self.kernel.sizes)
        if stmt.where is None and not any(size == 0 for size in self.sizes.values()):
            check_bounds(param.name, stmt.offset, param.extent, self.sizes)

    def _check_carries(self, loop: Loop) -> None:
        """Check that a fold that depends on a running value has a carry, as its sum has to follow that value."""
        own = {fold.name for fold in loop_folds(loop)}
        for stmt in loop.body:
            if isinstance(stmt, Loop):
                continue
            self.place = _place_of(stmt)
            named = {node.name for node in postorder(*values_of(stmt)) if isinstance(node, TileRef)}
            carries = isinstance(stmt, Fold) and stmt.carry is not None
            require(carries or not named & own, "it depends on running values, but carries nothing")

    def check_spans(self) -> None:
        axes_of = spans(self.kernel)
        self._check_body_spans(self.kernel.body, axes_of, frozenset())

    def _check_body_spans(self, body: Sequence[Stmt], axes_of: Spans, looped: frozenset[sympy.Symbol]) -> None:
        for stmt in body:
            if isinstance(stmt, Loop):
                if running(stmt):
                    self._check_carries(stmt)
                self._check_body_spans(stmt.body, axes_of, looped.union(stmt.axes))
                continue
            self.place = _place_of(stmt)
            used = frozenset().union(*(axes_of[value] for value in values_of(stmt)))
            match stmt:
                case Fold():
                    if stmt.op == "dot":
                        left, right = (axes_of[arg] for arg in stmt.args)
                        kept = [axis for axis in self.roles if axis not in stmt.over]
                        check_sides(stmt.rows, stmt.columns, kept, left, right)
                case Store():
                    used |= self._stored_over(stmt, axes_of)
                case Prefix():
                    pass
                case _:
                    assert_never(stmt)
            for axis in used:
                outside = self.roles[axis] is Role.LOOP and axis not in looped
                require(not outside, "it varies along {}, which has values only inside a loop", axis)

    def _stored_over(self, stmt: Store, axes_of: Spans) -> frozenset[sympy.Symbol]:
        """Return the axes over which a store writes; its value must not vary along others."""
        offset = stmt.offset
        target = axes_of[offset] if isinstance(offset, Expr) else frozenset(self.sizes.keys() & symbols_of(offset))
        varies = {axis for axis in axes_of[stmt.value] if self.sizes[axis] != 1}
        if stmt.axes is not None:
            where = axes_of[stmt.where] if stmt.where is not None else frozenset[sympy.Symbol]()
            varies |= {axis for axis in target | where if self.sizes[axis] != 1}
            target = frozenset(stmt.axes)
        stored = all(size != 0 for size in self.sizes.values())  # strides of an empty tensor are arbitrary
        require(varies <= target or not stored, "the value varies along an axis that the offset does not")
        return target


def _place_of(stmt: Fold | Prefix | Store) -> str:
    """Name a statement in a message."""
    match stmt:
        case Fold():
            return f"fold {stmt.name}"
        case Prefix():
            return f"scan {stmt.name}"
        case Store():
            return f"store to {stmt.param}"
        case _:
            assert_never(stmt)
