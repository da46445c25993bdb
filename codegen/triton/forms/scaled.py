"""Generates kernels that multiply tensors in place by one number, and return at once where it is 1.

Programs that return at once still have to be started: one for each block would take an eighth of the time of scaling
(measured: docs/performance.md, `scaled`).  So a few programs on each multiprocessor compute block after block.
"""

from __future__ import annotations

from typing_extensions import Self

from fusion.codegen.scaled import factor_in_place
from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.expressions.code import compose
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.forms.form import Refused, Task
from fusion.codegen.triton.forms.maps import Maps
from fusion.codegen.triton.products.block_order import start_block
from fusion.codegen.triton.writer import Writer

_PROGRAMS = 8
"""Programs of a multiprocessor: enough loads in flight to scale at the speed of memory."""


class Scaled(Maps):
    """The plan for a map that only scales in place."""

    name = "scaled in place"

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept a map with one dimension, alone in its launch, whose stores multiply in place by the same number."""
        plan = super().applies(task)
        if isinstance(plan, Refused):
            return plan
        kernel, dims = task.kernel, task.blocked.dims
        alone = not kernel.beside and kernel.then is None and [dim.name for dim in dims] == ["x"]
        if not alone or factor_in_place(task.blocked.kernel, task.blocked.body) is None:
            return Refused("it does not only scale in place")
        return plan

    def lay_out(self, config: Config, writer: Writer) -> Layout:
        """Return the layout of the kernel, whose programs compute several blocks."""
        return lay_out(self.blocked, config, within_limit=writer.within_limit, grid_depth=1)

    def open(self, body: Body) -> None:
        """Add the lines of a program: a loop over blocks, in steps of the number of programs."""
        values = body.values
        (dim,) = self.blocked.dims
        size = values.index_tile(dim.size).code
        blocks = values.name("blocks", Tile(compose("tl.cdiv({}, {})", size, dim.constant))).code
        first, number = values.program, values.open("block")
        wide = dim in values.layout.wide
        start_block(values, dim, compose("tl.cast({}, tl.int64)", number) if wide else number)
        body.statements()
        values.close("for {} in range({}, {}, tl.num_programs(0)):", number, first, blocks)

    def per_multiprocessor(self, config: Config) -> int:
        """Return the number of persistent programs per multiprocessor."""
        return _PROGRAMS
