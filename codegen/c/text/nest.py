"""Represents a loop nest as text: levels that hold statements, and the names used in it.

`Level` 0 is one grid point (or one block of lanes); each further level is a loop inside the one before.  Statements are
added to their level, in any order of levels; `render` prints the nest when all are in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import sympy

from fusion.codegen.c.text.code import PRODUCT, SUM, Code
from fusion.codegen.c.text.indices import Names, index_code
from fusion.codegen.c.text.library import DEFINED, LIBRARY
from fusion.codegen.c.text.prelude import INLINES
from fusion.lowering.indexing import ZERO

WRONG = "wrong"
"""The variable of a function that holds its result: the failures of the launch."""

YES = "yes"
"""A variable that is 1, which the compiler cannot know."""

NONE = "none"
"""A variable that is 0, which the compiler cannot know."""

_KEYWORDS = frozenset(
    (
        *("auto", "break", "case", "char", "const", "continue", "default", "do", "double", "else", "enum", "extern"),
        *("float", "for", "goto", "if", "inline", "int", "long", "register", "restrict", "return", "short", "signed"),
        *("sizeof", "static", "struct", "switch", "typedef", "union", "unsigned", "void", "volatile", "while"),
        *("asm", "typeof", "main", "linux", "unix", "i386"),  # of GNU C
        *("threads", "scratch", "width", "l", "INLINE", "WINDOW"),  # of the text around the names
        *(WRONG, YES, NONE),
    )
)


@dataclass(slots=True)
class Level:
    """A loop and the statements directly in it, before and after the next inner loop.

    `pragma`: precedes the loop, followed by `clauses` (of its reductions).
    `rest`: the header of the remainder loop, which repeats the loop after the one around it.
    `condition`: without it, neither the loop nor its remainder runs.
    `turns`: this loop and the one inside it are of one axis; statements outside that axis are outside both.
    """

    header: str = ""
    pragma: str = ""
    rest: str = ""
    condition: str = ""
    turns: bool = False
    clauses: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def render(levels: Sequence[Level]) -> list[str]:
    """Return the lines of a nest; the outermost level has no loop."""
    lines: list[str] = []
    rest: list[str] = []
    for level in reversed(levels):
        lines = [*level.before, *lines, *level.after]
        if level is levels[0] or not lines:
            continue
        pragma = [" ".join((level.pragma, *level.clauses))] if level.pragma else []
        body, single = indented(lines), len(lines) == 1
        loops = [
            [*pragma, f"{header}{'' if single else ' {'}", *body, *([] if single else ["}"])]
            for header in (level.header, level.rest)
        ]
        if level.condition:
            loops = [[f"if ({level.condition})", *indented(loop)] for loop in loops]
        lines, rest = [*loops[0], *rest], loops[1] if level.rest else []
    return lines


def render_pieces(nests: Sequence[Sequence[Level]]) -> list[str]:
    """Return the lines of nests one after the other, in one loop if their outermost loops are the same.

    >>> rows, columns = "for (i = 0; i < 9; i++)", ("for (j = 0; j < 4; j++)", "for (j = 4; j < 8; j++)")
    >>> nests = [[Level(), Level(rows), Level(each, before=["x[i][j] = 0;"])] for each in columns]
    >>> print(*render_pieces(nests), sep="\\n")
    for (i = 0; i < 9; i++) {
        for (j = 0; j < 4; j++)
            x[i][j] = 0;
        for (j = 4; j < 8; j++)
            x[i][j] = 0;
    }
    """
    loops = [levels[1] for levels in nests if len(levels) > 2]
    plain = all(loop == Level(loop.header, before=loop.before, after=loop.after) for loop in loops)
    if len(nests) < 2 or len(loops) < len(nests) or not plain or len({loop.header for loop in loops}) > 1:
        return [line for levels in nests for line in render(levels)]
    around = Level(before=[line for levels in nests for line in levels[0].before])
    around.after = [line for levels in nests for line in levels[0].after]
    inside = (render([replace(levels[1], header=""), *levels[2:]]) for levels in nests)
    return render([around, Level(loops[0].header, before=[line for lines in inside for line in lines])])


def indented(lines: Iterable[str]) -> list[str]:
    """Return `lines`, indented by one step."""
    return [f"    {line}" for line in lines]


def identifier(name: str) -> str:
    """Return `name` as a C identifier that is no keyword, no library function and none of the prelude's.

    >>> identifier("double"), identifier("my.weight"), identifier("exp")
    ('double_', 'my_weight', 'exp_')
    """
    text = re.sub(r"\W", "_", name)
    if not text or text[0].isdigit():
        text = f"_{text}"
    taken = (
        text in _KEYWORDS
        or any(text in names for names in (INLINES, LIBRARY, DEFINED))
        or re.fullmatch(r"u?int\d+_t", text)
    )
    return f"{text}_" if taken else text


class Namespace:
    """The identifiers of one kernel, each used once.

    Attributes:
        unknowns: which of `YES` and `NONE` its lines read.
    """

    def __init__(self) -> None:
        self.unknowns: set[str] = set()
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def exactly(self, hint: str) -> str:
        """Return `hint` as an identifier, with a number only if it is taken."""
        name = identifier(hint)
        if name in self._taken:
            return self.fresh(f"{name}_")
        self._taken.add(name)
        return name

    def unknown(self, name: str) -> str:
        """Return `YES` or `NONE`, which the function then declares."""
        self.unknowns.add(name)
        return name

    def reserve(self, *names: str) -> None:
        """Reserve `names`."""
        self._taken.update(names)

    def fresh(self, stem: str) -> str:
        """Return the next of `stem0`, `stem1`, …"""
        while True:
            number = self._next.get(stem, 0)
            self._next[stem] = number + 1
            name = identifier(f"{stem}{number}")
            if name not in self._taken:
                self._taken.add(name)
                return name


@dataclass(frozen=True, slots=True)
class Extent:
    """The range of one loop variable, in C: from `start` up to `end`; `size` points at most.

    Attributes:
        slot: the position of the current point in an array of `size` elements.
        number: `size`, where it is known.
        filled: are there always `size` points?
    """

    name: str
    start: str
    end: str
    size: Code
    slot: Code
    number: int | None = None
    filled: bool = False

    @property
    def first(self) -> sympy.Expr:
        """`start` as an expression: 0, or a symbol of that name."""
        return ZERO if self.start == "0" else sympy.Symbol(self.start, integer=True)

    @property
    def header(self) -> str:
        """The header of the C loop over this extent."""
        return f"for (int64_t {self.name} = {self.start}; {self.name} < {self.end}; {self.name}++)"


def whole_extent(symbol: sympy.Symbol, size: sympy.Expr, names: Names) -> Extent:
    """Return the extent of an undivided axis."""
    code = index_code(size, names)
    number = int(size) if size.is_Integer else None
    return Extent(names[symbol], "0", code.text, code, Code(names[symbol]), number, filled=True)


def block_extent(name: str, start: str, end: str, width: int, *, filled: bool = False) -> Extent:
    """Return the extent of a block of `width` points, or fewer unless it is `filled`."""
    return Extent(name, start, end, Code(str(width)), Code(f"{name} - {start}", SUM), width, filled)


def part_of(extent: Extent, start: int, end: int, space: Namespace | None) -> tuple[list[str], Extent]:
    """Return lines before loops, and the extent of the points of an axis from `start` up to `end`.

    With `space`, `extent` is a block of the axis, which may have none of these points.  Their positions in arrays are
    as in all of `extent`.
    """
    if space is None:
        return [], replace(extent, start=str(start), end=str(end))
    first, last = space.fresh("first"), space.fresh("last")
    lines = [
        f"const int64_t {first} = imax({extent.start}, {start});",
        f"const int64_t {last} = imin({extent.end}, {end});",
    ]
    return lines, replace(extent, start=first, end=last, filled=False)


def chunks_of(extent: Extent, size: sympy.Expr, length: int) -> tuple[str, Extent]:
    """Return the header of a loop over chunks of an axis of this size, or of a range of it, and one chunk's extent."""
    start, end = f"{extent.name}_0", f"{extent.name}_0 + {length}"
    filled = extent.filled and size.is_Integer and size % length == 0
    if not filled:
        end = f"imin({end}, {extent.end})"
    header = f"for (int64_t {start} = {extent.start}; {start} < {extent.end}; {start} += {length})"
    return header, block_extent(extent.name, start, end, length, filled=filled)


