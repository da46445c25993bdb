"""Adapts the configurations of kernels that run side by side in one launch (`alike.py` decides which).

A part that needs fewer warps than the others gets larger blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.codegen.triton.arguments import PROGRAM, call_of
from fusion.codegen.triton.blocks import Blocked, Config, Dim, extent, power_of_two
from fusion.codegen.triton.expressions.code import PRODUCT, UNARY, Code, Operand
from fusion.codegen.triton.expressions.indices import Layout, index_code
from fusion.codegen.triton.forms import single_kernel
from fusion.codegen.triton.forms.alternating_product import AlternatingProduct
from fusion.codegen.triton.forms.form import Choice, Form, Refused, Task
from fusion.codegen.triton.forms.persistent_product import PersistentProduct, speed
from fusion.codegen.triton.forms.persistent_product.config import divided
from fusion.codegen.triton.forms.shared_rows import SharedRows
from fusion.codegen.triton.writer import FunctionRole, Writer
from fusion.lowering.ir.kernel import Kernel, Role


@dataclass(frozen=True, slots=True)
class LaunchPart:
    """One of the kernels of a launch.

    Attributes:
        name: the name of its function.
    """

    name: str
    form: Form
    layout: Layout

    @property
    def kernel(self) -> Kernel:
        """Return the kernel it computes."""
        return self.layout.blocked.kernel

    @property
    def blocks(self) -> str:
        """Return the number of its blocks, as text that is valid in Python and in Triton."""
        return " * ".join(_blocks(self.layout, dim) for dim in self.layout.blocked.grid()) or "1"

    def call(self, program: Operand) -> Code:
        """Return the line that calls its function for the program with this number."""
        return call_of(self.name, self.layout, program)

    def function(self, writer: Writer) -> Code:
        """Return the source of its function, whose argument is the number of the program within this part."""
        return self.form.function(self.layout, self.name, writer, FunctionRole(program=PROGRAM))


def parts_of(kernels: Sequence[Kernel], launched: str, writer: Writer, *, joined: bool = False) -> list[LaunchPart]:
    """Return the kernels of a launch of this name, laid out with the same warps and stages.

    They may be `joined` in one loop over blocks.
    """
    tasks = [Task(kernel, writer.device, writer.numerics) for kernel in kernels]
    chosen = _persistent(tasks, joined=True) if joined else choices(tasks)
    warps, stages = max(config.num_warps for _, config in chosen), min(config.num_stages for _, config in chosen)
    parts, names = list[LaunchPart](), {launched}
    for number, (form, config) in enumerate(chosen):
        kernel = form.task.kernel
        name = kernel.name if kernel.name not in names else f"{kernel.name}_{number}"
        names.add(name)
        layout = form.lay_out(replace(config, num_warps=warps, num_stages=stages), writer)
        parts.append(LaunchPart(name, form, layout))
    return parts


# Configurations -------------------------------------------------------------------------------------------------------


def choices(tasks: Sequence[Task]) -> list[Choice]:
    """Return a form and a configuration for each kernel, the best with the same warps and stages."""
    if all(map(is_persistent, tasks)):
        return _persistent(tasks)
    preferred = [first(task) for task in tasks]
    if tasks[0].blocked.contraction:
        return preferred
    warps = max(config.num_warps for _, config in preferred)
    return [(form, _widened(form.task.blocked, config, warps)) for form, config in preferred]


def is_persistent(task: Task) -> bool:
    """Return whether a kernel can be a persistent product of one group of warps."""
    plan = PersistentProduct.applies(task)
    return not isinstance(plan, Refused) and not plan.slower


def _persistent(tasks: Sequence[Task], *, joined: bool = False) -> list[Choice]:
    """Return the best configuration of persistent products of one launch, with as many columns as registers hold."""
    best = speed.ranked([task.blocked for task in tasks], joined=joined)[0]
    return [(PersistentProduct(task), divided(best, len(task.blocked.dots))) for task in tasks]


def first(task: Task) -> Choice:
    """Return the first choice of Triton's own language for a kernel that is not a persistent product."""
    persistent = (PersistentProduct, AlternatingProduct, SharedRows)
    plans = [plan for plan in single_kernel.plans(task) if not isinstance(plan, persistent)]
    return single_kernel.within((plan, config) for plan in plans for config in plan.configs())[0]


def _widened(blocked: Blocked, config: Config, warps: int) -> Config:
    """Return `config` on more warps, with a larger block of a dimension spread over programs, if it has one."""
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
        return size.at(PRODUCT if dim.size.is_Integer else UNARY).text
    if dim.size.is_Integer:
        return str(-(-int(dim.size) // layout.config.block(dim.name)))
    return f"(({size.text} + {layout.config.block(dim.name) - 1}) // {layout.config.block(dim.name)})"
