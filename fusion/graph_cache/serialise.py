"""Serialises a value as text that deserialises to an equal one.

Input: a value of numbers, text, containers, sympy expressions, PyTorch's dtypes, devices and operations, and this
compiler's dataclasses and enums; output: JSON.  Equal values give equal text, so that the text also serves as a key.
Values of other types are refused.

Reading is unlike unpickling: it makes values of listed types only, from parts of the types that they take.  In
particular an expression is built from expressions, never from text, which sympy would evaluate.  Functions and
operations of PyTorch are looked up, not called; a graph that was read calls them when it runs.

The text is one list of rows, each a tag with its fields; in rows of composite values a number is the position of an
earlier row.  So shared values are written once, and values of any depth are written and read without recursion.
"""

from __future__ import annotations

import base64
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import reduce
from types import FunctionType
from typing import Any, TypeAlias, cast

import sympy
import torch
from sympy.core import numbers
from sympy.core.operations import AssocOp
from sympy.functions.elementary.piecewise import ExprCondPair
from sympy.logic import boolalg
from torch._ops import OpOverload
from torch.utils._sympy import functions as functions_of_sizes

from fusion.lowering.ir import division
from fusion.lowering.ir.sizes import Computed

Kinds: TypeAlias = Mapping[str, type]
"""Dataclasses and enums that may be serialised, by name."""

Row: TypeAlias = "tuple[object, ...]"

_LEAVES = frozenset({str, int, float, bool, type(None)})
"""Types of most values without parts: they need no visit of their own."""

LARGEST_TENSOR = 1 << 16
"""The largest tensor, in bytes, that may be part of a value."""

_SYMPY: Mapping[tuple[str, str], type[sympy.Basic]] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        *(sympy.Add, sympy.Mul, sympy.Pow, sympy.Mod, sympy.Abs, sympy.Max, sympy.Min, sympy.floor, sympy.ceiling),
        *(sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or, sympy.Not),
        *(boolalg.BooleanTrue, boolalg.BooleanFalse, sympy.Piecewise, ExprCondPair),
        *(numbers.Infinity, numbers.NegativeInfinity, numbers.NaN, division.FloorDiv, division.Mod),
        *(each for each in vars(functions_of_sizes).values() if isinstance(each, type)),
    )
    if issubclass(kind, sympy.Basic)
}
"""The expressions that may be serialised, by module and name; their arguments are expressions."""

_TORCH: Mapping[str, object] = {
    str(each).removeprefix("torch."): each
    for each in vars(torch).values()
    if isinstance(each, (torch.dtype, torch.layout, torch.memory_format))
}
_FUNCTIONS = ("torch", "_operator", "fusion.")
_OPERATION = re.compile(r"[A-Za-z]\w*\.\w+\.\w+")


class Unwritten(Exception):
    """A value cannot be serialised; the message names its type."""


def write(value: object, kinds: Kinds) -> str:
    """Serialise `value`.

    Raises:
        Unwritten: a part of it cannot be serialised.

    >>> read(write((1, -0.0, ["a", None]), {}), {})
    (1, -0.0, ['a', None])
    """
    return json.dumps(_RowWriter(kinds).rows_of(value), separators=(",", ":"), ensure_ascii=True)


