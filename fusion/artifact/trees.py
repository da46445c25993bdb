"""Describes nested arguments and results as JSON, and takes values apart and puts them together by it.

Input: tuples, lists, dictionaries, and types that the process has registered with PyTorch's pytree under a name;
output: their leaves in order, or the reverse.  Types are looked up among the registered ones, never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from fusion.artifact.values import Json
from fusion.lowering.errors import ArtifactError, Unsupported

LEAF = "*"

_IMPORTING = ("collections.defaultdict", "collections.namedtuple")
"""Registered types whose descriptions name what PyTorch would import."""


def described(spec: pytree.TreeSpec) -> Json:
    """Return the structure of a value as JSON.

    Raises:
        Unsupported: a type in it is not registered under a name.
    """
    kind, children = spec.type, [described(child) for child in spec.children()]
    if spec.is_leaf():
        return LEAF
    if kind in (tuple, list):
        return {kind.__name__: children}
    if kind is dict:
        if not all(isinstance(key, (str, int)) for key in spec.context):
            raise Unsupported("dictionaries with keys other than text and integers are not saved")
        return {"dict": [[key, child] for key, child in zip(spec.context, children, strict=True)]}
    known: Any = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    name = getattr(known, "serialized_type_name", None)
    if not isinstance(name, str) or name in _IMPORTING or name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        raise Unsupported(
            f"arguments and results of type {getattr(kind, '__name__', kind)} are not saved",
            hint="pass tuples, lists or dictionaries",
        )
    dump = known.to_dumpable_context
    return {"type": name, "context": spec.context if dump is None else dump(spec.context), "parts": children}


def leaf_names(structure: Json, positional: Sequence[str]) -> list[str]:
    """Return a name for each leaf of the arguments, as the caller would write it.

    Args:
        structure: of a tuple with the positional arguments and a dictionary of the others.
        positional: the names of the former, as far as they are known.

    >>> leaf_names({"tuple": [{"tuple": ["*", {"list": ["*"]}]}, {"dict": [["z", "*"]]}]}, ["x"])
    ['x', 'argument 1[0]', 'z']
    """
    args, kwargs = structure["tuple"]
    names = [*positional, *(f"argument {k}" for k in range(len(positional), len(args["tuple"])))]
    parts = [*zip(names, args["tuple"], strict=True), *kwargs["dict"]]
    return [name for start, part in parts for name in _names(part, start)]


def result_names(structure: Json) -> list[str]:
    """Return a name for each leaf of the results.

    >>> result_names("*"), result_names({"tuple": ["*", {"dict": [["z", "*"]]}]})
    (['result'], ['result[0]', "result[1]['z']"])
    """
    return [*_names(structure, "result")]


def _names(structure: Json, start: str) -> Iterator[str]:
    if structure == LEAF:
        yield start
        return
    (parts,) = (value for key, value in structure.items() if key not in ("type", "context"))
    for number, part in enumerate(parts):
        key, inner = part if "dict" in structure else (number, part)
        yield from _names(inner, f"{start}[{key!r}]")


def leaves(structure: Json, value: object, place: str = "the arguments") -> Iterator[object]:
    """Yield the leaves of a value.

    Raises:
        ArtifactError: it has another structure.

    >>> list(leaves({"tuple": ["*", {"dict": [["a", "*"], ["b", "*"]]}]}, (1, {"b": 3, "a": 2})))
    [1, 2, 3]
    """
    if structure == LEAF:
        yield value
        return
    ((kind, parts),) = structure.items() if "type" not in structure else [("type", structure["parts"])]
    if kind == "type":
        yield from _leaves_of_type(structure, value, place)
    elif kind == "dict":
        if type(value) is not dict or {*value} != {key for key, _ in parts}:
            raise _differs(place, f"a dictionary with the keys {[key for key, _ in parts]}", value)
        for key, part in parts:
            yield from leaves(part, value[key], f"{place}[{key!r}]")
    else:
        if type(value).__name__ != kind or not isinstance(value, (list, tuple)) or len(value) != len(parts):
            raise _differs(place, f"a {kind} of {len(parts)}", value)
        for number, (part, inner) in enumerate(zip(parts, value, strict=True)):
            yield from leaves(part, inner, f"{place}[{number}]")


def _leaves_of_type(structure: Json, value: object, place: str) -> Iterator[object]:
    kind, known = _registered(structure["type"])
    if type(value) is not kind:
        raise _differs(place, f"a {structure['type']}", value)
    inner, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
    if (context if known.to_dumpable_context is None else known.to_dumpable_context(context)) != structure["context"]:
        raise ArtifactError(f"{place} holds other parts than those that this was saved for")
    for number, (part, each) in enumerate(zip(structure["parts"], inner, strict=True)):
        yield from leaves(part, each, f"{place}[{number}]")


def _differs(place: str, expected: str, value: object) -> ArtifactError:
    held = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
    held = f" with the keys {[*value]}" if isinstance(value, dict) else held
    return ArtifactError(f"{place} is a {type(value).__name__}{held}, and this was saved for {expected}")


def assembled(structure: Json, parts: Sequence[object]) -> object:
    """Return the value of this structure with these leaves.

    Raises:
        ArtifactError: a type is not registered in this process.

    >>> assembled({"tuple": ["*", {"dict": [["a", "*"]]}]}, [1, 2])
    (1, {'a': 2})
    """
    remaining = iter(parts)
    return _assembled(structure, remaining)


def _assembled(structure: Json, remaining: Iterator[object]) -> object:
    if structure == LEAF:
        return next(remaining)
    if "type" in structure:
        inner = [_assembled(part, remaining) for part in structure["parts"]]
        kind, known = _registered(structure["type"])
        load, context = known.from_dumpable_context, structure["context"]
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(inner, context if load is None else load(context))
    if "dict" in structure:
        return {key: _assembled(part, remaining) for key, part in structure["dict"]}
    ((kind_name, inner_parts),) = structure.items()
    values = [_assembled(part, remaining) for part in inner_parts]
    return values if kind_name == "list" else tuple(values)


def _registered(name: str) -> tuple[Any, Any]:
    kind: Any = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if kind is None or name in _IMPORTING:
        raise ArtifactError(
            f"arguments or results are of type {name}, which this process does not know",
            hint=f"import {name.rpartition('.')[0]} before the call",
        )
    return kind, pytree.SUPPORTED_SERIALIZED_TYPES[kind]


__all__ = ["assembled", "described", "leaf_names", "leaves", "result_names"]
