"""Writes the result of a command as JSON, or as a page into a file.

JSON has the fields of dataclasses that `repr` shows, and numbers that JSON lacks as text.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import fusion
from fusion.cli.programs import CommandError
from fusion.inspect.document import Finding


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


def write_page(
    arguments: argparse.Namespace, explanation: fusion.Explanation, *, good: bool = True, text: str = ""
) -> str:
    """Write the page if `--html` asks for it, and return a line that names it, else "".

    Args:
        explanation: the reports of the compiled program.
        good: whether the command exits with 0.
        text: the outcome of the command, if it says more than the reports.

    Raises:
        CommandError: the file cannot be written.
    """
    if arguments.html is None:
        return ""
    finding = Finding(arguments.command, good, text) if text else None
    try:
        path = replace(explanation, finding=finding).html(arguments.html)
    except OSError as error:
        message = f"{arguments.html} cannot be written: {error.strerror}"
        raise CommandError(message, hint="name a file in a directory that can be written") from error
    return f"The page is in {path}."