class _RowWriter:
    """The rows so far → their positions, and the position of each object by its id."""

    def __init__(self, kinds: Kinds) -> None:
        self.names = {kind: name for name, kind in kinds.items()}
        self.rows: dict[Row, int] = {}
        self.places: dict[int, int] = {}
        self.alive: list[object] = []  # keeps ids unique: an object that is alive keeps its id

    def rows_of(self, value: object) -> list[Row]:
        pending: list[tuple[object, tuple[Row, Sequence[object]] | None]] = [(value, None)]
        while pending:
            one, known = pending.pop()
            if id(one) in self.places:
                continue
            head, parts = self._decomposed(one) if known is None else known
            missing = self._placed(parts)
            if missing:
                assert known is None, "a value contains itself"
                self.alive += parts
                pending.append((one, (head, parts)))
                pending += [(part, None) for part in reversed(missing)]
                continue
            self._put(one, (*head, *(self.places[id(part)] for part in parts)))
        ordered = list(self.rows)
        assert self.places[id(value)] == len(ordered) - 1, "the outermost value is the last row"
        return ordered

    def _placed(self, parts: Sequence[object]) -> list[object]:
        """Place the parts that have none themselves; return the others that have no place yet."""
        missing: list[object] = []
        for part in parts:
            if id(part) in self.places:
                continue
            if type(part) in _LEAVES:
                self._put(part, _atom(part))
            else:
                missing.append(part)
        return missing

    def _put(self, value: object, row: Row) -> None:
        self.places[id(value)] = self.rows.setdefault(row, len(self.rows))
        self.alive.append(value)

    def _decomposed(self, value: object) -> tuple[Row, Sequence[object]]:
        """Return the row of a value without its parts, and the parts."""
        if type(value) in self.names:
            return self._of_kind(value)
        if isinstance(value, sympy.Basic):
            return _sympy_parts(value)
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return ("list" if isinstance(value, list) else "tuple",), list(value)
        if isinstance(value, Mapping):
            return ("dict",), [part for pair in value.items() for part in pair]
        if isinstance(value, (set, frozenset)):
            return ("set",), sorted(value, key=repr)
        return _atom(value), ()

    def _of_kind(self, value: object) -> tuple[Row, Sequence[object]]:
        name = self.names[type(value)]
        if isinstance(value, Enum):
            return ("enum", name, value.name), ()
        own = [getattr(value, field.name) for field in fields(value) if field.init]  # type: ignore[arg-type]  # a dataclass
        return ("kind", name), own


