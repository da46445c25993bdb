"""Defines Program, the lowered graph.

    Program = inputs, constants, buffers, nodes, outputs
    Node    = Map(out, axes, expr)                    out[axes] = expr                      pointwise, gathers
            | Reduce(out, axes, over, op, args)       out[axes] = op over `over` of args    sum max argmax …
            | Scan(out, axes, along, op, args)        out[axes] = op up to here, along `along`, of args
            | Contract(out, axes, over, lhs, rhs)     out[axes] = Σ_over lhs·rhs            matrix units where they fit
            | Scatter(out, axes, start, op, …)        out = start, then out[index] op= value at every point of axes
            | Extern(outs, target, args, kwargs)      any operation without a rule, called in eager's way
            | Chunked(bodies, length, sliced, …)      Programs, each run for some points of one axis at a time

A node is a value over named axes.  Its axes are `i0, i1, …` in the order of the dimensions of its output buffer, and
its reduced axes `r0, r1, …`, so equal nodes have equal text.  Views are never nodes: they are the index of the load
that reads through them.  Buffers have the strides of eager's results, so externs and the user get eager's tensors.
Origins, and library alternatives for products, are stored separately.  A pass derives a Program by `edited`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeAlias, get_args

import sympy
import torch
from torch._ops import OpOverload
from typing_extensions import assert_never

from fusion.lowering.errors import Origin
from fusion.lowering.ir.affine import coefficient, extent_of
from fusion.lowering.ir.arguments import leaves
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Expr, IndexValue, Load, loads, passed_on, renamed
from fusion.lowering.ir.scalar_ops import FoldName, ScanName, ScatterName


@dataclass(frozen=True, slots=True)
class Axis:
    """A named range `0 ≤ symbol < size`."""

    symbol: sympy.Symbol
    size: sympy.Expr

    def __str__(self) -> str:
        return f"{self.symbol}:{self.size}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor in memory.  Shape and strides are in elements; both may hold size symbols."""

    name: str
    dtype: torch.dtype
    shape: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    device: torch.device

    @property
    def numel(self) -> sympy.Expr:
        """The number of elements, which may share memory."""
        return sympy.Mul(*self.shape)

    @property
    def moving_strides(self) -> tuple[sympy.Expr, ...]:
        """The strides of dimensions with more than one element; other strides may be anything."""
        return tuple(stride for size, stride in zip(self.shape, self.strides, strict=True) if size != 1)

    @property
    def extent(self) -> sympy.Expr:
        """Elements from the first to the last one touched, inclusive (0 for an empty tensor)."""
        return extent_of(self.shape, self.strides)

    @property
    def bytes(self) -> sympy.Expr:
        """The bytes that reading each element once moves."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Map:
    """`out[axes] = expr`, for every point of the axes."""

    out: str
    axes: tuple[Axis, ...]
    expr: Expr

    @property
    def over(self) -> tuple[Axis, ...]:
        """Empty: a map has no reduced axes."""
        return ()

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions that are evaluated at each point of `axes` and `over`."""
        return (self.expr,)


@dataclass(frozen=True, slots=True)
class Reduce:
    """`out[axes] = op over all points of `over` of args`; `args` is (value,) or, for argmax/argmin, (value, index)."""

    out: str
    axes: tuple[Axis, ...]
    over: tuple[Axis, ...]
    op: FoldName
    args: tuple[Expr, ...]
    dtype: torch.dtype  # of the result; the out buffer holds it as it is

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions that are evaluated at each point of `axes` and `over`."""
        return self.args


@dataclass(frozen=True, slots=True)
class Scan:
    """`out[axes] = op over the points of `along` up to and including this one of args`; `args` as of a Reduce."""

    out: str
    axes: tuple[Axis, ...]
    along: sympy.Symbol
    op: ScanName
    args: tuple[Expr, ...]
    dtype: torch.dtype  # of the result; the out buffer holds it as it is

    @property
    def over(self) -> tuple[Axis, ...]:
        """Empty: a scan has no reduced axes."""
        return ()

    @property
    def scanned(self) -> Axis:
        """The axis along which the scan runs, in order."""
        return next(axis for axis in self.axes if axis.symbol == self.along)

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions that are evaluated at each point of `axes` and `over`."""
        return self.args


