"""Tracks the values that the lines of a kernel have defined so far, and their names, by scope.

A `Tile` is a value in the source; a `LineScope` is one loop body, or the kernel itself; `Identifiers` allocates
identifiers, and `Lines` are the open scopes, one in the other.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import Code, Operand, as_code, compose


@dataclass(frozen=True, slots=True)
class Tile:
    """A value in the source: its code, the tiled dimensions it spans, the loop depth at which it is known.

    `narrow`: an int64 of the IR that is computed in int32, because it is known to fit.
    """

    code: Code
    dims: tuple[Dim, ...] = ()
    depth: int = 0
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor descriptor called `name`: a matrix over two dimensions, moved a block at a time.

    With `batch` it holds a matrix for each point of that dimension; with `staged`, stores go through the shared memory
    of that name; `corner` is the block's corner, derived from the block if None.
    """

    name: str
    rows: Dim
    columns: Dim
    batch: Dim | None = None
    staged: str = ""
    corner: Code | None = None


@dataclass(slots=True)
class LineScope:
    """The lines of one loop body (or of the kernel), the values they have computed, and the names they use."""

    lines: list[Code] = field(default_factory=list)
    known: dict[object, Tile] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


class Identifiers:
    """Allocates identifiers, each once until it is released."""

    def __init__(self, used: Iterable[str]) -> None:
        self._used = {*used, *keyword.kwlist, *dir(builtins), "tl", "triton", "libdevice"}
        self._count: dict[str, int] = {}

    def fresh(self, wish: str) -> str:
        """Return `wish` as an identifier, with a number if it is in use.

        >>> names = Identifiers(["x_ptr"])
        >>> names.fresh("x"), names.fresh("x"), names.fresh("abs")
        ('x', 'x_1', 'abs_1')
        """
        stem = re.sub(r"\W", "_", wish).lstrip("_") or "t"
        stem = f"t{stem}" if stem[0].isdigit() else stem
        count = self._count.get(stem, 0)
        name = stem if count == 0 else f"{stem}_{count}"
        while name in self._used:
            count += 1
            name = f"{stem}_{count}"
        self._count[stem] = count
        self._used.add(name)
        return name

    def release(self, names: Iterable[str]) -> None:
        """Release names at the end of their loop."""
        self._used -= set(names)
        self._count.clear()


class Lines:
    """The lines of a kernel, in its scopes: a value may have its name in any scope that is still open."""

    def __init__(self, names: Identifiers) -> None:
        self.names = names
        self.scopes = [LineScope()]

    @property
    def depth(self) -> int:
        """Return the number of open loops."""
        return len(self.scopes) - 1

    def open(self, wish: str) -> Code:
        """Open the body of a loop; return its variable."""
        self.scopes.append(LineScope())
        return as_code(self.fresh(wish, self.depth))

    def close(self, header: str, *operands: Operand) -> None:
        """Close the body of a loop: it is added under `header`, after the lines it added to the enclosing scope."""
        body = self.scopes.pop()
        self.names.release(body.names)
        self.line(header, *operands)
        for line in body.lines:
            self.line("    {}", line)

    def inline(self) -> None:
        """Close a body that turned out to be no loop: its lines and names move to the enclosing scope."""
        body = self.scopes.pop()
        self.scopes[-1].names.extend(body.names)
        self.scopes[-1].lines.extend(body.lines)

    def fresh(self, wish: str, depth: int) -> str:
        """Return a new name for the scope at `depth`."""
        name = self.names.fresh(wish)
        self.scopes[depth].names.append(name)
        return name

    def line(self, template: str, *operands: Operand, depth: int | None = None) -> None:
        """Add a line to the current scope, or to the one at `depth`: a template and its operands (`compose`)."""
        self.scopes[self.depth if depth is None else depth].lines.append(compose(template, *operands))

    def name(self, wish: str, tile: Tile, depth: int | None = None) -> Tile:
        """Give `tile` a name, in the scope where it is known or at `depth`."""
        depth = tile.depth if depth is None else depth
        name = self.fresh(wish, depth)
        self.line("{} = {}", name, tile.code, depth=depth)
        return replace(tile, code=as_code(name), depth=depth)

    def accumulator(self, wish: str, start: Tile) -> Tile:
        """Return the accumulator of the current loop, which starts as `start` outside of it; the same in every part of
        the loop.
        """
        key = ("accumulator", wish)
        return self.find(key) or self.bind(key, self.name(wish, start))

    def bind(self, key: object, tile: Tile) -> Tile:
        """Define `key` as `tile`, within the scope of `tile`."""
        self.scopes[tile.depth].known[key] = tile
        return tile

    def find(self, key: object) -> Tile | None:
        """Return the tile of `key`, from the innermost scope that defines it."""
        return next((scope.known[key] for scope in reversed(self.scopes) if key in scope.known), None)
