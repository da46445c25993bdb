"""Emits the frame of programs of sm_90 in which one warp loads, and two or three groups of warps compute.

Input: the matrices that such a program transfers; output: the lines that such programs have in common.  They are Gluon,
the language below Triton in which a program assigns work to its warps, and decides when a product starts and where it
is awaited.  Triton's own functions mean the same there, except functions that create tiles (`in_gluon`): these have a
layout, which the compiler infers from the sums they are combined with.

Barriers.  Loaded blocks are in rings of slots.  A slot has two barriers: `filled` completes when the bytes have
arrived, `emptied` when each group that reads it has signalled that its products with it have ended.  A barrier's phase
flips each time it completes; a waiter keeps the phase it waits for, and flips it when its slot comes round again.  The
loading warp starts with the phase before the first, which counts as completed, because slots start empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import triton

from fusion.codegen.triton.devices import Device, Feature
from fusion.codegen.triton.expressions.code import Code, listed
from fusion.codegen.triton.expressions.values import Values

GROUP = "group"
"""The number of a group, as a name."""

_FETCH_REGISTERS = 24
_REGISTERS = {(2, 4): (168, 240), (3, 4): (128, 160), (2, 8): (96, 112)}
"""For a number of groups and of warps of each, registers per thread of each warp: at the start, and of the warps of
groups afterwards.
"""

_TILE_CONSTRUCTORS = {"tl.arange(": "gl.arange(", "tl.full(": "gl.full("}


def in_gluon(lines: Sequence[Code]) -> list[Code]:
    """Return lines of Triton as lines of Gluon, where constructors of tiles give them a layout.

    The text is changed, so that emitters of expressions need not know in which language they are read.
    """
    converted = list(lines)
    for ours, theirs in _TILE_CONSTRUCTORS.items():
        converted = [replace(line, text=line.text.replace(ours, theirs)) for line in converted]
    return converted


def run_on(device: Device) -> bool:
    """Return whether this device multiplies in groups of warps; Triton's interpreter has no Gluon."""
    return device.has(Feature.WARP_GROUPS) and not triton.knobs.runtime.interpret


@dataclass(frozen=True, slots=True)
class KernelSignature:
    """The arguments of the functions of a kernel: its name, the names of its parameters, and of its block sizes."""

    name: str
    params: Sequence[str]
    constants: Sequence[str]

    @property
    def names(self) -> list[str]:
        """Return all names, in the order of a call."""
        return [*self.params, *self.constants]


class Functions(Protocol):
    """Describes such a program: a load function, a compute function, and the kernel that starts both."""

    @property
    def fetch_takes(self) -> list[str]:
        """Return the parameters of the load function, which one warp runs."""

    @property
    def compute_takes(self) -> list[str]:
        """Return the parameters of the compute function, which each group runs, after the number of the group."""

    @property
    def reserved(self) -> list[str]:
        """Return the other names that its generated lines use."""


def registers(count: int, warps: int = 4) -> int:
    """Return the registers per thread with which a program of `count` groups starts."""
    return _REGISTERS[count, warps][0]


def start(values: Values, name: str, program: Functions, count: int) -> None:
    """Add the lines that start `count` groups, of as many warps as the program has, and the loading warp."""
    warps = values.layout.config.num_warps
    values.line("hopper.fence_async_shared()")
    values.line("gl.warp_specialize(")
    values.line("    [")
    for group in range(count):
        values.line("        ({}, ({})),", f"{name}_compute", listed([group, *program.compute_takes]))
    values.line("        ({}, ({})),", f"{name}_fetch", listed(program.fetch_takes))
    values.line("    ],")
    workers = count - 1
    values.line(f"    {[*[warps] * workers, 1]},")
    values.line(f"    {[*[_REGISTERS[count, warps][1]] * workers, _FETCH_REGISTERS]},")
    values.line(")")
