"""Groups: programs of sm_90 in which one warp fetches and two or three groups of four warps compute.

What enters are the matrices that such a program moves; what leaves are the lines that every form of it has in common.
They are Gluon, the language below Triton in which a program says which of its warps does what, when a product begins
and where it is waited for.  Triton's own functions mean the same there, but for those that make tiles (`in_gluon`):
these have a layout, which the compiler finds from the sums they meet.

A matrix may be one of a batch of any shape: it is fetched from the whole parameter, seen as rows of one length, at the
row and column where it begins (`Flat`), so that descriptors are made once for all blocks of a program.

Barriers.  What is fetched lies in rings of slots.  A slot has two barriers: `filled` completes when the bytes have
arrived, `emptied` when each group has said that its products with it have ended.  A barrier's phase flips each time it
completes; who waits keeps the phase it waits for, and flips it when its slot comes round again.  The warp that fetches
begins with the phase before the first, which counts as completed, because slots begin empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import sympy
import triton

from codegen.triton.blocks import Blocked, Dim, extent
from codegen.triton.expressions.indices import Layout
from codegen.triton.expressions.matrices import Matrix
from codegen.triton.expressions.spell import TYPES
from codegen.triton.expressions.values import Values
from lowering.indexing import bounds

GROUP = "group"
ROWS = 64
"""Rows of a block that one group computes."""

_FETCH_REGISTERS = 24
_REGISTERS = {2: (168, 240), 3: (128, 160)}
"""Groups → registers per thread of each of their warps and of four that fetch: as they begin, and what groups take."""


_MADE_WITH_LAYOUTS = {"tl.arange(": "gl.arange(", "tl.full(": "gl.full("}


def in_gluon(lines: Sequence[str]) -> list[str]:
    """Lines of Triton as lines of Gluon, where what makes tiles gives them a layout."""
    found = list(lines)
    for ours, theirs in _MADE_WITH_LAYOUTS.items():
        found = [line.replace(ours, theirs) for line in found]
    return found


def run_on(arch: str) -> bool:
    """Does this architecture multiply in groups of warps?  Triton's interpreter has no Gluon."""
    return arch in ("sm_90", "sm_90a") and not triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class Flat:
    """A matrix within its parameter, which is seen as `height` rows of its stride; it begins at (row, column)."""

    matrix: Matrix
    row: sympy.Expr
    column: sympy.Expr
    height: int


def flat_of(blocked: Blocked, matrix: Matrix) -> Flat | None:
    """The matrix within its parameter; None where it reaches over the end of a row, or sizes are not known."""
    param, stride = blocked.kernel.param(matrix.param), matrix.stride
    sizes = [*param.shape, *param.strides, matrix.columns.size, stride]
    if not all(sympy.sympify(size).is_Integer for size in sizes):
        return None
    row, column = sympy.Integer(0), sympy.Integer(0)
    for term in sympy.Add.make_args(matrix.base):
        factor, rest = term.as_coeff_Mul()
        if factor % stride == 0:
            row += factor // stride * rest
        else:
            column += term
    span = bounds(column, blocked.sizes())
    if span is None or span[0] < 0 or span[1] + matrix.columns.size > stride:
        return None
    last = sum((int(size) - 1) * int(step) for size, step in zip(param.shape, param.strides, strict=True))
    return Flat(matrix, row, column, last // int(stride) + 1)


@dataclass(frozen=True, slots=True)
class Given:
    """What the functions of a kernel are called with: the names of its parameters, and of the sizes of blocks."""

    params: Sequence[str]
    constants: Sequence[str]

    @property
    def names(self) -> list[str]:
        return [*self.params, *self.constants]


class Form(Protocol):
    """One form of such a program: three functions, of which the last is launched and starts the others."""

    @property
    def fetch_takes(self) -> list[str]:
        """The parameters of the first, which one warp runs."""

    @property
    def compute_takes(self) -> list[str]:
        """The parameters of the second, which each group runs, after the number of the group."""

    @property
    def reserved(self) -> list[str]:
        """Other names that its lines use."""


def corner(values: Values, flat: Flat, rows: str, columns: str) -> str:
    """Where a block of the matrix lies that begins at `rows` and `columns` of it, as text."""
    placed = []
    for base, start in ((flat.row, rows), (flat.column, columns)):
        text = " + ".join([*([] if base == 0 else [values.index_tile(base).code.text]), *([start] if start else [])])
        placed.append(f"tl.cast({text}, tl.int32)" if values.layout.wide and text else text or "0")
    return f"[{', '.join(placed)}]"


def describe(values: Values, name: str, flat: Flat, block: str) -> None:
    """Add the descriptor `name` of blocks of this shape, and how these lie in shared memory."""
    matrix, stride = flat.matrix, flat.matrix.stride
    element = TYPES[values.layout.blocked.kernel.param(matrix.param).dtype]
    values.line(f"{name}_layout: tl.constexpr = gl.NVMMASharedLayout.get_default_for({block}, {element})")
    shape = f"[{flat.height}, {stride}], [{stride}, 1]"
    pointer = values.pointer_name(matrix.param)
    values.line(f"{name}_desc = hopper.tma.make_tensor_descriptor({pointer}, {shape}, {block}, {name}_layout)")


def allocate(values: Values, name: str, count: int, block: str, flat: Flat) -> None:
    """Add shared memory for so many blocks of what `describe` has named so."""
    element = TYPES[values.layout.blocked.kernel.param(flat.matrix.param).dtype]
    values.line(f"{name} = gl.allocate_shared_memory({element}, [{count}, {block[1:]}, {name}_layout)")


def registers(count: int) -> int:
    """Registers per thread with which a program of so many groups begins."""
    return _REGISTERS[count][0]


def start(values: Values, name: str, form: Form, count: int) -> None:
    """Add the lines that start so many groups and the warp that fetches."""
    values.line("hopper.fence_async_shared()")
    values.line("gl.warp_specialize(")
    values.line("    [")
    for group in range(count):
        values.line(f"        ({name}_compute, ({', '.join([str(group), *form.compute_takes])})),")
    values.line(f"        ({name}_fetch, ({', '.join(form.fetch_takes)})),")
    values.line("    ],")
    workers = count - 1
    values.line(f"    {[*[4] * workers, 1]},")
    values.line(f"    {[*[_REGISTERS[count][1]] * workers, _FETCH_REGISTERS]},")
    values.line(")")


def shape(layout: Layout, dims: Sequence[Dim], parts: int = 1) -> str:
    """The shape of a block over `dims`, of which the first is taken in so many parts, as text."""
    first, *rest = (dim.constant for dim in dims)
    return f"[{', '.join([first if parts == 1 else f'{first} // {parts}', *rest])}]"


def whole_blocks(dim: Dim, block: int) -> bool:
    """Is the size of a dimension known, and a multiple of the block?"""
    return dim.size.is_Integer and extent(dim.size) % block == 0
