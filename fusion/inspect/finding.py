"""The outcome of a command beyond the reports of a program's graphs: a comparison, a search, a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Holds the outcome of a command.

    Attributes:
        command: its name, such as "verify".
        good: whether it exits with 0.
        text: what it prints, lines of equal width for each letter.
    """

    command: str
    good: bool
    text: str


__all__ = ["Finding"]