def _atom(value: object) -> Row:
    """Return the row of a value without parts."""
    if value is None or isinstance(value, (bool, str)):
        return ("plain", "" if value is None else type(value).__name__, value)
    if type(value) is int:
        return ("int", str(value))
    if type(value) is float:
        return ("float", value.hex())
    if type(value) is complex:
        return ("complex", value.real.hex(), value.imag.hex())
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return ("torch", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return ("device", str(value))
    if isinstance(value, OpOverload):
        return ("operation", str(value))
    if isinstance(value, torch.Tensor):
        return _tensor_row(value)
    if callable(value) and _lookup(getattr(value, "__module__", ""), getattr(value, "__qualname__", "")) is value:
        return ("function", value.__module__, value.__qualname__)  # type: ignore[attr-defined]  # read by the condition
    raise Unwritten(f"a {type(value).__name__}")


def _sympy_parts(value: sympy.Basic) -> tuple[Row, Sequence[object]]:
    if isinstance(value, Computed):
        return ("computed",), [value.meaning]
    if type(value) is sympy.Symbol:
        return ("symbol", value.name, *sorted(f"{'+' if holds else '-'}{fact}" for fact, holds in _facts(value))), ()
    if isinstance(value, sympy.Integer):
        return ("integer", str(int(value))), ()
    if isinstance(value, sympy.Rational):
        return ("rational", str(value.p), str(value.q)), ()
    kind = type(value)
    if _SYMPY.get((kind.__module__, kind.__qualname__)) is not kind:
        raise Unwritten(f"a {kind.__name__} of sizes")
    return ("sympy", kind.__module__, kind.__qualname__), value.args


def _facts(symbol: sympy.Symbol) -> list[tuple[str, bool]]:
    return [(fact, holds) for fact, holds in symbol.assumptions0.items() if holds is not None]


def _tensor_row(value: torch.Tensor) -> Row:
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.device.type != "cpu" or value.nbytes > LARGEST_TENSOR or value.dtype.is_complex:
        raise Unwritten(f"a tensor of shape {tuple(value.shape)} on {value.device}")
    data = bytes(value.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    layout = [*value.shape], [*value.stride()]
    return ("tensor", str(value.dtype).removeprefix("torch."), json.dumps(layout), base64.b64encode(data).decode())


def read(text: str, kinds: Kinds) -> object:
    """Deserialise a result of `write`.

    Raises:
        ValueError: the text is malformed; also KeyError, IndexError, TypeError, AttributeError.
    """
    values: list[object] = []
    for tag, *rest in json.loads(text):
        values.append(_READERS[tag](rest, values, kinds))
    return values[-1]


Fields: TypeAlias = Sequence[Any]
"""The fields of a row after its tag."""


def _parts(rest: Fields, values: Sequence[object]) -> list[object]:
    return [values[place] for place in rest]


def _pairs(rest: Fields, values: Sequence[object]) -> dict[object, object]:
    items = _parts(rest, values)
    return dict(zip(items[::2], items[1::2], strict=True))


def _symbol(rest: Fields) -> sympy.Symbol:
    name, *facts = rest
    return sympy.Symbol(name, **{fact[1:]: fact[0] == "+" for fact in facts})


def _expressions(positions: Fields, values: Sequence[object]) -> list[sympy.Basic]:
    parts = [part for part in _parts(positions, values) if isinstance(part, sympy.Basic)]
    if len(parts) != len(positions):
        raise TypeError("an expression consists of expressions")
    return parts


def _function_of_sizes(rest: Fields, values: Sequence[object]) -> sympy.Basic:
    module, name, *positions = rest
    kind, parts = _SYMPY[module, name], _expressions(positions, values)
    if issubclass(kind, AssocOp) and len(parts) > 1:  # canonical already; canonicalising imports much of sympy
        return kind._from_args(cast("list[sympy.Expr]", parts))
    return kind(*parts)


def _operation(rest: Fields) -> object:
    if not _OPERATION.fullmatch(rest[0]):
        raise ValueError(f"{rest[0]} is no operation")
    operation: object = reduce(getattr, rest[0].split("."), torch.ops)
    if not isinstance(operation, OpOverload):
        raise ValueError(f"{rest[0]} is no operation")
    return operation


def _lookup(module: str, name: str) -> object:
    """Return the function of that name, if its module's functions may be serialised; else None."""
    if not isinstance(module, str) or not f"{module}.".startswith(_FUNCTIONS):
        return None
    function = getattr(sys.modules.get(module), name, None)
    return function if isinstance(function, (FunctionType, type(operator.add))) else None


def _function(rest: Fields) -> object:
    function = _lookup(*rest)
    if function is None:
        raise ValueError(f"there is no function {rest}")
    return function


def _tensor(rest: Fields) -> torch.Tensor:
    name, layout, data = rest
    shape, strides = json.loads(layout)
    dtype = _TORCH[name]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    flat = torch.tensor(list(base64.b64decode(data)), dtype=torch.uint8).view(dtype)
    return torch.empty_strided(shape, strides, dtype=flat.dtype).copy_(flat.reshape(shape))


_READERS: Mapping[str, Callable[[Fields, Sequence[object], Kinds], object]] = {
    "plain": lambda rest, values, kinds: rest[1],
    "int": lambda rest, values, kinds: int(rest[0]),
    "float": lambda rest, values, kinds: float.fromhex(rest[0]),
    "complex": lambda rest, values, kinds: complex(*map(float.fromhex, rest)),
    "torch": lambda rest, values, kinds: _TORCH[rest[0]],
    "device": lambda rest, values, kinds: torch.device(rest[0]),
    "operation": lambda rest, values, kinds: _operation(rest),
    "function": lambda rest, values, kinds: _function(rest),
    "tensor": lambda rest, values, kinds: _tensor(rest),
    "computed": lambda rest, values, kinds: Computed(*_expressions(rest, values)),
    "symbol": lambda rest, values, kinds: _symbol(rest),
    "integer": lambda rest, values, kinds: sympy.Integer(int(rest[0])),
    "rational": lambda rest, values, kinds: sympy.Rational(*map(int, rest)),
    "sympy": lambda rest, values, kinds: _function_of_sizes(rest, values),
    "list": lambda rest, values, kinds: _parts(rest, values),
    "tuple": lambda rest, values, kinds: tuple(_parts(rest, values)),
    "dict": lambda rest, values, kinds: _pairs(rest, values),
    "set": lambda rest, values, kinds: frozenset(_parts(rest, values)),
    "enum": lambda rest, values, kinds: kinds[rest[0]][rest[1]],  # type: ignore[index]  # the kind is an enum
    "kind": lambda rest, values, kinds: kinds[rest[0]](*_parts(rest[1:], values)),
}

__all__ = ["Kinds", "Unwritten", "read", "write"]
