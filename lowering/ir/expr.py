"""Represents the computation of one element of a tensor as data: expressions.

    Expr  = Load(buffer, index, dtype, mask)     one element of a buffer; 0 where the mask is false
          | Const(value, dtype)
          | IndexValue(index, dtype)             the value of an index expression
          | Op(name, args, dtype)                a scalar operation, see `scalar_ops.py`
          | Cast(arg, dtype, implicit)           implicit: only there because eager rounds each intermediate
          | Random(kind, seed, offset)           counter-based: the same seed and offset give the same number
          | TileRef(name, dtype)                 the result of a fold; only in kernels
    Index = sympy.Expr | Expr                    an `Expr` where a loaded value is the index (a gather)

Expressions are interned: equal expressions are one object, so equality is identity, sharing is free and a traversal
visits a shared part once.  All traversals are iterative: a chain of ten thousand operations is an ordinary input.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias, cast
from weakref import WeakValueDictionary

import sympy
import torch
from typing_extensions import assert_never

from fusion.lowering.ir.scalar_ops import CHECKED, Distribution, ScalarName, result_dtype

Scalar: TypeAlias = "bool | int | float"


class _Interned(type):
    """Metaclass that returns the existing object for equal fields (hash consing)."""

    _table: ClassVar[WeakValueDictionary[tuple[object, ...], Expr]] = WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __call__(cls, *args: object, **kwargs: object) -> Expr:
        fresh = cast("Expr", super().__call__(*args, **kwargs))
        key = (cls, *fresh._key())
        with _Interned._lock:
            return _Interned._table.setdefault(key, fresh)


class Expr(metaclass=_Interned):
    """Base of all expressions.  Immutable, interned, compared by identity."""

    __slots__ = ("__weakref__",)

    dtype: torch.dtype

    def _key(self) -> tuple[object, ...]:
        raise NotImplementedError

    def __reduce__(self) -> tuple[type[Expr], tuple[object, ...]]:
        """Intern copied and unpickled expressions too."""
        return type(self), tuple(getattr(self, name) for name in self.__slots__)

    def children(self) -> tuple[Expr, ...]:
        """Return the operands, in a fixed order."""
        return ()

    def rebuild(self, children: Sequence[Expr]) -> Expr:
        """Return the same expression over other children (same number and order as `children()`)."""
        assert not children
        return self


Index: TypeAlias = "sympy.Expr | Expr"


@dataclass(frozen=True, slots=True, eq=False)
class Load(Expr):
    """One element of `buffer`.  With a `mask` that is false, nothing is read and the value is 0."""

    buffer: str
    index: tuple[Index, ...]
    dtype: torch.dtype
    mask: Expr | None = None

    def _key(self) -> tuple[object, ...]:
        return (self.buffer, self.index, self.dtype, self.mask)

    def children(self) -> tuple[Expr, ...]:
        indirect = tuple(i for i in self.index if isinstance(i, Expr))
        return indirect if self.mask is None else (*indirect, self.mask)

    def rebuild(self, children: Sequence[Expr]) -> Expr:
        rest = iter(children)
        index = tuple(next(rest) if isinstance(i, Expr) else i for i in self.index)
        return Load(self.buffer, index, self.dtype, None if self.mask is None else next(rest))


@dataclass(frozen=True, slots=True, eq=False)
class Const(Expr):
    """A constant.  Its identity includes dtype and bit pattern: `1`, `1.0`, `True` and `-0.0` all differ.

    All NaNs are one: no text keeps their sign.
    """

    value: Scalar
    dtype: torch.dtype

    def _key(self) -> tuple[object, ...]:
        bits: object = self.value
        if isinstance(self.value, float):
            bits = struct.pack("<d", math.nan if math.isnan(self.value) else self.value)
        return (type(self.value), bits, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class IndexValue(Expr):
    """The value of an index expression at the current point of the iteration space."""

    index: sympy.Expr
    dtype: torch.dtype = torch.int64

    def _key(self) -> tuple[object, ...]:
        return (self.index, self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Op(Expr):
    """A scalar operation of `scalar_ops.SCALAR_OPS` on operands of equal dtype (`where` takes a bool first)."""

    name: ScalarName
    args: tuple[Expr, ...]
    dtype: torch.dtype

    def _key(self) -> tuple[object, ...]:
        return (self.name, self.args, self.dtype)

    def children(self) -> tuple[Expr, ...]:
        return self.args

    def rebuild(self, children: Sequence[Expr]) -> Expr:
        return Op(self.name, tuple(children), self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Cast(Expr):
    """Conversion to `dtype` with PyTorch's semantics (float → int truncates; anything → bool is `!= 0`)."""

    arg: Expr
    dtype: torch.dtype
    implicit: bool = False

    def _key(self) -> tuple[object, ...]:
        return (self.arg, self.dtype, self.implicit)

    def children(self) -> tuple[Expr, ...]:
        return (self.arg,)

    def rebuild(self, children: Sequence[Expr]) -> Expr:
        return make_cast(children[0], self.dtype, implicit=self.implicit)


