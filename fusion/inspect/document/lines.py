"""Finds the line of a kernel's source that each line of an artefact comes from.

Input: an artefact of the target's tools, with the locations that they write (`loc(…)`, `!dbg`, `.loc`, `//## File`);
output: its text without these, and the number of a line of the source for each of its lines, 0 where it is not known.
Code that was inlined from another file (the library of Triton) has the line of the source that calls it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

MOST_INLINED = 100
"""The depth of inlined calls after which a chain of locations counts as a circle."""


@dataclass(frozen=True, slots=True)
class Located:
    """An artefact's text, with the line of the source for each of its lines, 0 where it is not known."""

    text: str
    lines: tuple[int, ...]


def located(stage: str, text: str) -> Located:
    """Separate the locations in an artefact from its text.

    Args:
        stage: the file suffix of the artefact, such as "ptx"; the lines of an unknown one are not known.

    >>> located("s", "\\t.loc 1 7 3\\n\\tret\\n")
    Located(text='\\tret', lines=(7,))
    """
    pairs = list(_READERS.get(stage, _unknown)(text))
    while pairs and not pairs[-1][0].strip():
        pairs.pop()
    return Located("\n".join(line for line, _ in pairs), tuple(number for _, number in pairs))


def _unknown(text: str) -> Iterator[tuple[str, int]]:
    return ((line, 0) for line in text.splitlines())


# MLIR: `%0 = op loc(#loc4)`, with a table of locations ----------------------------------------------------------------

_MLIR_NAMED = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_MLIR_USED = re.compile(r" loc\((?:[^()]|\([^()]*\))*\)")
_MLIR_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')


def _mlir(text: str) -> Iterator[tuple[str, int]]:
    table = {match[1]: match[2] for line in text.splitlines() if (match := _MLIR_NAMED.match(line.strip()))}
    places = (match for line in table.values() if (match := _MLIR_PLACE.match(line)))
    own = next((match[1] for match in places), "")
    for line in text.splitlines():
        if _MLIR_NAMED.match(line.strip()):
            continue
        used = _MLIR_USED.findall(line)
        yield _MLIR_USED.sub("", line), _mlir_line(used[-1].strip()[4:-1], table, own) if used else 0


def _mlir_line(location: str, table: Mapping[str, str], own: str, depth: int = 0) -> int:
    """Return the line in the file `own` of a location: a place, or a callee with its caller, or a name of either."""
    if depth > MOST_INLINED:
        return 0
    match = _MLIR_PLACE.match(location)
    if match:
        return int(match[2]) if match[1] == own else 0
    lines = (
        _mlir_line(table[name], table, own, depth + 1) for name in re.findall(r"#loc\d*", location) if name in table
    )
    return next((line for line in lines if line), 0)


# LLVM IR: `ret void, !dbg !7`, with metadata --------------------------------------------------------------------------

_METADATA = re.compile(r"^(!\d+) = (.*)$")
_DEBUG = re.compile(r",? !dbg (!\d+)")


def _llvm(text: str) -> Iterator[tuple[str, int]]:
    table = {match[1]: match[2] for line in text.splitlines() if (match := _METADATA.match(line))}
    own = next((_field("file", value, table) for value in table.values() if "DISubprogram(" in value), "")
    for line in text.splitlines():
        if line.startswith("!"):
            continue
        used = _DEBUG.search(line)
        yield _DEBUG.sub("", line), _llvm_line(used[1], table, own) if used and "define " not in line else 0


def _llvm_line(name: str, table: Mapping[str, str], own: str) -> int:
    """Return the line in the file `own` of a location, or of the calls that it was inlined through."""
    for _ in range(MOST_INLINED):
        value = table.get(name, "")
        line = re.search(r"\bline: (\d+)", value)
        if line and own and "DILocation(" in value and _file_of(_field("scope", value), table) == own:
            return int(line[1])
        name = _field("inlinedAt", value)
    return 0


def _file_of(scope: str, table: Mapping[str, str]) -> str:
    """Return the file of a scope, or of the scope around it, as metadata."""
    for _ in range(MOST_INLINED):
        value = table.get(scope, "")
        if file := _field("file", value, table):
            return file
        scope = _field("scope", value)
    return ""


def _field(key: str, value: str, table: Mapping[str, str] | None = None) -> str:
    """Return the value of a metadata field, a name, or its entry in `table`."""
    match = re.search(rf"\b{key}: (!\d+)", value)
    name = match[1] if match else ""
    return name if table is None else table.get(name, "")


# Assembly: `.loc 1 7 3`, up to the next one ---------------------------------------------------------------------------

_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(.*)$")
_COMMENTED = re.compile(r"([^\s:]+):(\d+):\d+")
_DROPPED = re.compile(
    r"^\s*\.(?:file|loc|cfi_\w+|ident|section\s+\.note)\b"
    r"|^\s*(?:\$L__(?:tmp|func)|\.L(?:VL|FB|FE|BB|BE|text|etext|tmp|func))\w*:"
)
"""Directives and labels that only debug data needs."""
_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\.debug")
_ALL_SECTIONS = re.compile(r"^\s*\.(?:section|text|data)\b")


def _assembly(text: str) -> Iterator[tuple[str, int]]:
    number, inside = 0, False
    for line in text.splitlines():
        if _ALL_SECTIONS.match(line):
            inside = _DEBUG_SECTION.match(line) is not None
        if inside:
            continue
        if match := _LOC.match(line):
            number = _loc_line(int(match[1]), int(match[2]), match[3])
        if _DROPPED.match(line):
            continue
        yield line, number if line[:1].isspace() and not line.strip().startswith((".", "/")) else 0


def _loc_line(file: int, line: int, rest: str) -> int:
    """Return the line of the first file: of the location itself, else of the calls that a comment names after it."""
    if file == 1:
        return line
    inlined = _COMMENTED.findall(rest.partition("@[")[2])
    return int(inlined[-1][1]) if inlined else 0


# SASS, as nvdisasm prints it ------------------------------------------------------------------------------------------

_SASS = re.compile(r'^\s*//## File "([^"]+)", line (\d+)(.*)$')


def _sass(text: str) -> Iterator[tuple[str, int]]:
    number, own = 0, ""
    for line in text.splitlines():
        if match := _SASS.match(line):
            own = own or match[1]
            number = int(match[2]) if match[1] == own else 0
        elif not line.lstrip().startswith("//"):
            yield re.sub(r"^        /\*(\w+)\*/ {15,}", r"  \1  ", line), number if "/*" in line else 0


_READERS: Mapping[str, Callable[[str], Iterator[tuple[str, int]]]] = {
    "ttir": _mlir,
    "ttgir": _mlir,
    "llir": _llvm,
    "ptx": _assembly,
    "amdgcn": _assembly,
    "s": _assembly,
    "sass": _sass,
}
"""File suffix of an artefact → its reader."""

__all__ = ["Located", "located"]
