"""The verifier: is a Program or a Kernel well formed?

What enters is a Program or a Kernel; nothing leaves.  What breaks a rule of its IR is refused with `VerifyError`,
which names the node and the rule: that is a defect of the compiler, found next to the pass that made it.  Only what is
certain is refused; an index is out of bounds only if some point of the iteration space is known to be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from lowering.errors import Origin, VerifyError
from lowering.expr import Expr, TileRef, free_axes, postorder
from lowering.expression_rules import (
    Broken,
    ExpressionRules,
    check_bounds,
    check_fold,
    check_scan,
    check_sides,
    check_symbols,
    require,
)
from lowering.indexing import symbols_of
from lowering.kernel import (
    Fold,
    Kernel,
    Loop,
    Prefix,
    Role,
    Stmt,
    Store,
    loaded,
    running,
    spans,
    stored,
    values_of,
    walked_folds,
)
from lowering.program import (
    SCATTER_OPS,
    Axis,
    Buffer,
    BufferRef,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    Scan,
    Scatter,
    leaves,
    reads,
    writes,
)
from lowering.sizes import given_by

# Programs -------------------------------------------------------------------------------------------------------------


def verify_program(program: Program) -> None:
    """Check the rules of a Program: dtypes, shapes, names, order, bounds.

    Raises:
        VerifyError: with the node (by its output buffer), its origin and the rule.
    """
    checker = _ProgramRules(program)
    place, origin = "the program", None
    try:
        checker.check_inputs()
        for node in program.nodes:
            made = writes(node)
            place = f"the call of {node.target}" if isinstance(node, Extern) else f"node {node.out}"
            origin = next((program.origins[name] for name in made if name in program.origins), None)
            checker.check_node(node)
        place, origin = "the outputs", None
        checker.check_outputs()
    except Broken as broken:
        raise _error(place, broken, origin) from None


def _error(place: str, broken: Broken, origin: Origin | None = None) -> VerifyError:
    return VerifyError(f"{place}: {broken}", hint="this is a defect of the compiler; please report it", origin=origin)


class _ProgramRules:
    """A walk over a Program in execution order: what is known and what is written so far."""

    def __init__(self, program: Program) -> None:
        self.program = program
        tensors = {name: (buffer.dtype, buffer.shape) for name, buffer in program.buffers.items()}
        self.expressions = ExpressionRules(tensors, tiles=False)
        self.available: set[str] = set()
        self.symbols: set[sympy.Symbol] = set()

    def check_inputs(self) -> None:
        for name, buffer in self.program.buffers.items():
            require(name == buffer.name, "buffer {} is filed under {}", buffer.name, name)
            require(len(buffer.shape) == len(buffer.strides), "{} has strides for another rank", name)
        for entry in (*self.program.inputs, *self.program.constants):
            if isinstance(entry, sympy.Symbol):
                self.symbols.add(entry)
            elif entry is not None:
                self._make(entry)
                self._learn_sizes(self.program.buffers[entry])

    def check_node(self, node: Node) -> None:
        if isinstance(node, Extern):
            self._check_extern(node)
            return
        require(node.out in self.program.buffers, "{} is not among the buffers", node.out)
        out = self.program.buffers[node.out]
        sizes = _sizes_of((*node.axes, *node.over))
        if isinstance(node, Scatter):
            self._check_scatter(node, out, sizes)
            return
        _check_shape([axis.size for axis in node.axes], out)
        loaded = self.expressions.check(node.exprs, sizes, self.symbols)
        self._read(loaded)
        if isinstance(node, Map):
            require(node.expr.dtype is out.dtype, "{} is written to a buffer of {}", node.expr.dtype, out.dtype)
        elif isinstance(node, Reduce):
            require(node.op != "dot", "a dot is a Contract, not a Reduce")
            check_fold(node.op, node.args, node.dtype)
            require(node.dtype is out.dtype, "{} is written to a buffer of {}", node.dtype, out.dtype)
        elif isinstance(node, Scan):
            check_scan(node.op, node.args, node.dtype)
            require(node.dtype is out.dtype, "{} is written to a buffer of {}", node.dtype, out.dtype)
            require(node.along in sizes, "it runs along {}, which is no axis of it", node.along)
        else:
            self._check_contract(node)
        self._make(node.out)

    def _check_scatter(self, node: Scatter, out: Buffer, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> None:
        self._read([node.start, *self.expressions.check(node.exprs, sizes, self.symbols)])
        start = self.program.buffers[node.start]
        alike = (start.dtype, start.shape, start.moving) == (out.dtype, out.shape, out.moving)
        require(alike, "it begins as {}, which is laid out otherwise", node.start)
        readers = [each for each in self.program.nodes if node.start in reads(each)]
        kept = node.start in (*self.program.constants, *self.program.output_names())
        require(readers == [node] and not kept, "{} is needed elsewhere, but is overwritten", node.start)
        require(node.op in SCATTER_OPS, "a scatter has no operation {}", node.op)
        require(node.value.dtype is out.dtype, "{} is written to a buffer of {}", node.value.dtype, out.dtype)
        require(len(node.index) == len(out.shape), "it has {} indices into {}", len(node.index), node.out)
        require(all(index.dtype is torch.int64 for index in node.index), "an index is no int64")
        require(node.where is None or node.where.dtype is torch.bool, "its condition is no bool")
        self._make(node.out)

    def _check_contract(self, node: Contract) -> None:
        check_fold("dot", (node.lhs, node.rhs), node.accumulate)
        parallel = [axis.symbol for axis in node.axes]
        check_sides(node.rows, node.columns, parallel, free_axes(node.lhs), free_axes(node.rhs))
        if node.library:
            made: set[str] = set()
            for step in node.library:
                for name in reads(step):
                    require(name in self.available or name in made, "its library form reads {} too early", name)
                made.update(writes(step))
            require(node.out in made, "its library form gives other buffers: {}", made)

    def _check_extern(self, node: Extern) -> None:
        self._read(node.reads)
        require(callable(node.target), "{!r} cannot be called", node.target)
        for part in leaves([node.args, node.kwargs]):
            if isinstance(part, sympy.Expr):
                self._check_symbols(part)
        self.symbols.update(size for size, _, _ in node.sizes)
        for name in writes(node):
            self._make(name)
            self._learn_sizes(self.program.buffers[name])  # a call may return a size that nothing tells beforehand

    def check_outputs(self) -> None:
        for output in self.program.outputs:
            if isinstance(output, BufferRef):
                self._read([output.name])
            elif output is not None:
                self._check_symbols(output)

    def _make(self, name: str) -> None:
        require(name in self.program.buffers, "{} is not among the buffers", name)
        require(name not in self.available, "{} is written twice, or is an input", name)
        self.available.add(name)

    def _read(self, names: Iterable[str]) -> None:
        for name in names:
            require(name in self.available, "{} is read before it is written", name)

    def _learn_sizes(self, buffer: Buffer) -> None:
        for size in (*buffer.shape, *buffer.strides):
            self.symbols.update((*symbols_of(size), *given_by(size)))

    def _check_symbols(self, expr: sympy.Expr) -> None:
        for symbol in given_by(expr):
            require(symbol in self.symbols, "the size {} is unknown", symbol)


def _sizes_of(axes: Sequence[Axis]) -> dict[sympy.Symbol, sympy.Expr]:
    sizes = {axis.symbol: axis.size for axis in axes}
    require(len(sizes) == len(axes), "an axis occurs twice")
    return sizes


def _check_shape(sizes: Sequence[sympy.Expr], out: Buffer) -> None:
    require(len(sizes) == len(out.shape), "it has {} axes, its buffer {} dimensions", len(sizes), len(out.shape))
    for size, dimension in zip(sizes, out.shape, strict=True):
        same = size is dimension or size == dimension or sympy.expand(size - dimension) == 0
        require(same, "its axes have sizes {}, its buffer has shape {}", list(sizes), list(out.shape))


# Kernels --------------------------------------------------------------------------------------------------------------


def verify_kernel(kernel: Kernel) -> None:
    """Check the rules of a Kernel: names, roles, where folds stand and where they are named, dtypes, bounds, spans.

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
                checker.check_shares(kernel, follows=part in chain)
            checker.check_body(part.body, ())
            checker.check_spans()
        except Broken as broken:
            raise _error(f"kernel {part.name}, {checker.place}", broken) from None