@dataclass(frozen=True, slots=True, eq=False)
class Random(Expr):
    """A float32 from Philox4x32-10 keyed by the int64 `seed`, at counter `offset`.

    `kind` is "uniform" ([0, 1), 24 bits of one of the four output words) or "normal" (Box-Muller on two of them); the
    others belong to the neighbours, which share the evaluation (`random/philox.py`).
    """

    kind: Distribution
    seed: Expr
    offset: sympy.Expr
    dtype: torch.dtype = torch.float32

    def _key(self) -> tuple[object, ...]:
        return (self.kind, self.seed, self.offset)

    def children(self) -> tuple[Expr, ...]:
        return (self.seed,)

    def rebuild(self, children: Sequence[Expr]) -> Expr:
        return Random(self.kind, children[0], self.offset)


@dataclass(frozen=True, slots=True, eq=False)
class TileRef(Expr):
    """The result of the fold called `name`, or its running value inside its loop.

    `before`: the running value before the current block was added.
    """

    name: str
    dtype: torch.dtype
    before: bool = False

    def _key(self) -> tuple[object, ...]:
        return (self.name, self.dtype, self.before)


ConcreteExpr: TypeAlias = "Load | Const | IndexValue | Op | Cast | Random | TileRef"


def concrete(expr: Expr) -> ConcreteExpr:
    """Return the expression, typed as a union of all kinds, so that a `match` over it is checked for completeness."""
    return cast("ConcreteExpr", expr)


# Construction -------------------------------------------------------------------------------------------------------


def position(index: sympy.Expr) -> Expr:
    """Return an index as an int64 value: a constant if it is a number."""
    return const(int(index), torch.int64) if index.is_Integer else IndexValue(index)


def const(value: Scalar, dtype: torch.dtype) -> Const:
    """Return a constant converted to `dtype`'s own Python type.

    >>> const(1, torch.float32).value, const(2.7, torch.int64).value, const(3, torch.bool).value
    (1.0, 2, True)
    """
    if dtype is torch.bool:
        return Const(bool(value), dtype)
    if dtype.is_floating_point:
        return Const(float(value), dtype)
    return Const(int(value), dtype)


def make_op(name: ScalarName, *args: Expr) -> Op:
    """Build a scalar operation of operands of one dtype (except the condition of `where`).

    >>> x, y = Load("x", (), torch.float32), Load("y", (), torch.float32)
    >>> make_op("add", x, y).dtype, make_op("lt", x, y).dtype
    (torch.float32, torch.bool)
    """
    return Op(name, args, result_dtype(name, args[-1].dtype))


