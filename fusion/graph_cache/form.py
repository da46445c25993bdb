"""Form: a value as text that reads back as an equal one, and never runs anything while it is read, as a pickle would.

Input: a value made of numbers, text, containers, sympy expressions, PyTorch's dtypes, devices and operations, and
dataclasses and enums of ours; output: JSON.  Equal values give equal text, so that the text also serves as a key.  A
value of another kind is refused.

The text is one list of rows, each a tag with what it holds; a number in a row that holds values is the position of an
earlier row.  So what is shared is written once, and however deep a value is, it is written and read in a loop.
"""

from __future__ import annotations

import base64
import importlib
import json
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from functools import reduce
from types import FunctionType
from typing import Any, TypeAlias

import sympy
import torch
from sympy.core.operations import AssocOp
from torch._ops import OpOverload

from fusion.lowering.sizes import Computed

Kinds: TypeAlias = Mapping[str, type]
"""Dataclasses and enums that may be written, by their names."""

Row: TypeAlias = "tuple[object, ...]"

LARGEST_TENSOR = 1 << 16
"""Bytes of a tensor that may be part of a value."""

_SYMPY = ("sympy.", "torch.utils._sympy.functions", "fusion.lowering.division")
_FUNCTIONS = ("torch", "_operator", "fusion.")


class Unwritten(Exception):
    """A value has no form; the message says what there was."""


def write(value: object, kinds: Kinds) -> str:
    """The text of `value`.

    Raises:
        Unwritten: a part of it has no form.

    >>> read(write((1, -0.0, ["a", None]), {}), {})
    (1, -0.0, ['a', None])
    """
    return json.dumps(_Writer(kinds).rows_of(value), separators=(",", ":"), ensure_ascii=True)


class _Writer:
    """The rows so far, each found by what it says and, for what is an object, by the object."""

    def __init__(self, kinds: Kinds) -> None:
        self.names = {kind: name for name, kind in kinds.items()}
        self.rows: dict[Row, int] = {}
        self.places: dict[int, int] = {}
        self.alive: list[object] = []  # as long as it is, its id is its own

    def rows_of(self, value: object) -> list[Row]:
        pending: list[tuple[object, tuple[Row, Sequence[object]] | None]] = [(value, None)]
        while pending:
            one, known = pending.pop()
            if id(one) in self.places:
                continue
            head, parts = self._taken_apart(one) if known is None else known
            missing = [part for part in parts if id(part) not in self.places]
            if missing:
                assert known is None, "a value holds itself"
                self.alive += parts
                pending.append((one, (head, parts)))
                pending += [(part, None) for part in reversed(missing)]
                continue
            row = (*head, *(self.places[id(part)] for part in parts))
            self.places[id(one)] = self.rows.setdefault(row, len(self.rows))
            self.alive.append(one)
        ordered = list(self.rows)
        assert self.places[id(value)] == len(ordered) - 1, "what holds everything is the last row"
        return ordered

    def _taken_apart(self, value: object) -> tuple[Row, Sequence[object]]:
        """A row without its parts, and the parts."""
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
    """The row of a value without parts."""
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
    if callable(value) and _found(getattr(value, "__module__", ""), getattr(value, "__qualname__", "")) is value:
        return ("function", value.__module__, value.__qualname__)  # type: ignore[attr-defined]  # just looked at
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
    if not kind.__module__.startswith(_SYMPY) or isinstance(value, (sympy.Symbol, sympy.Float)):
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
    """The value that `write` was given.

    Raises:
        ValueError: this is no such text; also KeyError, IndexError, TypeError, AttributeError.
    """
    made: list[object] = []
    for tag, *rest in json.loads(text):
        made.append(_READERS[tag](rest, made, kinds))
    return made[-1]


Fields: TypeAlias = Sequence[Any]
"""What a line of JSON holds behind its tag."""


def _parts(rest: Fields, made: Sequence[object]) -> list[Any]:
    return [made[place] for place in rest]


