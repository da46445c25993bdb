"""Program: the lowered graph.

    Program = inputs, constants, buffers, nodes, outputs
    Node    = Map(out, axes, expr)                    out[axes] = expr                      pointwise, gathers
            | Reduce(out, axes, over, op, args)       out[axes] = op over `over` of args    sum max argmax …
            | Scan(out, axes, along, op, args)        out[axes] = op up to here, along `along`, of args
            | Contract(out, axes, over, lhs, rhs)     out[axes] = Σ_over lhs·rhs            matrix units where they fit
            | Scatter(out, axes, start, op, …)        out = start, then out[index] op= value at every point of axes
            | Extern(outs, target, args, kwargs)      any operation without a rule: called as it is
            | Chunked(bodies, length, sliced, …)      Programs, each run for some points of one axis at a time

A node is a value over named axes.  Its axes are `i0, i1, …` in the order of the dimensions of its output buffer and
`r0, r1, …` for those it reduces over, so equal nodes read alike.  Views are never nodes: they are the index of the
load that reads through them.  Buffers carry the strides that eager would have given, so an extern or the user gets
exactly the tensor eager would have made.  Origins, and the library's calls for products, are kept beside the nodes.
A pass makes another Program by `edited`.
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

from fusion.lowering.arguments import leaves
from fusion.lowering.chunks import Chunked
from fusion.lowering.errors import Origin
from fusion.lowering.expr import Expr, IndexValue, Load, loads, passed_on, renamed
from fusion.lowering.indexing import coefficient, extent_of
from fusion.lowering.scalar_ops import FoldName, ScanName, ScatterName


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
        """How many elements it has, which may share memory."""
        return sympy.Mul(*self.shape)

    @property
    def moving(self) -> tuple[sympy.Expr, ...]:
        """The strides of dimensions that have a second element: those of size 1 may be anything."""
        return tuple(stride for size, stride in zip(self.shape, self.strides, strict=True) if size != 1)

    @property
    def extent(self) -> sympy.Expr:
        """Elements from the first to the last one touched, inclusive (0 for an empty tensor)."""
        return extent_of(self.shape, self.strides)

    @property
    def bytes(self) -> sympy.Expr:
        """What reading each element once moves."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Map:
    """`out[axes] = expr`, for every point of the axes."""

    out: str
    axes: tuple[Axis, ...]
    expr: Expr

    @property
    def over(self) -> tuple[Axis, ...]:
        """None: nothing is folded."""
        return ()

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What is evaluated at each point of `axes` and `over`."""
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
        """What is evaluated at each point of `axes` and `over`."""
        return self.args


@dataclass(frozen=True, slots=True)
class Scan:
    """`out[axes] = op over all points of the axis `along` up to and including this one of args`.

    `op` is one of `scalar_ops.SCAN_OPS`; `args` is (value,) or, for argmax/argmin, (value, index).
    """

    out: str
    axes: tuple[Axis, ...]
    along: sympy.Symbol
    op: ScanName
    args: tuple[Expr, ...]
    dtype: torch.dtype  # of the result; the out buffer holds it as it is

    @property
    def over(self) -> tuple[Axis, ...]:
        """None: nothing is folded."""
        return ()

    @property
    def walked(self) -> Axis:
        """The axis that is walked in its order."""
        return next(axis for axis in self.axes if axis.symbol == self.along)

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What is evaluated at each point of `axes` and `over`."""
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
        """What is evaluated at each point of `axes` and `over`."""
        return (self.lhs, self.rhs)


@dataclass(frozen=True, slots=True)
class Scatter:
    """`out` begins as `start`; then every point of `axes` where `where` holds does `out[index] op= value`.

    `axes` are those of the sources.  `index` has one int64 for each dimension of `out`.  `op` is one of `SCATTER_OPS`:
    a fold, to which points that meet contribute in any order, or "store", of which any one of them stays.

    `out` takes the memory of `start`, which is laid out alike and which nobody else reads; an input that is a `start`
    is updated for the caller.  Where `op` is max or min, `start` holds no NaN; a value that is NaN stays.
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
        """None: nothing is folded."""
        return ()

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """What is evaluated at each point of `axes` and `over`."""
        return (self.value, *self.index) if self.where is None else (self.value, *self.index, self.where)

    @property
    def meeting(self) -> tuple[Axis, ...]:
        """The axes along which points may meet: those that no index into `out` follows alone, step by step."""
        own = {axis.symbol for axis in self.axes}
        apart: set[sympy.Symbol] = set()
        for place in self.index:
            symbols = place.index.free_symbols & own if isinstance(place, IndexValue) else set()
            if isinstance(place, IndexValue) and len(symbols) == 1:
                (symbol,) = symbols
                step = coefficient(place.index, symbol)
                apart |= symbols if step is not None and step.is_Integer and step != 0 else set()
        return tuple(axis for axis in self.axes if axis.symbol not in apart)


SCATTER_OPS: tuple[ScatterName, ...] = get_args(ScatterName)
"""What a scatter may do at an element."""


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A tensor argument of an extern."""

    name: str