def make_cast(arg: Expr, dtype: torch.dtype, *, implicit: bool = False) -> Expr:
    """Cast `arg` to `dtype`, dropping an implicit rounding of `arg`, or of the arms of a `where`, on the way.

    The rounding of a stored bfloat16 intermediate is an artefact of eager execution; between fused operations the
    float32 value is kept.  Explicit casts written by the user are kept, except casts of bools, which round nothing.

    >>> x, on = Load("x", (), torch.float32), Load("on", (), torch.bool)
    >>> make_cast(make_cast(x, torch.bfloat16, implicit=True), torch.float32) is x
    True
    >>> make_cast(make_cast(x, torch.bfloat16, implicit=True), torch.float16) is make_cast(x, torch.float16)
    True
    >>> make_cast(make_cast(on, torch.bfloat16), torch.float32) is make_cast(on, torch.float32)
    True
    """
    if arg.dtype is dtype:
        return arg
    if isinstance(arg, Const):
        value = torch.tensor(arg.value, dtype=arg.dtype).to(dtype).item()
        return Const(value, dtype)
    if isinstance(arg, Cast) and _disappears(arg, dtype):
        return make_cast(arg.arg, dtype, implicit=implicit)
    if isinstance(arg, Cast) and arg.arg.dtype is torch.bool:
        return make_cast(arg.arg, dtype)
    if isinstance(arg, Op) and _disappears(arg, dtype):
        mask, *arms = arg.args
        return Op("where", (mask, *(make_cast(arm, dtype, implicit=implicit) for arm in arms)), dtype)
    return Cast(arg, dtype, implicit)


def _disappears(arg: Expr, dtype: torch.dtype) -> bool:
    """Return whether `arg` (or an arm of a `where`) is an implicit rounding that a cast to `dtype` makes redundant.

    That is so if `dtype` is the dtype before that rounding, or another float: the unrounded value is then rounded once.
    """
    if isinstance(arg, Op) and arg.name == "where":
        return any(_disappears(arm, dtype) for arm in arg.args[1:])
    if not isinstance(arg, Cast) or not arg.implicit or not arg.dtype.is_floating_point:
        return False
    narrowed = arg.arg.dtype.is_floating_point and arg.arg.dtype.itemsize > arg.dtype.itemsize
    return arg.arg.dtype is dtype or (dtype.is_floating_point and narrowed)


def as_stored(expr: Expr) -> Expr:
    """Return `expr` with its own roundings as explicit as a store would be: `make_cast` drops none of them.

    Its own are the rounding that it is, if it is one, and those among which it chooses.

    >>> x, on = Load("x", (), torch.float32), Load("on", (), torch.bool)
    >>> half = make_cast(x, torch.bfloat16, implicit=True)
    >>> chosen = as_stored(make_op("where", on, half, const(0, torch.bfloat16)))
    >>> chosen.args[1] is make_cast(x, torch.bfloat16)
    True
    """
    stored: dict[Expr, Expr] = {}
    for node in passed_on(expr):
        match node:
            case Cast(arg, dtype, implicit=True):
                stored[node] = Cast(arg, dtype)
            case Op("where", (mask, *arms)):
                stored[node] = node.rebuild((mask, *(stored[arm] for arm in arms)))
            case _:
                stored[node] = node
    return stored[expr]


def passed_on(expr: Expr) -> list[Expr]:
    """Return the expressions whose values `expr` may be: itself and, at any depth, its choices; choices first."""
    order = postorder(expr)
    reached = {expr}
    for node in reversed(order):
        if node in reached and isinstance(node, Op) and node.name == "where":
            reached.update(node.args[1:])
    return [node for node in order if node in reached]


