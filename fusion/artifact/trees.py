"""Describes nested arguments and results as JSON, and flattens and rebuilds values by that description.

Input: tuples, lists, dictionaries, and types that the process has registered with PyTorch's pytree under a name;
output: their leaves in order, or the reverse.  Types are looked up among the registered ones, never imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from torch.utils import _pytree as pytree

from fusion.artifact.manifest import RegisteredType, Structure
from fusion.lowering.errors import ArtifactError, Unsupported

LEAF: Final = "*"

_IMPORTING = ("collections.defaultdict", "collections.namedtuple")
"""Registered types whose descriptions name modules that PyTorch would import."""


def described(spec: pytree.TreeSpec) -> Structure:
    """Return the structure of a value as JSON.

    Raises:
        Unsupported: a type in it is not registered under a name.
    """
    kind, children = spec.type, [described(child) for child in spec.children()]
    if spec.is_leaf():
        return LEAF
    if kind is tuple:
        return {"tuple": children}
    if kind is list:
        return {"list": children}
    if kind is dict:
        if not all(isinstance(key, (str, int)) for key in spec.context):
            raise Unsupported("dictionaries with keys other than text and integers are not saved")
        return {"dict": [*zip(spec.context, children, strict=True)]}
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is None or known.serialized_type_name in (*_IMPORTING, pytree.NO_SERIALIZED_TYPE_NAME_FOUND):
        raise Unsupported(
            f"arguments and results of type {getattr(kind, '__name__', kind)} are not saved",
            hint="pass tuples, lists or dictionaries",
        )
    dump = known.to_dumpable_context
    context = spec.context if dump is None else dump(spec.context)
    return {"type": known.serialized_type_name, "context": context, "parts": children}


def leaf_names(structure: Structure, positional: Sequence[str]) -> list[str]:
    """Return a name for each leaf of the arguments, as the caller would write it.

    Args:
        structure: of a tuple with the positional arguments and a dictionary of the others.
        positional: the names of the former, as far as they are known.

    >>> leaf_names({"tuple": [{"tuple": ["*", {"list": ["*"]}]}, {"dict": [["z", "*"]]}]}, ["x"])
    ['x', 'argument 1[0]', 'z']
    """
    (_, args), (_, kwargs) = _parts(structure)
    passed, named = [part for _, part in _parts(args)], [*_parts(kwargs)]
    names = [*positional, *(f"argument {k}" for k in range(len(positional), len(passed)))]
    parts = [*zip(names, passed, strict=True), *named]
    return [name for start, part in parts for name in _names(part, str(start))]


def result_names(structure: Structure) -> list[str]:
    """Return a name for each leaf of the results.

    >>> result_names("*"), result_names({"tuple": ["*", {"dict": [["z", "*"]]}]})
    (['result'], ['result[0]', "result[1]['z']"])
    """
    return [*_names(structure, "result")]


def _names(structure: Structure, start: str) -> Iterator[str]:
    if isinstance(structure, str):
        yield start
        return
    for key, part in _parts(structure):
        yield from _names(part, f"{start}[{key!r}]")


def _parts(structure: Structure) -> Iterator[tuple[int | str, Structure]]:
    """Yield the structures in a container, each with its number or its key."""
    if isinstance(structure, str):
        return
    if "dict" in structure:
        yield from structure["dict"]
    elif "type" in structure:
        yield from enumerate(structure["parts"])
    else:
        yield from enumerate(structure["tuple"] if "tuple" in structure else structure["list"])


def leaves(structure: Structure, value: object, place: str = "the arguments") -> Iterator[object]:
    """Yield the leaves of a value.

    Raises:
        ArtifactError: it has another structure.

    >>> list(leaves({"tuple": ["*", {"dict": [["a", "*"], ["b", "*"]]}]}, (1, {"b": 3, "a": 2})))
    [1, 2, 3]
    """
    if isinstance(structure, str):
        yield value
    elif "type" in structure:
        yield from _leaves_of_type(structure, value, place)
    elif "dict" in structure:
        keys = [key for key, _ in structure["dict"]]
        if type(value) is not dict or {*value} != {*keys}:
            raise _differs(place, f"a dictionary with the keys {keys}", value)
        for key, part in structure["dict"]:
            yield from leaves(part, value[key], f"{place}[{key!r}]")
    else:
        kind, parts = (tuple, structure["tuple"]) if "tuple" in structure else (list, structure["list"])
        if type(value) is not kind or not isinstance(value, (list, tuple)) or len(value) != len(parts):
            raise _differs(place, f"a {kind.__name__} of {len(parts)}", value)
        for number, (part, inner) in enumerate(zip(parts, value, strict=True)):
            yield from leaves(part, inner, f"{place}[{number}]")


def _leaves_of_type(structure: RegisteredType, value: object, place: str) -> Iterator[object]:
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


def assembled(structure: Structure, parts: Sequence[object]) -> object:
    """Return the value of this structure with these leaves.

    Raises:
        ArtifactError: a type is not registered in this process.

    >>> assembled({"tuple": ["*", {"dict": [["a", "*"]]}]}, [1, 2])
    (1, {'a': 2})
    """
    remaining = iter(parts)
    return _assembled(structure, remaining)


def _assembled(structure: Structure, remaining: Iterator[object]) -> object:
    if isinstance(structure, str):
        return next(remaining)
    if "type" in structure:
        inner = [_assembled(part, remaining) for part in structure["parts"]]
        kind, known = _registered(structure["type"])
        load, context = known.from_dumpable_context, structure["context"]
        return pytree.SUPPORTED_NODES[kind].unflatten_fn(inner, context if load is None else load(context))
    if "dict" in structure:
        return {key: _assembled(part, remaining) for key, part in structure["dict"]}
    if "list" in structure:
        return [_assembled(part, remaining) for part in structure["list"]]
    return tuple([_assembled(part, remaining) for part in structure["tuple"]])


def _registered(name: str) -> tuple[type, pytree._SerializeNodeDef]:
    """Return the type with a name, and how its values are written.

    Raises:
        ArtifactError: this process has registered none.
    """
    kind = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
    if kind is None or name in _IMPORTING:
        raise ArtifactError(
            f"arguments or results are of type {name}, which this process does not know",
            hint=f"import {name.rpartition('.')[0]} before the call",
        )
    return kind, pytree.SUPPORTED_SERIALIZED_TYPES[kind]


__all__ = ["assembled", "described", "leaf_names", "leaves", "result_names"]
