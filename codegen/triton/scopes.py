"""Scopes: what the lines of a kernel have defined so far, and under which names.

A `Tile` is a value in the source; a `Scope` is one loop body, or the kernel itself; `Names` gives out identifiers.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from codegen.triton.blocks import Dim
from codegen.triton.spell import Code


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
    point of `batch`.
    """

    name: str
    rows: Dim
    columns: Dim
    batch: Dim | None = None


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
