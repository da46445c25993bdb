"""Prints results as JSON: dataclasses by the fields that `repr` shows, numbers that JSON lacks as text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping


def print_json(value: object) -> None:
    """Print a result as JSON."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False))


def plain(value: object) -> object:
    """Return a value as dictionaries, lists, text and numbers.

    >>> plain({"a": (1, float("inf"), None), "b": {2}})
    {'a': [1, 'inf', None], 'b': [2]}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value) if each.repr}
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [*map(plain, value)] if isinstance(value, Collection) and not isinstance(value, bytes) else str(value)