@dataclass(frozen=True, slots=True)
class Contract:
    """`out[axes] = Σ_over lhs·rhs`, accumulated in `accumulate` and converted to the out buffer's dtype.

    `rows` and `columns` are the axes that only lhs and only rhs spans; axes in neither are batch axes, spanned by both.
    """

    out: str
    axes: tuple[Axis, ...]
    over: tuple[Axis, ...]
    lhs: Expr
    rhs: Expr
    rows: tuple[sympy.Symbol, ...]
    columns: tuple[sympy.Symbol, ...]
    accumulate: torch.dtype

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions that are evaluated at each point of `axes` and `over`."""
        return (self.lhs, self.rhs)


@dataclass(frozen=True, slots=True)
class Scatter:
    """`out` begins as `start`; then every point of `axes` where `where` holds does `out[index] op= value`.

    `axes` are the sources' axes.  `index` has one int64 for each dimension of `out`.  `op` is one of `SCATTER_OPS`:
    a fold, which combines values with equal indices in any order, or "store", which keeps any one of them.  `out` takes
    the memory of `start`, which has the same layout and no other reader; an input that is a `start` is updated for the
    caller.  Where `op` is max or min, `start` holds no NaN; a NaN in a value stays.
    """

    out: str
    axes: tuple[Axis, ...]
    start: str
    op: ScatterName
    index: tuple[Expr, ...]
    value: Expr
    where: Expr | None = None

    @property
    def over(self) -> tuple[Axis, ...]:
        """Empty: a scatter has no reduced axes."""
        return ()

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions that are evaluated at each point of `axes` and `over`."""
        return (self.value, *self.index) if self.where is None else (self.value, *self.index, self.where)

    @property
    def colliding(self) -> tuple[Axis, ...]:
        """The axes along which indices may collide: those without an affine index into `out` of their own."""
        own = {axis.symbol for axis in self.axes}
        separate: set[sympy.Symbol] = set()
        for position in self.index:
            symbols = position.index.free_symbols & own if isinstance(position, IndexValue) else set()
            if isinstance(position, IndexValue) and len(symbols) == 1:
                (symbol,) = symbols
                step = coefficient(position.index, symbol)
                separate |= symbols if step is not None and step.is_Integer and step != 0 else set()
        return tuple(axis for axis in self.axes if axis.symbol not in separate)


