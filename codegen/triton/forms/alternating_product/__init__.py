"""Generates products whose two groups of warps compute blocks of the result in turn.

    load     operands of block 0, of block 1, of block 2 …
    group 0  multiply block 0 | finish block 0     | multiply block 2 | finish block 2 …
    group 1                   | multiply block 1   | finish block 1   | multiply block 3 …

While one group computes the epilogue of its block and stores it, the matrix units multiply for the other one.  In a
persistent program of one group (`persistent_product`) the matrix units wait for each epilogue; two such programs on a
multiprocessor hide it only where they happen to be at different stages.

Tiles that the epilogue reads, such as a residual, are loaded while their block is multiplied, one of them into the
memory from which the results leave afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.blocks import Config, extent
from fusion.codegen.triton.expressions.code import Code
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.forms import limits
from fusion.codegen.triton.forms.alternating_product import speed
from fusion.codegen.triton.forms.alternating_product.config import AlternatingConfig, staged
from fusion.codegen.triton.forms.alternating_product.program import functions
from fusion.codegen.triton.forms.alternating_product.rule import refusal
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.persistent_product.config import SHORTEST_SIDE
from fusion.codegen.triton.writer import Writer


@dataclass(frozen=True)
class AlternatingProduct(Form):
    """The plan for a product of matrices that descriptors can describe."""

    name = "alternating product"
    takes = (AlternatingConfig,)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """See `refusal`."""
        why = refusal(task)
        return Refused(why) if why else cls(task)

    @property
    def slower(self) -> str:
        """Return why a persistent product of one group is faster: for few blocks, or short sides."""
        if any(extent(dim.size) < SHORTEST_SIDE for dim in self.blocked.dims):
            return f"a side is shorter than {SHORTEST_SIDE}"
        if not speed.hides_epilogues([self.blocked]):
            return "there are blocks for one group only"
        return "" if speed.is_fastest([self.blocked]) else "one group is faster on these blocks"

    def configs(self) -> tuple[Config, ...]:
        """Return the configurations, the best first as predicted."""
        return tuple(speed.ranked([self.blocked]))

    def relative_time(self, config: Config) -> float:
        """Return the predicted time relative to the library's."""
        return 1.0 / speed.of_config([self.blocked], config)

    def efficiency(self) -> float:
        """Return the share of the library's speed, whose blocks divide the results evenly more often."""
        return speed.best([self.blocked])

    def fit(self, config: Config) -> Config | None:
        """Return a configuration with as many stages as fit next to the blocks that leave."""
        return limits.fitted(self.blocked, config, stored=staged(self.blocked, config))

    def room(self, config: Config) -> int:
        """Return the bytes of the operands and of the blocks that are stored."""
        return limits.room(self.blocked, config) + staged(self.blocked, config)

    def lay_out(self, config: Config, writer: Writer) -> Layout:
        """Return the layout; GRID indices are defined in the loop over blocks."""
        return lay_out(self.blocked, config, 1, within_limit=writer.within_limit)

    def functions(self, layout: Layout, writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
        """Return the functions of the loading warp and of a group, and the kernel that starts them."""
        return functions(self.task.kernel, [layout], writer, hosted)

    def per_multiprocessor(self, config: Config) -> int:
        """Return 1: the groups of a program fill the multiprocessor."""
        return 1


__all__ = ["AlternatingConfig", "AlternatingProduct"]
