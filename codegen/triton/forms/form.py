"""Defines the interface of a form: one way to spread a kernel over the programs of a launch.

A form is a type; its instances are plans: the form applied to one kernel.  `applies` returns the plan or the reason why
the form refuses the kernel, `configs` lists the configurations worth timing, `relative_time` predicts the time of one
of them, and `emit` writes the source.  The order of `FORMS` (`forms/__init__.py`) alone decides the default form of a
kernel.
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
from fusion.codegen.triton.expressions.code import Code
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.file import Launch, blocks_of, file_of
from fusion.codegen.triton.forms import efficiency, limits
from fusion.codegen.triton.writer import FunctionRole, Writer, one_block
from fusion.lowering.ir.kernel import Kernel


@dataclass(frozen=True)
class Task:
    """A kernel, with the device and the arithmetic for which it is generated."""

    kernel: Kernel
    device: Device
    numerics: Numerics

    @cached_property
    def blocked(self) -> Blocked:
        """Return the kernel over block dimensions; without other kernels of its launch."""
        return block(self.kernel, self.device, invariant=self.numerics.invariant)

    @classmethod
    def of(cls, blocked: Blocked, numerics: Numerics) -> Task:
        """Return the task of a kernel that is over block dimensions already."""
        task = cls(blocked.kernel, blocked.device, numerics)
        task.__dict__["blocked"] = blocked
        return task


@dataclass(frozen=True, slots=True)
class Refused:
    """The reason why a form does not compute a kernel, as users read it."""

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
        """Return the plan for a kernel, or the reason why this form cannot compute it."""

    @abstractmethod
    def configs(self) -> tuple[Config, ...]:
        """Return the configurations worth timing, the default first; they may exceed the device (`fit`)."""

    @property
    def slower(self) -> str:
        """Return why a later form is likely to be faster, so that this one is not the default; empty if none is."""
        return ""

    def relative_time(self, config: Config) -> float:
        """Return the predicted time relative to that at the full speed of the device, or of the library's kernel."""
        return 1.0 / efficiency.of_config(self.blocked, config)

    def efficiency(self) -> float:
        """Return the share of the library's speed that the default configuration of a contraction reaches."""
        return efficiency.of_sums(self.blocked)

    @property
    def exposes_epilogue(self) -> bool:
        """Whether epilogue time adds to GEMM time, beyond `efficiency`."""
        return False

    @property
    def blocked(self) -> Blocked:
        """Return the kernel over block dimensions."""
        return self.task.blocked

    # Room on the device -----------------------------------------------------------------------------------------------

    def fit(self, config: Config) -> Config | None:
        """Return the configuration with as many stages as fit the device; None if not even a short pipeline fits."""
        return limits.fitted(self.blocked, config)

    def room(self, config: Config) -> int:
        """Return the bytes of shared memory of a program."""
        return limits.room(self.blocked, config)

    # Source -----------------------------------------------------------------------------------------------------------

    def emit(self, config: Config, writer: Writer) -> str | None:
        """Return the source in a configuration; None if `writer` asks for a limit of sizes and there is none."""
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
        """Return the layout of the kernel in a configuration."""
        return lay_out(self.blocked, config, within_limit=writer.within_limit)

    def functions(self, layout: Layout, writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
        """Return the functions of the kernel, of which the last is launched.  The descriptors in `hosted` are passed to
        it.
        """
        return [writer.function(layout, layout.blocked.kernel.name, self.open)]

    def function(self, layout: Layout, name: str, writer: Writer, role: FunctionRole) -> Code:
        """Return the only function of the kernel, with its role in a launch of several."""
        return writer.function(layout, name, self.open, role=role)

    def open(self, body: Body) -> None:
        """Add the lines of a program."""
        one_block(body)

    def per_multiprocessor(self, config: Config) -> int:
        """Return the number of persistent programs per multiprocessor; 0: each program computes one block."""
        return 0


Choice: TypeAlias = tuple[Form, Config]
"""A form and one of its configurations."""


def count_of(layout: Layout) -> str:
    """Return the number of blocks, as Python text."""
    return " * ".join(blocks_of(layout, dim) for dim in layout.blocked.grid()) or "1"
