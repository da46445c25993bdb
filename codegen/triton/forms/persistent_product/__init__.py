"""Generates persistent GEMMs, whose operands come through tensor memory.

One or two programs per multiprocessor compute the blocks of the result in sequence.  Operands come through tensor
descriptors, so that no thread computes an address or a mask, and a 16-bit result is stored the same way.  On an H200
this is as fast as the library, which pointers never are.

The rule, all of it in `refusal`: 16-bit operands loaded without conversion, each a matrix that a descriptor can
describe; rows of known length, in any number.  Several products of one loop share an operand, and divide the columns of
the block; two of them may be computed as one (`products/stacked.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.blocks import Config, extent, programs
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.expressions.code import Code
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.forms import efficiency
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.limits import room
from fusion.codegen.triton.forms.persistent_product import speed
from fusion.codegen.triton.forms.persistent_product.config import (
    NARROWEST,
    SHORTEST_SIDE,
    PersistentConfig,
    divided,
    fitted,
    stored,
)
from fusion.codegen.triton.forms.persistent_product.program import write
from fusion.codegen.triton.forms.persistent_product.rule import refusal
from fusion.codegen.triton.products.stacked import stack_of
from fusion.codegen.triton.writer import Writer


@dataclass(frozen=True)
class PersistentProduct(Form):
    """The plan for a product, or several that share an operand, of matrices that descriptors can describe."""

    name = "persistent product"
    takes = (PersistentConfig,)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """See `refusal`."""
        why = refusal(task.blocked)
        return Refused(why) if why else cls(task)

    @property
    def slower(self) -> str:
        """Return why another form is faster: a side is shorter than a block, or there are fewer blocks than half of the
        multiprocessors even at the smallest size.
        """
        if any(extent(dim.size) < SHORTEST_SIDE and dim.name != "b" for dim in self.blocked.dims):
            return f"a side is shorter than {SHORTEST_SIDE}"
        blocks = programs(self.blocked, divided(NARROWEST, len(self.blocked.dots)))
        return (
            "" if blocks * 2 >= self.blocked.device.multiprocessors else f"{blocks} blocks leave multiprocessors idle"
        )

    def configs(self) -> tuple[Config, ...]:
        """Return configurations, the best first as predicted (`speed`); none if the form is `slower`."""
        if self.slower:
            return ()
        return tuple(divided(config, len(self.blocked.dots)) for config in speed.ranked([self.blocked]))

    def relative_time(self, config: Config) -> float:
        """Return the predicted time relative to the library's."""
        return 1.0 / speed.of_config(self.blocked, config)

    def efficiency(self) -> float:
        """Return the share of the best configuration; lower for several products, unless they are computed as one."""
        blocked, config = self.blocked, self.configs()[0]
        several = len(blocked.dots) > 1 and stack_of(blocked) is None
        share = speed.reached(blocked) * (speeds(blocked.device).products.several if several else 1.0)
        return share * efficiency.occupied(blocked, self.task.numerics, config)

    def fit(self, config: Config) -> Config | None:
        """Return a configuration with space for the blocks that the epilogue stores and loads."""
        return fitted(self.blocked, config)

    def room(self, config: Config) -> int:
        """Return the bytes of the operands and of the blocks that are stored."""
        return room(self.blocked, config) + stored(self.blocked, config)

    def lay_out(self, config: Config, writer: Writer) -> Layout:
        """Return the layout; GRID indices are defined in the loop over blocks."""
        parts = config.parts if isinstance(config, PersistentConfig) else 1
        return lay_out(self.blocked, config, 1, parts=parts, within_limit=writer.within_limit)

    def functions(self, layout: Layout, writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
        """Return one function, to which descriptors are passed."""
        return [writer.function(layout, layout.blocked.kernel.name, self.open, hosted=hosted)]

    def open(self, body: Body) -> None:
        """Add the descriptors, and the loop over blocks."""
        write(body)

    def per_multiprocessor(self, config: Config) -> int:
        """Return the number of programs per multiprocessor that the configuration states."""
        return config.per_processor if isinstance(config, PersistentConfig) else 1


__all__ = ["PersistentConfig", "PersistentProduct"]