SCATTER_OPS: tuple[ScatterName, ...] = get_args(ScatterName)
"""The operations that a scatter may apply to an element."""


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A tensor argument of an extern."""

    name: str


ExternArg: TypeAlias = "BufferRef | sympy.Expr | object"
"""An argument of an extern: buffers as `BufferRef`, symbolic sizes as sympy, others unchanged; containers nest."""


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of `target` with eager's own semantics.

    `outs`: the tensors that it returns, in order; None for a result that is no tensor or not used.  `is_view`: the
    result is a view of its first argument.  `reason` says why there is no rule.  `sizes`: the data-dependent sizes that
    its results determine (the count of non-zeros), each with the result and its dimension of this size, or None for a
    result that is the size itself.  `reads`: its operands, each once.
    """

    outs: tuple[str | None, ...]
    target: Callable[..., object]
    args: tuple[ExternArg, ...]
    kwargs: Mapping[str, ExternArg] = field(default_factory=dict)
    multiple: bool = False  # returns a tuple or list
    is_view: bool = False
    impure: bool = False  # draws random numbers, mutates or determines sizes: keeps its order among impure calls
    reason: str = ""
    sizes: tuple[tuple[sympy.Symbol, int, int | None], ...] = ()
    reads: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = (arg.name for arg in leaves((self.args, self.kwargs)) if isinstance(arg, BufferRef))
        object.__setattr__(self, "reads", tuple(dict.fromkeys(names)))

    @property
    def name(self) -> str:
        """The name of the callee: `aten.mm.default`, or the name of a function."""
        return str(self.target) if isinstance(self.target, OpOverload) else getattr(self.target, "__name__", "call")

    @property
    def overwrites(self) -> tuple[str, ...]:
        """The operands it writes to, as far as the signature of an ATen operation says."""
        if not (self.impure and isinstance(self.target, OpOverload)):
            return ()
        arguments = self.target._schema.arguments
        arguments_and_values = [*zip(arguments, self.args, strict=False)]
        arguments_and_values += [
            (argument, self.kwargs[argument.name]) for argument in arguments if argument.name in self.kwargs
        ]
        written = [
            arg
            for argument, arg in arguments_and_values
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        return Extern((), self.target, tuple(written)).reads


Compute: TypeAlias = "Map | Reduce | Scan | Contract | Scatter"
Call: TypeAlias = "Extern | Chunked[Program]"
"""Calls, for which no kernel is generated."""
Node: TypeAlias = "Map | Reduce | Scan | Contract | Scatter | Extern | Chunked[Program]"


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered graph, in execution order.

    Attributes:
        inputs: names of input buffers, and size symbols for symbolic integer inputs, in the order of the call.
        buffers: every buffer by name.
        nodes: in topological order: each reads only results of earlier ones.
        outputs: the results of the call: buffer names, integers and None.
        origins: output buffer name → its origin in the user's program.
        constants: buffers that hold tensors known at compile time.
        inlined: output buffer name → the names of nodes that were inlined into its expression, and may be gone.
        library: output buffer name of a Contract → nodes that compute the same by a library call, its alternative.
        apart: (operand, output buffer name of a Contract) that share no kernel: the operand is stored before.
    """

    inputs: tuple[str | sympy.Symbol | None, ...]
    buffers: Mapping[str, Buffer]
    nodes: tuple[Node, ...]
    outputs: tuple[BufferRef | sympy.Expr | None, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    inlined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    library: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)
    apart: frozenset[tuple[str, str]] = frozenset()

    def edited(
        self,
        nodes: Iterable[Node] | None = None,
        *,
        buffers: Iterable[Buffer] = (),
        origins: Mapping[str, str] | None = None,
        inlined: Mapping[str, tuple[str, ...]] | None = None,
        library: Mapping[str, tuple[Node, ...]] | None = None,
        outputs: Iterable[BufferRef | sympy.Expr | None] | None = None,
    ) -> Program:
        """Return a changed Program, which keeps everything that is not passed; the same object if nothing changes.

        Args:
            nodes: replace all nodes.
            buffers: are added, and replace buffers of the same name.
            origins: buffer → the buffer whose origin it shares; chains are followed in their order.
            inlined: output buffer → the nodes inlined into its expression; entries of others stay.
            library: output buffer → nodes that call a library, empty to remove; other Contracts keep their entries.
            outputs: replace all outputs.

        >>> empty = Program((), {}, (), ())
        >>> empty.edited(outputs=[sympy.Integer(2)]).outputs, empty.edited([], outputs=()) is empty
        ((2,), True)
        """
        known = dict(self.origins)
        for name, source in (origins or {}).items():
            known[name] = known[source]
        order = self.nodes if nodes is None else tuple(nodes)
        calls = {**self.library, **(library or {})}
        products = {node.out for node in order if isinstance(node, Contract)} if calls else set()
        changed = replace(
            self,
            nodes=order,
            buffers={**self.buffers, **{buffer.name: buffer for buffer in buffers}},
            origins=known,
            inlined={**self.inlined, **(inlined or {})},
            library={out: steps for out, steps in calls.items() if steps and out in products},
            outputs=self.outputs if outputs is None else tuple(outputs),
        )
        kept = len(order) == len(self.nodes) and all(map(operator.is_, order, self.nodes))
        return self if kept and changed._tables() == self._tables() else changed

    def _tables(self) -> tuple[object, ...]:
        return (self.buffers, self.origins, self.inlined, self.library, self.outputs)

    def operations_of(self, out: str) -> tuple[str, ...]:
        """Return the operations that a node computes, by their buffers' names: those inlined into it, then its own."""
        return (*self.inlined.get(out, ()), out)

    def output_names(self) -> frozenset[str]:
        """Return the buffers that the call returns."""
        return frozenset(out.name for out in self.outputs if isinstance(out, BufferRef))


def reads(node: Node) -> tuple[str, ...]:
    """Return the buffers a node reads, each once, in order of appearance."""
    match node:
        case Extern() | Chunked():
            return node.reads
        case Scatter():
            return tuple(dict.fromkeys((node.start, *_loaded(node.exprs))))
        case Map() | Reduce() | Scan() | Contract():
            return _loaded(node.exprs)
        case _:
            assert_never(node)


def copies(node: Node) -> frozenset[str]:
    """Return the buffers whose elements a node copies: all of its result, or some of it, as they are."""
    if not isinstance(node, Map):
        return frozenset()
    return frozenset(part.buffer for part in passed_on(node.expr) if isinstance(part, Load))


@lru_cache(maxsize=1 << 14)
def _loaded(exprs: tuple[Expr, ...]) -> tuple[str, ...]:
    """Return the buffers that expressions load from; cached, because every pass asks."""
    return tuple(dict.fromkeys(load.buffer for load in loads(*exprs)))


def writes(node: Node) -> tuple[str, ...]:
    """Return the buffers a node produces."""
    match node:
        case Extern():
            return tuple(out for out in node.outs if out is not None)
        case Chunked():
            return node.outs
        case Map() | Reduce() | Scan() | Contract() | Scatter():
            return (node.out,)
        case _:
            assert_never(node)


def memory_of(nodes: Sequence[Node]) -> dict[str, str]:
    """Return the base of each view: the tensor whose memory it shares."""
    bases: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, Extern) and node.is_view and node.reads:
            base = bases.get(node.reads[0], node.reads[0])
            bases.update((out, base) for out in node.outs if out is not None)
    return bases