class _KernelRules:
    """A walk over a Kernel in the order of its statements."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.params = {param.name: param for param in kernel.params}
        self.roles = {axis.symbol: axis.role for axis in kernel.axes}
        self.sizes = kernel.axis_sizes()
        self.expressions = ExpressionRules({p.name: (p.dtype, (p.extent,)) for p in kernel.params}, tiles=True)
        self.folds: dict[str, Fold | Prefix] = {}
        self.running: set[str] = set()
        self.closed: set[str] = set()  # prefixes whose loop is over
        self.place = "header"

    def check_shares(self, first: Kernel, *, follows: bool) -> None:
        """What runs in another kernel's launch, at its end or beside it, has only what that one was called with."""
        place = "follows" if follows else "stands beside others"
        for param in self.kernel.params:
            require(param in first.params, "it {} in a launch that does not take {}", place, param.name)
        for symbol in self.kernel.sizes:
            require(symbol in first.sizes, "it {} in a launch that does not take {}", place, symbol)
        require(not self.kernel.beside, "others stand beside it, which is not the first of its launch")
        if follows:
            require(Role.GRID not in self.roles.values(), "it follows in a launch, but has grid axes")
            return
        require(first.then is None and self.kernel.then is None, "it stands beside others in a launch that goes on")
        mine, others = stored(self.kernel), [part for part in first.parts if part is not self.kernel]
        require(len(others) == len(first.beside), "it stands beside itself")
        for part in others:
            met = (mine & (loaded(part) | stored(part))) | (loaded(self.kernel) & stored(part))
            require(not met, "it runs beside {}, and one of them writes {}", part.name, ", ".join(sorted(met)))

    def check_header(self, stored: Collection[str]) -> None:
        kernel = self.kernel
        require(len(self.params) == len(kernel.params), "two params have the same name")
        require(len(self.roles) == len(kernel.axes), "an axis occurs twice")
        for axis in kernel.axes:
            for symbol in symbols_of(axis.size):
                require(symbol in kernel.sizes, "the size {} of axis {} is not passed", symbol, axis.symbol)
        for param in kernel.params:
            require(len(param.shape) == len(param.strides), "{} has strides for another rank", param.name)
            require(
                not param.written or param.name in stored, "{} is to be written, but nothing stores to it", param.name
            )

    def check_body(self, body: Sequence[Stmt], loop: tuple[sympy.Symbol, ...]) -> None:
        walked: set[str] = set()
        scanned: set[str] = set()
        for stmt in body:
            if isinstance(stmt, Loop):
                self.place = f"loop over {', '.join(map(str, stmt.axes))}"
                for axis in stmt.axes:
                    require(self.roles.get(axis) is Role.LOOP, "{} is no loop axis", axis)
                require(not set(stmt.axes).intersection(loop), "an axis is walked inside its own loop")
                if stmt.where is not None:
                    require(stmt.where.dtype is torch.bool, "it is skipped by {}, no bool", stmt.where.dtype)
                    self._check_values(stmt)
                if running(stmt):
                    ordered = {fold.op for fold in walked_folds(stmt) if len(fold.args) > 1}
                    require(ordered <= {"dot"}, "positions of extremes cannot be followed from block to block")
                    scans = any(isinstance(inner, Prefix) for inner in stmt.body)
                    require(not scans, "a scan stands beside running values")
                self.check_body(stmt.body, stmt.axes)
                continue
            self.place = _place_of(stmt)
            if isinstance(stmt, Prefix):
                self._check_prefix(stmt, loop)
                self._check_values(stmt)
                self.folds[stmt.name] = stmt
                if loop:
                    scanned.add(stmt.name)
            elif isinstance(stmt, Fold):
                self._check_fold(stmt, loop)
                self._check_values(replace(stmt, carry=None))
                self.folds[stmt.name] = stmt
                if self._is_walked(stmt):
                    self.running.add(stmt.name)
                    walked.add(stmt.name)
                if stmt.carry is not None:
                    require(stmt.name in self.running, "it carries, but stands in no loop of its own axes")
                    require(stmt.carry.dtype is stmt.dtype, "it is {}, it carries {}", stmt.dtype, stmt.carry.dtype)
                    self._check_values(stmt)
            else:
                self._check_values(stmt)
                self._check_store(stmt)
        self.running -= walked
        self.closed |= scanned

    def _check_values(self, stmt: Stmt) -> None:
        values = values_of(stmt)
        self.expressions.check(values, self.sizes, self.kernel.sizes)
        for node in postorder(*values):
            if isinstance(node, TileRef):
                require(node.name in self.folds, "{} is named before its fold", node.name)
                require(node.name not in self.closed, "{} is named after the loop in which it is known", node.name)
                inside = not node.before or node.name in self.running
                require(inside, "{} is named as it was before a block, outside of its loop", node.name)
                dtype = self.folds[node.name].dtype
                require(node.dtype is dtype, "{} is {}, it is named as {}", node.name, dtype, node.dtype)

    def _check_fold(self, stmt: Fold, loop: tuple[sympy.Symbol, ...]) -> None:
        require(stmt.name not in self.folds, "two folds have the same name")
        check_fold(stmt.op, stmt.args, stmt.dtype)
        require(len(set(stmt.over)) == len(stmt.over), "it folds an axis twice")
        roles = {self.roles.get(axis) for axis in stmt.over}
        require(roles <= {Role.WHOLE, Role.LOOP}, "it folds what is no reduced axis")
        require(len(roles) < 2, "it folds whole and loop axes at once")
        if roles == {Role.LOOP}:
            require(set(stmt.over) == set(loop), "a fold over loop axes stands in a loop over exactly these")

    def _check_prefix(self, stmt: Prefix, loop: tuple[sympy.Symbol, ...]) -> None:
        require(stmt.name not in self.folds, "two folds have the same name")
        check_scan(stmt.op, stmt.args, stmt.dtype)
        role = self.roles.get(stmt.along)
        require(role in (Role.WHOLE, Role.LOOP), "it runs along what is no reduced axis")
        inside = loop == (stmt.along,) if role is Role.LOOP else stmt.along not in loop
        require(inside, "a scan along a loop axis stands in a loop over exactly this axis")

    def _is_walked(self, stmt: Fold) -> bool:
        return any(self.roles[axis] is Role.LOOP for axis in stmt.over)

    def _check_store(self, stmt: Store) -> None:
        require(stmt.param in self.params, "{} is no param", stmt.param)
        param = self.params[stmt.param]
        require(param.written, "{} is not a param that may be written", param.name)
        require(stmt.value.dtype is param.dtype, "{} is stored to a param of {}", stmt.value.dtype, param.dtype)
        require(stmt.op in SCATTER_OPS, "a store has no operation {}", stmt.op)
        plain = stmt.op == "store" and stmt.where is None
        require(plain or stmt.axes is not None, "an update of elements says at which points")
        require(stmt.where is None or stmt.where.dtype is torch.bool, "its condition is no bool")
        if isinstance(stmt.offset, Expr):
            require(stmt.offset.dtype is torch.int64, "its offset is {}, not int64", stmt.offset.dtype)
            return
        check_symbols(stmt.offset, self.sizes, self.kernel.sizes)
        if stmt.where is None and not any(size == 0 for size in self.sizes.values()):
            check_bounds(param.name, stmt.offset, param.extent, self.sizes)

    def _check_carries(self, loop: Loop) -> None:
        """What was summed up with a running value must follow it: only a fold that carries may name one."""
        own = {fold.name for fold in walked_folds(loop)}
        for stmt in loop.body:
            if isinstance(stmt, Loop):
                continue
            self.place = _place_of(stmt)
            named = {node.name for node in postorder(*values_of(stmt)) if isinstance(node, TileRef)}
            carries = isinstance(stmt, Fold) and stmt.carry is not None
            require(carries or not named & own, "it is made of running values, but carries nothing")

    def check_spans(self) -> None:
        found = spans(self.kernel)
        self._check_body_spans(self.kernel.body, found, frozenset())

    def _check_body_spans(
        self, body: Sequence[Stmt], found: Mapping[Expr, frozenset[sympy.Symbol]], walked: frozenset[sympy.Symbol]
    ) -> None:
        for stmt in body:
            if isinstance(stmt, Loop):
                if running(stmt):
                    self._check_carries(stmt)
                self._check_body_spans(stmt.body, found, walked.union(stmt.axes))
                continue
            self.place = _place_of(stmt)
            used = frozenset().union(*(found[value] for value in values_of(stmt)))
            if isinstance(stmt, Fold):
                if stmt.op == "dot":
                    left, right = (found[arg] for arg in stmt.args)
                    check_sides(
                        stmt.rows, stmt.columns, [axis for axis in self.roles if axis not in stmt.over], left, right
                    )
            elif isinstance(stmt, Store):
                offset = stmt.offset
                target = found[offset] if isinstance(offset, Expr) else self.sizes.keys() & symbols_of(offset)
                varies = {axis for axis in found[stmt.value] if self.sizes[axis] != 1}
                if stmt.axes is not None:
                    where = found[stmt.where] if stmt.where is not None else frozenset[sympy.Symbol]()
                    varies |= {axis for axis in target | where if self.sizes[axis] != 1}
                    target = frozenset(stmt.axes)
                require(varies <= target, "the value varies along an axis that the offset does not")
                used |= target
            for axis in used:
                outside = self.roles[axis] is Role.LOOP and axis not in walked
                require(not outside, "it varies along {}, which is walked only inside a loop", axis)


def _place_of(stmt: Fold | Prefix | Store) -> str:
    """What a message calls a statement."""
    if isinstance(stmt, Store):
        return f"store to {stmt.param}"
    return f"{'fold' if isinstance(stmt, Fold) else 'scan'} {stmt.name}"


__all__ = ["verify_kernel", "verify_program"]