def guarded(expr: Expr, mask: Expr, safe: Iterable[Expr] = ()) -> Expr:
    """Return `expr` where `mask` is true and 0 elsewhere; where it is false, loads and checks are suppressed.

    Loads below `safe` expressions stay as they are: they are evaluated anyway, as positions at which `expr` loads.
    """
    unmasked = frozenset(postorder(*safe))

    def rule(node: Expr) -> Expr | None:
        if node in unmasked:
            return None
        if isinstance(node, Op) and node.name == "checked":
            return checked_where(node, mask)
        if not isinstance(node, Load):
            return None
        both = mask if node.mask in (None, mask) else make_op("and", mask, node.mask)
        return Load(node.buffer, node.index, node.dtype, both)

    inside = rewrite([expr], rule)[0]
    if isinstance(inside, Load):
        return inside
    return Op("where", (mask, inside, const(0, expr.dtype)), expr.dtype)


def checked_where(check: Op, mask: Expr) -> Expr:
    """Make a check hold where `mask` is false: its position becomes 0 there."""
    index, *rest = check.args
    return check.rebuild([Op("where", (mask, index, const(0, index.dtype)), index.dtype), *rest])


# Traversal ------------------------------------------------------------------------------------------------------------


def postorder(*roots: Expr) -> list[Expr]:
    """Return every distinct sub-expression of `roots`, operands before their users."""
    seen: set[Expr] = set()
    order: list[Expr] = []
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            if children := node.children():
                stack.append((node, True))
                stack.extend([(child, False) for child in reversed(children) if child not in seen])
            else:
                order.append(node)
    return order


def rewrite(roots: Sequence[Expr], rule: Callable[[Expr], Expr | None]) -> list[Expr]:
    """Rebuild `roots` bottom-up.  `rule` sees each node over rewritten children; None keeps the node."""
    done: dict[Expr, Expr] = {}
    for node in postorder(*roots):
        old = node.children()
        new = [done[child] for child in old]
        rebuilt = node if all(a is b for a, b in zip(old, new, strict=True)) else node.rebuild(new)
        replaced = rule(rebuilt)
        done[node] = rebuilt if replaced is None else replaced
    return [done[root] for root in roots]


def renamed(roots: Sequence[Expr], names: Mapping[str, str]) -> list[Expr]:
    """Return the roots with loads renamed: `names` maps buffers to buffers."""

    def rule(node: Expr) -> Expr | None:
        if isinstance(node, Load) and node.buffer in names:
            return Load(names[node.buffer], node.index, node.dtype, node.mask)
        return None

    return rewrite(roots, rule)


def loads(*roots: Expr) -> Iterator[Load]:
    """Yield every distinct load below `roots`, including those inside indices and masks."""
    return (node for node in postorder(*roots) if isinstance(node, Load))


def is_of_static_loads(row: Expr) -> bool:
    """Return whether an expression is computed from loads without conditions, at static indices, and cannot fail."""
    nodes = postorder(row)
    return any(isinstance(node, Load) for node in nodes) and all(
        isinstance(node, (Const, Cast))
        or (isinstance(node, Load) and not node.children())
        or (isinstance(node, Op) and node.name != CHECKED)
        for node in nodes
    )


def index_of(node: Expr) -> tuple[sympy.Expr, ...]:
    """Return the index expressions held by this node itself (not by its children)."""
    match concrete(node):
        case Load() as load:
            return tuple(i for i in load.index if not isinstance(i, Expr))
        case IndexValue(index=index) | Random(offset=index):
            return (index,)
        case Op() | Const() | Cast() | TileRef():
            return ()
        case unknown:
            assert_never(unknown)


def index_symbols(node: Expr) -> set[sympy.Symbol]:
    """Return the symbols of the indices that this node itself (not its children) holds."""
    return {symbol for index in index_of(node) for symbol in index.free_symbols}


def free_axes(*roots: Expr) -> frozenset[sympy.Symbol]:
    """Return the axis symbols that `roots` depend on (folds count as none: see `kernel.spans`)."""
    symbols: set[sympy.Symbol] = set()
    for node in postorder(*roots):
        for index in index_of(node):
            symbols |= index.free_symbols
    return frozenset(symbols)


AxisMap: TypeAlias = Mapping[sympy.Symbol, Index]
