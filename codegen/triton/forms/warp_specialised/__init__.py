"""Generates warp-specialised attention: one warp of a program loads, groups of warps compute.

One program per multiprocessor computes blocks of rows in sequence.  One warp loads operands into rings of slots of
shared memory; groups of four warps compute, the first product of a block ahead of the second product of the previous
block (`compute.py`).  `chain.py` decides which kernels have this form.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.blocks import Blocked, Config, extent, keeps_busy, power_of_two, programs
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.code import Code
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.expressions.scopes import Identifiers
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import launched_function, signature
from fusion.codegen.triton.forms import efficiency, long_loops
from fusion.codegen.triton.forms.chained import operands
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.warp_groups import groups
from fusion.codegen.triton.forms.warp_groups.groups import KernelSignature
from fusion.codegen.triton.forms.warp_specialised import tile_schedule
from fusion.codegen.triton.forms.warp_specialised.chain import NARROW, STEP, WarpSpecialisedChain, chain_of
from fusion.codegen.triton.forms.warp_specialised.compute import Compute
from fusion.codegen.triton.forms.warp_specialised.config import GROUP_ROWS, WarpSpecialisedConfig
from fusion.codegen.triton.forms.warp_specialised.fetch import fetch
from fusion.codegen.triton.forms.warp_specialised.program import WarpSpecialisedProgram
from fusion.codegen.triton.writer import Writer
from fusion.lowering.ir.kernel import Role

_SHORT_WIDE = 512  # the shortest loop over wide heads that was measured


@dataclass(frozen=True)
class WarpSpecialised(Form):
    """The plan for two products of one loop."""

    chain: WarpSpecialisedChain

    name = "warp-specialised chained product"
    takes = (WarpSpecialisedConfig,)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """See `chain_of`; the device must have products of groups of warps."""
        if not groups.run_on(task.device):
            return Refused(f"{task.device.arch} does not multiply in groups of warps")
        chain = chain_of(task.blocked)
        return Refused(chain) if isinstance(chain, str) else cls(task, chain)

    @property
    def slower(self) -> str:
        """Return why another form is faster.

        Relative to the form that Triton pipelines, this one was measured 1.4 to 1.45 times as fast on heads of 128 and
        loops of 512 to 16384, 1.25 to 1.35 times with a mask, 2 times on heads of 256, 1.1 times on heads of 64 and
        loops of 1024 or more, 0.9 to 1 times with a mask.
        """
        blocked, least = self.blocked, self._config(2, 1)
        if not keeps_busy(blocked, least):
            return f"{programs(blocked, least)} blocks of rows leave multiprocessors idle"
        if long_loops.steps(blocked) < (_SHORT_WIDE if _wide(blocked) else long_loops.SHORT_LOOP):
            return f"a loop of {long_loops.steps(blocked)} is over before the ring is full"
        if not _wide(blocked) and long_loops.skips(blocked):
            return "narrow heads with a mask are faster in smaller blocks"
        return ""

    def configs(self) -> tuple[Config, ...]:
        """Return configurations with as many slots as fit: three for heads of 64, two for wider ones."""
        together = long_loops.together(self.blocked) if long_loops.skips(self.blocked) else 1
        return tuple(self._config(count, together) for count in _counts(self.blocked))

    def _config(self, count: int, together: int) -> Config:
        wide, dims = _wide(self.blocked), self.blocked.dims
        held = {dim.name: power_of_two(extent(dim.size)) for dim in dims if dim.role is Role.WHOLE}
        blocks = {"m": count * GROUP_ROWS, "n": STEP[max(held.values())], **held}
        return WarpSpecialisedConfig(
            tuple(blocks.items()),
            num_warps=4,
            num_stages=2 if wide else 3,
            groups=count,
            split=True,
            registers=groups.registers(count),
            group=together,
        )

    def efficiency(self) -> float:
        """Return the share of the speed of the matrix units: there is no library to compare with."""
        return efficiency.of_chain(self.blocked, self.task.numerics, described=bool(operands(self.blocked)))

    def fit(self, config: Config) -> Config | None:
        """Return `config` unchanged: its number of slots is chosen to fit."""
        return config

    def lay_out(self, config: Config, writer: Writer) -> Layout:
        """Return the layout; GRID indices are defined in the loops over blocks."""
        return lay_out(
            self.blocked, config, tile_schedule.depth(self.blocked, config), within_limit=writer.within_limit
        )

    def functions(self, layout: Layout, writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
        """Return the functions of the loading warp and of a group, and the kernel that starts them."""
        kernel, constants = layout.blocked.kernel, list(layout.constants)
        params = [*map(argument, kernel.params), *(size.name for size in kernel.sizes)]
        program = WarpSpecialisedProgram(layout, self.chain, KernelSignature(kernel.name, params, constants))
        names = [*program.fetch_takes, *program.compute_takes, *program.reserved, "gl", "gluon", "hopper", kernel.name]

        def values() -> Values:
            return writer.values(layout, Identifiers([*names, *prelude.FUNCTIONS]))

        launched = signature(kernel, kernel.name, {}, constants)
        return [
            *(each.text(kernel.name) for each in fetch(program, values())),
            *(each.text(kernel.name) for each in Compute(program).functions(values())),
            launched_function(launched, program.launched(values()), writer.device, "gluon.jit"),
        ]

    def per_multiprocessor(self, config: Config) -> int:
        """Return 1: the groups of a program fill the multiprocessor."""
        return 1


def _counts(blocked: Blocked) -> tuple[int, ...]:
    """Return numbers of groups: the accumulators of two fit the registers, for narrow heads also of three.

    Three are faster than two where their blocks are full.
    """
    if _wide(blocked):
        return (2,)
    rows = next(extent(dim.size) for dim in blocked.grid() if dim.name == "m")
    speed = speeds(blocked.device).warp_groups
    full = {count: rows / (-(-rows // (count * GROUP_ROWS)) * count * GROUP_ROWS) for count in speed}
    return tuple(sorted(speed, key=lambda count: -full[count] * speed[count]))


def _wide(blocked: Blocked) -> bool:
    return any(extent(dim.size) > NARROW for dim in blocked.dims if dim.role is Role.WHOLE)


__all__ = ["WarpSpecialised", "WarpSpecialisedConfig"]
