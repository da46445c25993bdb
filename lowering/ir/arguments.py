"""Traverses nested arguments of calls: iterates over their leaves, and rebuilds them with other leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import overload


def leaves(arg: object) -> Iterator[object]:
    """Yield the leaves of nested lists, tuples and mappings."""
    if isinstance(arg, (list, tuple)):
        for part in arg:
            yield from leaves(part)
    elif isinstance(arg, Mapping):
        yield from leaves(list(arg.values()))
    else:
        yield arg


@overload
def map_leaves(arg: tuple[object, ...], change: Callable[[object], object]) -> tuple[object, ...]: ...
@overload
def map_leaves(arg: Mapping[str, object], change: Callable[[object], object]) -> dict[str, object]: ...
@overload
def map_leaves(arg: object, change: Callable[[object], object]) -> object: ...
def map_leaves(arg: object, change: Callable[[object], object]) -> object:
    """Rebuild a nested argument with `change` applied to each leaf.

    >>> map_leaves([1, (2, {"three": 3})], lambda number: -number)
    [-1, (-2, {'three': -3})]
    """
    if isinstance(arg, tuple):
        return tuple(map_leaves(part, change) for part in arg)
    if isinstance(arg, list):
        return [map_leaves(part, change) for part in arg]
    if isinstance(arg, Mapping):
        return {key: map_leaves(part, change) for key, part in arg.items()}
    return change(arg)
