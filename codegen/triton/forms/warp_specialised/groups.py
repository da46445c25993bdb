"""Groups: programs of sm_90 in which one warp fetches and two or three groups of four warps compute.

What enters are the matrices that such a program moves; what leaves are the lines that such programs have in common.
They are Gluon, the language below Triton in which a program says which of its warps does what, when a product begins
and where it is waited for.  Triton's own functions mean the same there, but for those that make tiles (`in_gluon`):
these have a layout, which the compiler finds from the sums they meet.

Descriptors are made once for all blocks of a program (`boxes`).

Barriers.  What is fetched lies in rings of slots.  A slot has two barriers: `filled` completes when the bytes have
arrived, `emptied` when each group has said that its products with it have ended.  A barrier's phase flips each time it
completes; who waits keeps the phase it waits for, and flips it when its slot comes round again.  The warp that fetches
begins with the phase before the first, which counts as completed, because slots begin empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import triton

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.devices import Device, Feature
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.forms.warp_specialised.config import groups_of

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


def run_on(device: Device) -> bool:
    """Does this device multiply in groups of warps?  Triton's interpreter has no Gluon."""
    return device.has(Feature.WARP_GROUPS) and not triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class Given:
    """What the functions of a kernel are called and called with: its name, the names of its parameters, and of the
    sizes of blocks.
    """

    name: str
    params: Sequence[str]
    constants: Sequence[str]

    @property
    def names(self) -> list[str]:
        """All that they are called with, in the order of the call."""
        return [*self.params, *self.constants]


class Functions(Protocol):
    """Such a program: three functions, of which the last is launched and starts the others."""

    @property
    def fetch_takes(self) -> list[str]:
        """The parameters of the first, which one warp runs."""

    @property
    def compute_takes(self) -> list[str]:
        """The parameters of the second, which each group runs, after the number of the group."""

    @property
    def reserved(self) -> list[str]:
        """Other names that its lines use."""


def registers(count: int) -> int:
    """Registers per thread with which a program of so many groups begins."""
    return _REGISTERS[count][0]


def start(values: Values, name: str, program: Functions, count: int) -> None:
    """Add the lines that start so many groups and the warp that fetches."""
    values.line("hopper.fence_async_shared()")
    values.line("gl.warp_specialize(")
    values.line("    [")
    for group in range(count):
        values.line(f"        ({name}_compute, ({', '.join([str(group), *program.compute_takes])})),")
    values.line(f"        ({name}_fetch, ({', '.join(program.fetch_takes)})),")
    values.line("    ],")
    workers = count - 1
    values.line(f"    {[*[4] * workers, 1]},")
    values.line(f"    {[*[_REGISTERS[count][1]] * workers, _FETCH_REGISTERS]},")
    values.line(")")


def shape(layout: Layout, dims: Sequence[Dim], parted: Dim) -> list[str]:
    """The shape of a block over `dims`, of which one is taken in a part for each group, as text."""
    count = groups_of(layout.config)
    return [f"{dim.constant} // {count}" if dim is parted else dim.constant for dim in dims]