def turns_of(extent: Extent, size: sympy.Expr, lanes: int, start: str, around: Level) -> list[Level]:
    """Return loops over an axis of this size, or a chunk of it, in steps of `lanes`, and over the lanes `l` of a step.

    The compiler then knows the number of lanes; the remainder has a loop of its own.  A step begins at `start`, which
    is declared `around` the loops if there is a remainder.
    """
    each = Level(f"for (int l = 0; l < {lanes}; l++)", before=[f"const int64_t {extent.name} = {start} + l;"])
    first, step = f"int64_t {start} = {extent.start};", f"{start} += {lanes}"
    if size.is_Integer and size % lanes == 0:
        return [Level(f"for ({first} {start} < {extent.end}; {step})", turns=True), each]
    around.before.append(first)
    each.rest = f"for (int l = 0; l < {extent.end} - {start}; l++)"
    return [Level(f"for (; {start} + {lanes} <= {extent.end}; {step})", turns=True), each]


def flat(extents: Sequence[Extent]) -> tuple[str, Code]:
    """Return the number of elements of a row-major array over `extents`, and the offset of the current point in it."""
    sizes = [extent.size.at(PRODUCT) for extent in extents]
    position = extents[0].slot
    for extent, size in zip(extents[1:], sizes[1:], strict=True):
        position = Code(f"{position.at()}*{size} + {extent.slot}", SUM)
    return "*".join(sizes), position
