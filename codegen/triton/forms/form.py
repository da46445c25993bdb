"""Form: one way to spread a kernel over the programs of a launch.

A form is a type; its instances are plans: the form applied to one kernel.  `applies` makes the plan or says why the
form refuses the kernel, `configs` lists the configurations worth timing, `price` predicts the time of one of them, and
`emit` writes the source.  Which form a kernel gets by default is the order of `FORMS` (`forms/__init__.py`) alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, TypeAlias

from typing_extensions import Self

from fusion.codegen.numerics import Numerics
from fusion.codegen.triton.blocks import Blocked, Config, block
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.file import Launch, blocks_of, file_of
from fusion.codegen.triton.forms import efficiency, limits
from fusion.codegen.triton.writer import FunctionRole, Writer, one_block
from fusion.lowering.kernel import Kernel


@dataclass(frozen=True)
class Task:
    """A kernel, and the device and the arithmetic that it is generated for."""

    kernel: Kernel
    device: Device
    numerics: Numerics

    @cached_property
    def blocked(self) -> Blocked:
        """The kernel over block dimensions; that of one of several kernels of a launch, without the others."""
        return block(self.kernel, self.device)

    @classmethod
    def of(cls, blocked: Blocked, numerics: Numerics) -> Task:
        """The task of a kernel that is over block dimensions already."""
        task = cls(blocked.kernel, blocked.device, numerics)
        task.__dict__["blocked"] = blocked
        return task


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a form does not compute a kernel, as users read it."""

    why: str


@dataclass(frozen=True)
class Form(ABC):
    """The plan of a form for the kernel of a task."""

    task: Task

    name: ClassVar[str]
    takes: ClassVar[tuple[type[Config], ...]] = (Config,)
    """The types of its configurations."""

    @classmethod
    @abstractmethod
    def applies(cls, task: Task) -> Self | Refused:
        """The plan for a kernel, or why this form cannot compute it."""

    @abstractmethod
    def configs(self) -> tuple[Config, ...]:
        """The configurations worth timing, the default first; they may need more than the device has (`fit`)."""

    @property
    def slower(self) -> str:
        """Why a later form is likely to be faster, so that this one is not the default; empty where none is."""
        return ""

    def price(self, config: Config) -> float:
        """Predicted time, as a multiple of that at the full speed of the device (or of the library's kernel)."""
        return 1.0 / efficiency.of_config(self.blocked, config)

    def efficiency(self) -> float:
        """The share of the library's speed that the default configuration reaches; asked of contractions."""
        return efficiency.of_sums(self.blocked)

    @property
    def exposes_epilogue(self) -> bool:
        """Does the time of the epilogue add to that of the products, beside what `efficiency` says?"""
        return False

    @property
    def blocked(self) -> Blocked:
        """The kernel over block dimensions."""
        return self.task.blocked

    # Room on the device -----------------------------------------------------------------------------------------------

    def fit(self, config: Config) -> Config | None:
        """The configuration with as many stages as there is room for; None where there is none for a pipeline."""
        return limits.fitted(self.blocked, config)

    def room(self, config: Config) -> int:
        """Bytes of shared memory of a program."""
        return limits.room(self.blocked, config)

    # Source -----------------------------------------------------------------------------------------------------------

    def emit(self, config: Config, writer: Writer) -> str | None:
        """The source in a configuration; None where it is to be for sizes within a limit, and there is none."""
        layout = self.lay_out(config, writer)
        limit = writer.limit([layout])
        if writer.within_limit and limit is None:
            return None
        hosted: dict[str, Hosted] = {}
        functions = self.functions(layout, writer, hosted)
        launch = Launch(
            self.task.kernel,
            writer.device,
            config,
            layout.constants,
            count_of(layout),
            limit,
            hosted=hosted,
            per_multiprocessor=self.per_multiprocessor(config),
        )
        return file_of(launch, functions, strict=writer.numerics.strict)

    def lay_out(self, config: Config, writer: Writer) -> Layout:
        """Facts about the dimensions of the kernel in a configuration."""
        return lay_out(self.blocked, config, within_limit=writer.within_limit)

    def functions(self, layout: Layout, writer: Writer, hosted: dict[str, Hosted]) -> list[str]:
        """The functions of the kernel, of which the last is launched.  It is passed the descriptors in `hosted`."""
        return [writer.function(layout, layout.blocked.kernel.name, self.open)]

    def function(self, layout: Layout, name: str, writer: Writer, role: FunctionRole) -> str:
        """The one function of the kernel, where it plays a part in a launch of several."""
        return writer.function(layout, name, self.open, role=role)

    def open(self, body: Body) -> None:
        """Add the lines of a program."""
        one_block(body)

    def per_multiprocessor(self, config: Config) -> int:
        """How many persistent programs share a multiprocessor; 0: each program computes one block."""
        return 0


Choice: TypeAlias = tuple[Form, Config]
"""A form and one of its configurations."""


def count_of(layout: Layout) -> str:
    """The number of blocks, as Python text."""
    return " * ".join(blocks_of(layout, dim) for dim in layout.blocked.grid()) or "1"