def copied(node: Node | None, program: Program) -> tuple[str, str] | None:
    """Return (target, source) of a copy into an input; None for any other node."""
    if not isinstance(node, Extern) or node.target is not torch.ops.aten.copy_.default or node.kwargs:
        return None
    if len(node.args) != 2:
        return None
    target, source = node.args
    if not isinstance(target, BufferRef) or not isinstance(source, BufferRef) or target.name not in program.inputs:
        return None
    return target.name, source.name


def returning(program: Program, copy: Extern, target: str) -> Program:
    """Replace the result of a copy into `target`, which is the same tensor, by `target` in the outputs."""
    results = set(map(BufferRef, writes(copy)))
    return program.edited(outputs=(BufferRef(target) if out in results else out for out in program.outputs))


def with_exprs(node: Compute, exprs: Sequence[Expr]) -> Compute:
    """Return `node` with other expressions, in the order of `node.exprs`."""
    match node:
        case Map():
            return replace(node, expr=exprs[0])
        case Reduce() | Scan():
            return replace(node, args=tuple(exprs))
        case Contract():
            return replace(node, lhs=exprs[0], rhs=exprs[1])
        case Scatter():
            index, where = exprs[1 : 1 + len(node.index)], exprs[1 + len(node.index) :]
            return replace(node, value=exprs[0], index=tuple(index), where=where[0] if where else None)
        case _:
            assert_never(node)


def reading(node: Compute, names: Mapping[str, str]) -> Compute:
    """Return `node` with operands renamed; the node itself if it reads none of them."""
    if not any(name in names for name in reads(node)):
        return node
    changed = with_exprs(node, renamed(node.exprs, names))
    return replace(changed, start=names.get(changed.start, changed.start)) if isinstance(changed, Scatter) else changed


def axis_sizes(node: Compute) -> dict[sympy.Symbol, sympy.Expr]:
    """Return axis symbol → size, for both kinds of axes of a node."""
    return {axis.symbol: axis.size for axis in (*node.axes, *node.over)}
