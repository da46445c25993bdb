"""Verifies a Program: dtypes, shapes, names, the order of nodes, bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.indexing import symbols_of
from fusion.lowering.ir.arguments import leaves
from fusion.lowering.ir.chunks import BETA, COMBINED, POINTS, START, Chunked
from fusion.lowering.ir.expr import free_axes
from fusion.lowering.ir.program import (
    SCATTER_OPS,
    Axis,
    Buffer,
    BufferRef,
    Call,
    Compute,
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
from fusion.lowering.ir.sizes import given_by
from fusion.lowering.verify.expressions import (
    Broken,
    ExpressionRules,
    check_fold,
    check_scan,
    check_sides,
    defect,
    require,
)


class Verified:
    """Nodes that were verified, each with the buffers and size symbols that it was verified for.

    Nodes that a pass leaves unchanged need not be verified again.  A call is added for given layouts of its tensors,
    and would silently read wrong numbers if these changed: a pass that changes them has to add a new call.
    """

    def __init__(self) -> None:
        self._verified: dict[int, tuple[Compute, Buffer, Mapping[str, Buffer], frozenset[sympy.Symbol]]] = {}
        self._calls: dict[int, tuple[Call, Mapping[str, Buffer]]] = {}

    def loads(
        self, node: Compute, buffers: Mapping[str, Buffer], symbols: frozenset[sympy.Symbol]
    ) -> Mapping[str, Buffer] | None:
        """Return the buffers that a node loads from; None if it was not verified for these."""
        if id(node) not in self._verified:
            return None
        _, out, loaded, known = self._verified[id(node)]
        same = out == buffers[node.out] and all(buffers.get(name) == buffer for name, buffer in loaded.items())
        return loaded if same and known <= symbols else None

    def add(self, node: Compute, out: Buffer, loaded: Mapping[str, Buffer], symbols: frozenset[sympy.Symbol]) -> None:
        """Record that `node` is well formed over these buffers and size symbols."""
        self._verified[id(node)] = node, out, loaded, symbols  # the node is kept alive, so its id stays unique

    def changed(self, call: Call, buffers: Mapping[str, Buffer]) -> str | None:
        """Return a buffer of a call that has changed since the call was first verified, if there is one."""
        names = (*call.reads, *writes(call))
        _, known = self._calls.setdefault(id(call), (call, {name: buffers[name] for name in names}))
        return next((name for name in names if buffers[name] != known[name]), None)


def verify_program(program: Program, before: Verified | None = None) -> None:
    """Check the rules of a Program: dtypes, shapes, names, order, bounds.

    Args:
        before: verified nodes of earlier programs; nodes verified here are added.

    Raises:
        VerifyError: with the node (by its output buffer), its origin and the rule.
    """
    checker = _ProgramRules(program, Verified() if before is None else before)
    place, origin = "the program", None
    try:
        checker.check_inputs()
        for node in program.nodes:
            names = writes(node)
            place = f"the call of {node.target}" if isinstance(node, Extern) else f"node {', '.join(names)}"
            origin = next((program.origins[name] for name in names if name in program.origins), None)
            checker.check_node(node)
        place, origin = "the outputs", None
        checker.check_outputs()
    except Broken as broken:
        raise defect(place, broken, origin) from None


class _ProgramRules:
    """Checks a Program in execution order, with the sizes and buffers known so far."""

    def __init__(self, program: Program, before: Verified) -> None:
        self.program, self.before = program, before
        tensors = {name: (buffer.dtype, buffer.shape) for name, buffer in program.buffers.items()}
        self.expressions = ExpressionRules(tensors, tiles=False)
        self.available: set[str] = set()
        self.symbols: set[sympy.Symbol] = set()
        self.frozen: frozenset[sympy.Symbol] = frozenset()

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
        match node:
            case Extern():
                self._check_extern(node)
            case Chunked():
                self._check_chunked(node)
            case Scatter():
                self._check_scatter(node, self._out(node), _sizes_of(node.axes))
            case Map() | Reduce() | Scan():
                self._check_pure(node)
            case Contract():
                self._check_library(node)
                self._check_pure(node)
            case _:
                assert_never(node)

    def _out(self, node: Compute) -> Buffer:
        require(node.out in self.program.buffers, "{} is not among the buffers", node.out)
        return self.program.buffers[node.out]

    def _check_pure(self, node: Map | Reduce | Scan | Contract) -> None:
        """Check a node whose validity depends on its expressions and buffers alone, unless it is verified already."""
        self._read(self._checked(node))
        self._make(node.out)

    def _checked(self, node: Map | Reduce | Scan | Contract) -> Mapping[str, Buffer]:
        """Check the rules that depend on the node and its buffers, unless that was done; return those it loads."""
        known = self.known_symbols()
        loaded = self.before.loads(node, self.program.buffers, known)
        if loaded is None:
            out = self._out(node)
            names = self._check_computed(node, out, _sizes_of((*node.axes, *node.over)))
            loaded = {name: self.program.buffers[name] for name in names}
            self.before.add(node, out, loaded, known)
        return loaded

    def known_symbols(self) -> frozenset[sympy.Symbol]:
        """Return the sizes that are known so far."""
        if len(self.frozen) != len(self.symbols):
            self.frozen = frozenset(self.symbols)
        return self.frozen

    def _check_computed(
        self, node: Map | Reduce | Scan | Contract, out: Buffer, sizes: Mapping[sympy.Symbol, sympy.Expr]
    ) -> set[str]:
        """Check the rules that depend on the node and its buffers alone; return the names of the buffers it loads."""
        _check_shape([axis.size for axis in node.axes], out)
        loaded = self.expressions.check(node.exprs, sizes, self.symbols)
        match node:
            case Map():
                require(node.expr.dtype is out.dtype, "{} is written to a buffer of {}", node.expr.dtype, out.dtype)
            case Reduce():
                require(node.op != "dot", "a dot is a Contract, not a Reduce")
                check_fold(node.op, node.args, node.dtype)
                require(node.dtype is out.dtype, "{} is written to a buffer of {}", node.dtype, out.dtype)
            case Scan():
                check_scan(node.op, node.args, node.dtype)
                require(node.dtype is out.dtype, "{} is written to a buffer of {}", node.dtype, out.dtype)
                require(node.along in sizes, "it runs along {}, which is no axis of it", node.along)
            case Contract():
                check_fold("dot", (node.lhs, node.rhs), node.accumulate)
                parallel = [axis.symbol for axis in node.axes]
                check_sides(node.rows, node.columns, parallel, free_axes(node.lhs), free_axes(node.rhs))
            case _:
                assert_never(node)
        return loaded

    def _check_scatter(self, node: Scatter, out: Buffer, sizes: Mapping[sympy.Symbol, sympy.Expr]) -> None:
        self._read([node.start, *self.expressions.check(node.exprs, sizes, self.symbols)])
        start = self.program.buffers[node.start]
        alike = (start.dtype, start.shape, start.moving_strides) == (out.dtype, out.shape, out.moving_strides)
        require(alike, "it begins as {}, which has another layout", node.start)
        readers = [each for each in self.program.nodes if node.start in reads(each)]
        results = self.program.output_names() - set(self.program.inputs)  # an input is returned as it is in the end
        kept = node.start in (*self.program.constants, *results)
        require(readers == [node] and not kept, "{} is needed elsewhere, but is overwritten", node.start)
        require(node.op in SCATTER_OPS, "a scatter has no operation {}", node.op)
        require(node.value.dtype is out.dtype, "{} is written to a buffer of {}", node.value.dtype, out.dtype)
        require(len(node.index) == len(out.shape), "it has {} indices into {}", len(node.index), node.out)
        require(all(index.dtype is torch.int64 for index in node.index), "an index is no int64")
        require(node.where is None or node.where.dtype is torch.bool, "its condition is no bool")
        self._make(node.out)

    def _check_library(self, node: Contract) -> None:
        if calls := self.program.library.get(node.out, ()):
            written: set[str] = set()
            for step in calls:
                for name in reads(step):
                    require(name in self.available or name in written, "its library form reads {} too early", name)
                written.update(writes(step))
                if isinstance(step, (Extern, Chunked)):
                    self._check_layouts(step)
                elif isinstance(step, Scatter):
                    raise Broken(f"its library form has the scatter {step.out}")
                else:
                    self._checked(step)
            require(node.out in written, "its library form gives other buffers: {}", written)

    def _check_extern(self, node: Extern) -> None:
        self._read(node.reads)
        require(callable(node.target), "{!r} cannot be called", node.target)
        for part in leaves([node.args, node.kwargs]):
            if isinstance(part, sympy.Expr):
                self._check_symbols(part)
        self.symbols.update(size for size, _, _ in node.sizes)
        for name in writes(node):
            self._make(name)
            self._learn_sizes(self.program.buffers[name])  # a call may return a size that no input determines
        self._check_layouts(node)

    def _check_chunked(self, node: Chunked[Program]) -> None:
        self._read(node.reads)
        for size in (node.length, *node.symbols):
            self._check_symbols(size)
        for name in node.outs:
            self._make(name)
            out = self.program.buffers[name]
            for size in (*out.shape, *out.strides):
                self._check_symbols(size)
        require(len(node.bodies) in (1, 2), "{} bodies are neither one nor one and a shorter one", len(node.bodies))
        require(set(node.folds.values()) <= COMBINED, "nothing joins the {} of chunks", set(node.folds.values()))
        buffers = [self.program.buffers[name] for name, _ in node.sliced]
        buffers += [self.program.buffers[name] for name in node.sums]
        cut = [*(dimension for _, dimension in node.sliced), *(None for _ in node.sums)]
        results = [self.program.buffers[name] for name in (*node.rows, *node.folds)]
        for buffer, dimension in (*zip(buffers, cut, strict=True), *zip(results, node.rows.values(), strict=False)):
            inside = dimension is None or dimension < len(buffer.shape)
            require(inside, "{} is cut along dimension {}, which it does not have", buffer.name, dimension)
        for body in node.bodies:
            sizes = (START, BETA, POINTS, *node.symbols)
            require(body.inputs[: len(sizes)] == sizes, "a body takes the sizes {}, not {}", body.inputs, sizes)
            inputs = [body.buffers[str(name)] for name in body.inputs[len(sizes) :]]
            outputs = [body.buffers[out.name] for out in body.outputs if isinstance(out, BufferRef)]
            for own, outside, verb in ((inputs, buffers, "takes"), (outputs, results, "gives")):
                there, wanted = ([(each.dtype, len(each.shape)) for each in side] for side in (own, outside))
                require(there == wanted, "a body {} {}, not {}", verb, there, wanted)
        self._check_layouts(node)

    def _check_layouts(self, call: Call) -> None:
        changed = self.before.changed(call, self.program.buffers)
        require(changed is None, "{} has another layout than when the call was made", changed)

    def check_outputs(self) -> None:
        products = {node.out for node in self.program.nodes if isinstance(node, Contract)}
        strays = self.program.library.keys() - products
        require(not strays, "a library form stands beside no product: {}", ", ".join(sorted(strays)))
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
