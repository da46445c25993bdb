"""Reads the lines of the program that operations come from.

Input: origins; output: places in numbered files, and the text of these files: all of a short one, else the surroundings
of the lines that are named.  Cells of notebooks count as files.  A file that cannot be read has no text.
"""

from __future__ import annotations

import linecache

from fusion.inspect.document.structure import Excerpt, SourceFile, SourcePlace
from fusion.lowering.errors import Origin

WHOLE = 400
"""The most lines of a file that is included as a whole."""
AROUND = 12
"""The lines before and after a named line that are included of a longer file."""


class Files:
    """Numbers files in the order in which places in them are asked for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, str], int] = {}
        self._named: list[set[int]] = []

    def place(self, origin: Origin) -> SourcePlace:
        """Return the place of an origin."""
        name, _, digits = origin.line.rpartition(":")
        if not name or not digits.isdigit():
            return SourcePlace(operation=origin.name, module=origin.module, file=None, line=None, text=str(origin))
        number = self._numbers.setdefault((name, origin.path), len(self._numbers))
        if number == len(self._named):
            self._named.append(set())
        self._named[number].add(int(digits))
        return SourcePlace(
            operation=origin.name, module=origin.module, file=number, line=int(digits), text=f"{name}:{digits}"
        )

    def sources(self) -> list[SourceFile]:
        """Return the files in order."""
        return [
            SourceFile(name=name, path=path, excerpts=_excerpts(path, named))
            for (name, path), named in zip(self._numbers, self._named, strict=True)
        ]


def _excerpts(path: str, named: set[int]) -> list[Excerpt]:
    linecache.checkcache(path)
    lines = [line.rstrip("\n") for line in linecache.getlines(path)] if path else []
    if len(lines) <= WHOLE:
        return [Excerpt(first=1, lines=lines)] if lines else []
    shown = {k for line in named for k in range(line - AROUND, line + AROUND + 1) if 1 <= k <= len(lines)}
    excerpts: list[Excerpt] = []
    for number in sorted(shown):
        if number - 1 not in shown:
            excerpts.append(Excerpt(first=number, lines=[]))
        excerpts[-1]["lines"].append(lines[number - 1])
    return excerpts


__all__ = ["Files"]
