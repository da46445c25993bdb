"""Scopes: what the lines of a kernel have defined so far, and under which names.

A `Tile` is a value in the source; a `Scope` is one loop body, or the kernel itself; `Names` gives out identifiers,
and `Lines` are the open scopes, one in the other.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.spell import Code


@dataclass(frozen=True, slots=True)
class Tile:
    """A value in the source: its text, the tiled dimensions it spans, the loop depth at which it is known.

    `narrow`: an integer of the IR's int64 that is computed in int32, because it is known to fit.
    """

    code: Code
    dims: tuple[Dim, ...] = ()
    depth: int = 0
    narrow: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor descriptor called `name`: a matrix over two dimensions, moved a block at a time; perhaps one for each
    point of `batch`; perhaps through shared memory called `staged`, to a corner that is given.
    """

    name: str
    rows: Dim
    columns: Dim
    batch: Dim | None = None
    staged: str = ""
    corner: str = ""


@dataclass(slots=True)
class Scope:
    """The lines of one loop body (or of the kernel), what they have computed, and the names they have given."""

    lines: list[str] = field(default_factory=list)
    known: dict[object, Tile] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


class Names:
    """Gives out identifiers, each once until it is released."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = {*taken, *keyword.kwlist, *dir(builtins), "tl", "triton", "libdevice"}
        self._count: dict[str, int] = {}

    def fresh(self, wish: str) -> str:
        """`wish`, made an identifier, with a number if it is taken.

        >>> names = Names(["x_ptr"])
        >>> names.fresh("x"), names.fresh("x"), names.fresh("abs")
        ('x', 'x_1', 'abs_1')
        """
        stem = re.sub(r"\W", "_", wish).lstrip("_") or "t"
        stem = f"t{stem}" if stem[0].isdigit() else stem
        count = self._count.get(stem, 0)
        name = stem if count == 0 else f"{stem}_{count}"
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._count[stem] = count
        self._taken.add(name)
        return name

    def release(self, names: Iterable[str]) -> None:
        """The loop in which these meant something is over."""
        self._taken -= set(names)
        self._count.clear()


class Lines:
    """The lines of a kernel, in its scopes: a value may be named in any of them that is still open."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.scopes = [Scope()]

    @property
    def depth(self) -> int:
        """How many loops are open."""
        return len(self.scopes) - 1

    def open(self, wish: str) -> str:
        """Begin the body of a loop; returns the name of its variable."""
        self.scopes.append(Scope())
        return self.fresh(wish, self.depth)

    def close(self, header: str) -> None:
        """End the body of a loop: it stands, under `header`, after what it has added before itself."""
        body = self.scopes.pop()
        self.names.release(body.names)
        self.line(header)
        for line in body.lines:
            self.line(f"    {line}")

    def inline(self) -> None:
        """End the body of what is no loop after all: its lines go on around it, and its names stay taken there."""
        body = self.scopes.pop()
        self.scopes[-1].names.extend(body.names)
        for line in body.lines:
            self.line(line)

    def fresh(self, wish: str, depth: int) -> str:
        """A name to be used in the scope at `depth`."""
        name = self.names.fresh(wish)
        self.scopes[depth].names.append(name)
        return name

    def line(self, text: str, depth: int | None = None) -> None:
        """Add a line to the current scope, or to the one at `depth`."""
        self.scopes[self.depth if depth is None else depth].lines.append(text)

    def name(self, wish: str, tile: Tile, depth: int | None = None) -> Tile:
        """Give `tile` a name, in the scope where it is known or at `depth`."""
        depth = tile.depth if depth is None else depth
        name = self.fresh(wish, depth)
        self.line(f"{name} = {tile.code.text}", depth)
        return replace(tile, code=Code(name), depth=depth)

    def accumulator(self, wish: str, start: Tile) -> Tile:
        """What the current loop adds to, which begins as `start` outside of it; the same one in every part of it."""
        key = ("accumulator", wish)
        return self.find(key) or self.bind(key, self.name(wish, start))

    def bind(self, key: object, tile: Tile) -> Tile:
        """From here on, within the scope of `tile`, `key` is `tile`."""
        self.scopes[tile.depth].known[key] = tile
        return tile

    def find(self, key: object) -> Tile | None:
        """The tile that `key` has here, from the innermost scope that knows it."""
        return next((scope.known[key] for scope in reversed(self.scopes) if key in scope.known), None)