def _pairs(rest: Fields, made: Sequence[object]) -> dict[object, object]:
    found = _parts(rest, made)
    return dict(zip(found[::2], found[1::2], strict=True))


def _symbol(rest: Fields) -> sympy.Symbol:
    name, *facts = rest
    return sympy.Symbol(name, **{fact[1:]: fact[0] == "+" for fact in facts})


def _function_of_sizes(rest: Fields, made: Sequence[object]) -> sympy.Basic:
    module, name, *places = rest
    kind = getattr(importlib.import_module(module), name) if module.startswith(_SYMPY) else None
    if not (isinstance(kind, type) and issubclass(kind, sympy.Basic)):
        raise ValueError(f"{module}.{name} is no function of sizes")
    parts = _parts(places, made)
    if issubclass(kind, AssocOp) and len(parts) > 1:  # in its form already; to bring it there imports much of sympy
        return kind._from_args(parts)  # type: ignore[attr-defined]  # sympy's, of which mypy knows nothing
    return kind(*parts)


def _torch(rest: Fields) -> object:
    found = getattr(torch, rest[0])
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(f"torch.{rest[0]} is no type of elements")
    return found


def _operation(rest: Fields) -> object:
    found: object = reduce(getattr, rest[0].split("."), torch.ops)
    if not isinstance(found, OpOverload):
        raise ValueError(f"{rest[0]} is no operation")
    return found


def _found(module: str, name: str) -> object:
    """The function of that name, in a module whose functions may be written; None where there is none."""
    if not isinstance(module, str) or not f"{module}.".startswith(_FUNCTIONS):
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, (FunctionType, type(operator.add))) else None


def _function(rest: Fields) -> object:
    found = _found(*rest)
    if found is None:
        raise ValueError(f"there is no function {rest}")
    return found


def _tensor(rest: Fields) -> torch.Tensor:
    dtype, layout, data = rest
    shape, strides = json.loads(layout)
    flat = torch.tensor(list(base64.b64decode(data)), dtype=torch.uint8).view(getattr(torch, dtype))
    return torch.empty_strided(shape, strides, dtype=flat.dtype).copy_(flat.reshape(shape))


_READERS: Mapping[str, Callable[[Fields, Sequence[object], Kinds], object]] = {
    "plain": lambda rest, made, kinds: rest[1],
    "int": lambda rest, made, kinds: int(rest[0]),
    "float": lambda rest, made, kinds: float.fromhex(rest[0]),
    "complex": lambda rest, made, kinds: complex(*map(float.fromhex, rest)),
    "torch": lambda rest, made, kinds: _torch(rest),
    "device": lambda rest, made, kinds: torch.device(rest[0]),
    "operation": lambda rest, made, kinds: _operation(rest),
    "function": lambda rest, made, kinds: _function(rest),
    "tensor": lambda rest, made, kinds: _tensor(rest),
    "computed": lambda rest, made, kinds: Computed(*_parts(rest, made)),
    "symbol": lambda rest, made, kinds: _symbol(rest),
    "integer": lambda rest, made, kinds: sympy.Integer(int(rest[0])),
    "rational": lambda rest, made, kinds: sympy.Rational(*map(int, rest)),
    "sympy": lambda rest, made, kinds: _function_of_sizes(rest, made),
    "list": lambda rest, made, kinds: _parts(rest, made),
    "tuple": lambda rest, made, kinds: tuple(_parts(rest, made)),
    "dict": lambda rest, made, kinds: _pairs(rest, made),
    "set": lambda rest, made, kinds: frozenset(_parts(rest, made)),
    "enum": lambda rest, made, kinds: kinds[rest[0]][rest[1]],  # type: ignore[index]  # an enum
    "kind": lambda rest, made, kinds: kinds[rest[0]](*_parts(rest[1:], made)),
}

__all__ = ["Kinds", "Unwritten", "read", "write"]