ExternArg: TypeAlias = "BufferRef | sympy.Expr | object"
"""An argument of an extern: buffers as `BufferRef`, symbolic sizes as sympy, else as it is; containers nest."""


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of `target` with eager's own semantics.

    `outs` names the tensors it returns, in order, None where it returns something that is not a tensor or not used.
    `is_view`: the result is a view of its first argument; nothing is moved.  `reason` says why there is no rule.
    `sizes`: those that only its results tell (how many numbers are not zero), each with the result and its dimension
    that has this size, or None for a result that is the number itself.  `reads`: the buffers it is given, each once.
    """

    outs: tuple[str | None, ...]
    target: Callable[..., object]
    args: tuple[ExternArg, ...]
    kwargs: Mapping[str, ExternArg] = field(default_factory=dict)
    multiple: bool = False  # returns a tuple or list
    is_view: bool = False
    impure: bool = False  # draws random numbers, mutates or tells sizes: keeps its place among its kind
    reason: str = ""
    sizes: tuple[tuple[sympy.Symbol, int, int | None], ...] = ()
    reads: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found = (arg.name for arg in leaves((self.args, self.kwargs)) if isinstance(arg, BufferRef))
        object.__setattr__(self, "reads", tuple(dict.fromkeys(found)))

    @property
    def name(self) -> str:
        """What is called: `aten.mm.default`, or the name of a function."""
        return str(self.target) if isinstance(self.target, OpOverload) else getattr(self.target, "__name__", "call")

    @property
    def overwrites(self) -> tuple[str, ...]:
        """The tensors it is given and writes to, as far as the signature of an ATen operation says."""
        if not (self.impure and isinstance(self.target, OpOverload)):
            return ()
        arguments = self.target._schema.arguments
        given = [*zip(arguments, self.args, strict=False)]
        given += [(argument, self.kwargs[argument.name]) for argument in arguments if argument.name in self.kwargs]
        written = [arg for argument, arg in given if argument.alias_info is not None and argument.alias_info.is_write]
        return Extern((), self.target, tuple(written)).reads


Compute: TypeAlias = "Map | Reduce | Scan | Contract | Scatter"
Call: TypeAlias = "Extern | Chunked[Program]"
"""What is called as it stands; no kernel is generated for it."""
Node: TypeAlias = "Map | Reduce | Scan | Contract | Scatter | Extern | Chunked[Program]"


@dataclass(frozen=True, slots=True)
class Program:
    """A lowered graph, in execution order.

    Attributes:
        inputs: names of input buffers, and size symbols for symbolic integer inputs, in the order of the call.
        buffers: every buffer by name.
        nodes: in an order in which each reads only what came before.
        outputs: what the call returns: buffer names, integers and None.
        origins: output buffer name → where it comes from.
        constants: buffers that hold tensors known at compile time.
        inlined: output buffer name → the nodes that its expression has taken in and that may be gone, by their name.
        library: output buffer name of a Contract → nodes that compute the same by a call of a library (views of the
            operands, then the call): the alternative against which generating a kernel is priced, where there is one.
    """

    inputs: tuple[str | sympy.Symbol | None, ...]
    buffers: Mapping[str, Buffer]
    nodes: tuple[Node, ...]
    outputs: tuple[BufferRef | sympy.Expr | None, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict)
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    inlined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    library: Mapping[str, tuple[Node, ...]] = field(default_factory=dict)

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
        """Returns a changed Program, which keeps all that is not given; the same object where nothing changes.

        Args:
            nodes: in the place of all nodes.
            buffers: new ones, and others in the place of those of their names.
            origins: buffer → the buffer whose origin it shares; chains are followed in their order.
            inlined: output buffer → the nodes that its expression has taken in; what is known of others stays.
            library: output buffer → nodes that call a library, none of them to take those known away; what is known of
                others stays, as long as there is a Contract that makes them.
            outputs: in the place of all outputs.

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

    def made_of(self, out: str) -> tuple[str, ...]:
        """The operations that a node computes, by their buffers' names: those inlined into it, then its own."""
        return (*self.inlined.get(out, ()), out)

    def output_names(self) -> frozenset[str]:
        """The buffers that the call returns."""
        return frozenset(out.name for out in self.outputs if isinstance(out, BufferRef))


def reads(node: Node) -> tuple[str, ...]:
    """The buffers a node reads, each once, in order of appearance."""
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
    """The buffers whose elements a node copies: those that are all of its result, or some of it, as they are."""
    if not isinstance(node, Map):
        return frozenset()
    return frozenset(part.buffer for part in passed_on(node.expr) if isinstance(part, Load))


@lru_cache(maxsize=1 << 14)
def _loaded(exprs: tuple[Expr, ...]) -> tuple[str, ...]:
    """The buffers that expressions load from; remembered, because every pass asks."""
    return tuple(dict.fromkeys(load.buffer for load in loads(*exprs)))


def writes(node: Node) -> tuple[str, ...]:
    """The buffers a node produces."""
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
    """The tensors that are views, each with the one whose memory it lies in."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, Extern) and node.is_view and node.reads:
            whole = found.get(node.reads[0], node.reads[0])
            found.update((out, whole) for out in node.outs if out is not None)
    return found


def with_exprs(node: Compute, exprs: Sequence[Expr]) -> Compute:
    """`node` with other expressions in the place of its own, in the order of `node.exprs`."""
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
    """`node` with other names for what it reads; the node itself where it reads nothing of that."""
    if not any(name in names for name in reads(node)):
        return node
    changed = with_exprs(node, renamed(node.exprs, names))
    return replace(changed, start=names.get(changed.start, changed.start)) if isinstance(changed, Scatter) else changed


def axis_sizes(node: Compute) -> dict[sympy.Symbol, sympy.Expr]:
    """Axis symbol → size, for both kinds of axes of a node."""
    return {axis.symbol: axis.size for axis in (*node.axes, *node.over)}
