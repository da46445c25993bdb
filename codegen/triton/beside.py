"""Beside: independent kernels in one launch, each on its own range of programs.

What enters is a kernel with others beside it; what leaves are the parts, laid out for the warps and stages that they
have in common, and the lines of the launched function, which finds the part that its program belongs to:

    program = tl.program_id(0)
    if program < 48:
        first(program, in0_ptr, out0_ptr, XBLOCK=1024)
    if (program >= 48) & (program < 60):
        second(program - 48, in1_ptr, out1_ptr, XBLOCK=512)

Persistent parts have no ranges: every program walks its share of the blocks of one part after the other, and goes on
in the next part where the count of blocks left it, so that all programs end together.

`alike` says which kernels may share a launch: those that need about as many registers, and contractions only in the
same form.  A part that wants fewer warps than the others takes larger blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.codegen.numerics import Numerics
from fusion.codegen.triton.blocks import Blocked, Config, Dim, block, extent, power_of_two
from fusion.codegen.triton.call import call_of
from fusion.codegen.triton.choices import contractions, narrow, persistent, rows, vectors
from fusion.codegen.triton.choices.limits import within
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions.indices import Layout, index_code, lay_out
from fusion.codegen.triton.expressions.spell import PRODUCT, UNARY
from fusion.codegen.triton.products import descriptors
from fusion.lowering.kernel import Kernel, Role

PROGRAM = "program"
"""The parameter of a part that says which of its programs runs."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the kernels of a launch.

    Attributes:
        name: of its function.
    """

    name: str
    layout: Layout

    @property
    def kernel(self) -> Kernel:
        """The kernel it computes."""
        return self.layout.blocked.kernel

    @property
    def blocks(self) -> str:
        """The number of its blocks, as text that Python and Triton read alike."""
        return " * ".join(_blocks(self.layout, dim) for dim in self.layout.blocked.grid()) or "1"

    def call(self, program: str) -> str:
        """The line that runs it."""
        return call_of(self.name, self.layout, program)


def parts_of(
    kernels: Sequence[Kernel],
    launched: str,
    device: Device,
    numerics: Numerics,
    *,
    joined: bool = False,
    within_limit: bool = False,
) -> list[Part]:
    """The kernels of a launch of this name, laid out for the warps and stages that they have in common.

    They may be `joined` in one walk.
    """
    found: list[Part] = []
    taken = {launched}
    blocked = [block(kernel, device) for kernel in kernels]
    picked = persistent.together(blocked, joined=True) if joined else _configs(blocked, numerics)
    warps, stages = max(config.num_warps for config in picked), min(config.num_stages for config in picked)
    for number, (part, config) in enumerate(zip(blocked, picked, strict=True)):
        config = replace(config, num_warps=warps, num_stages=stages)
        name = part.kernel.name if part.kernel.name not in taken else f"{part.kernel.name}_{number}"
        taken.add(name)
        found.append(Part(name, lay_out(part, config, int(config.persistent), within_limit=within_limit)))
    return found


def dispatch(parts: Sequence[Part]) -> list[str]:
    """The lines of the launched function."""
    lines = [f"{PROGRAM} = tl.program_id(0)"]
    if parts[0].layout.config.persistent:
        lines.append("programs = tl.num_programs(0)")
        lines.append(parts[0].call(PROGRAM))
        before = parts[0].blocks
        for part in parts[1:]:
            lines.append(part.call(f"({PROGRAM} + programs - ({before}) % programs) % programs"))
            before += f" + {part.blocks}"
        return lines
    lines.append(f"end = {parts[0].blocks}")
    lines += [f"if {PROGRAM} < end:", f"    {parts[0].call(PROGRAM)}"]
    for part in parts[1:]:
        lines += ["start = end", f"end = start + {part.blocks}"]
        lines += [f"if ({PROGRAM} >= start) & ({PROGRAM} < end):", f"    {part.call(f'{PROGRAM} - start')}"]
    return lines


def alike(a: Blocked, b: Blocked, numerics: Numerics) -> bool:
    """May two kernels share a launch without one of them losing registers or warps to the other?"""
    if a.contraction != b.contraction or a.chained or b.chained:
        return False
    if a.contraction and descriptors.applies(a) is not descriptors.applies(b):
        return False
    if a.contraction:
        return len({_family(config) for config in _configs([a, b], numerics)}) == 1
    ours, theirs = (_default(blocked) for blocked in (a, b))
    most, least = max(ours.num_warps, theirs.num_warps), min(ours.num_warps, theirs.num_warps)
    walked = {any(dim.role is not Role.GRID for dim in blocked.dims) for blocked in (a, b)}
    return len(walked) == 1 and (most <= 4 or most <= 2 * least)


# Configurations -------------------------------------------------------------------------------------------------------


def _configs(parts: Sequence[Blocked], numerics: Numerics) -> list[Config]:
    """A configuration for each of `parts`, as good as there is on the same warps and stages."""
    if all(descriptors.applies(part) for part in parts):
        return persistent.together(parts)
    if parts[0].contraction:
        return [within(part, (*narrow.candidates(part), *contractions.candidates(part, numerics)))[0] for part in parts]
    found = [_default(part) for part in parts]
    warps = max(config.num_warps for config in found)
    return [_widened(part, config, warps) for part, config in zip(parts, found, strict=True)]


def _default(blocked: Blocked) -> Config:
    return within(blocked, (*vectors.candidates(blocked), rows.configure(blocked)))[0]


def _family(config: Config) -> tuple[int, int, bool, int]:
    return config.num_warps, config.num_stages, config.persistent, config.per_processor


def _widened(blocked: Blocked, config: Config, warps: int) -> Config:
    """`config` on more warps, with as much larger a block of what is spread over programs, if it has one to enlarge."""
    spread = (dim for dim in blocked.dims if dim.role is Role.GRID and not blocked.single(dim))
    factor, dim = warps // config.num_warps, next(spread, None)
    if factor == 1 or dim is None:
        return replace(config, num_warps=warps)
    most = power_of_two(extent(dim.size))
    size = max(config.block(dim.name), min(most, config.block(dim.name) * factor))
    blocks = tuple((name, size if name == dim.name else length) for name, length in config.blocks)
    return replace(config, num_warps=warps, blocks=blocks)


def _blocks(layout: Layout, dim: Dim) -> str:
    size = index_code(dim.size, layout, lambda symbol: symbol.name)
    if dim not in layout.tiled:
        return size.at(PRODUCT if dim.size.is_Integer else UNARY)
    if dim.size.is_Integer:
        return str(-(-int(dim.size) // layout.config.block(dim.name)))
    return f"(({size.text} + {layout.config.block(dim.name) - 1}) // {layout.config.block(dim.name)})"
