"""Arguments of calls: containers that nest, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves(arg: object) -> Iterator[object]:
    """What the containers of an argument hold."""
    if isinstance(arg, (list, tuple)):
        for part in arg:
            yield from leaves(part)
    elif isinstance(arg, Mapping):
        yield from leaves(list(arg.values()))
    else:
        yield arg


def map_leaves(arg: object, change: Callable[[Any], object]) -> Any:
    """An argument with what `change` makes of what its containers hold.

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
