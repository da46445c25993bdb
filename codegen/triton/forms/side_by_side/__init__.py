"""Launches independent kernels together, each on its own range of programs (horizontal fusion).

The launched function selects the part of its program:

    program = tl.program_id(0)
    if program < 48:
        first(program, in0_ptr, out0_ptr, XBLOCK=1024)
    if (program >= 48) & (program < 60):
        second(program - 48, in1_ptr, out1_ptr, XBLOCK=512)

Persistent parts have no ranges: every program computes its blocks of one part in sequence, and continues in the next
part where the count of blocks left it, so that all programs end together.  Products of the same rows are one loop over
the blocks of all their columns (`joined.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self

from fusion.codegen.triton.arguments import PROGRAM
from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.expressions.code import Code, compose
from fusion.codegen.triton.file import Launch, file_of, launched_function, signature
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.codegen.triton.forms.side_by_side.alike import alike
from fusion.codegen.triton.forms.side_by_side.alternating import JoinedAlternatingProducts
from fusion.codegen.triton.forms.side_by_side.joined import JoinedProducts
from fusion.codegen.triton.forms.side_by_side.parts import LaunchPart, parts_of
from fusion.codegen.triton.writer import Writer


@dataclass(frozen=True)
class SideBySide(Form):
    """The plan for a kernel with others beside it.

    There is one configuration: each part has the best of its own forms on the warps common to all.
    """

    name = "side by side"
    takes = (Config, PersistentConfig)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept any kernel with others beside it."""
        return cls(task) if task.kernel.beside else Refused("no kernel runs beside it")

    def configs(self) -> tuple[Config, ...]:
        """Return the configuration of the first part."""
        writer = Writer(self.task.device, self.task.numerics, within_limit=False)
        return (parts_of(self.task.kernel.parts, self.task.kernel.name, writer)[0].layout.config,)

    def emit(self, config: Config, writer: Writer) -> str | None:
        """Return a file with a function for each part, and the launched function."""
        kernel = self.task.kernel
        parts = parts_of(kernel.parts, kernel.name, writer)
        limit = writer.limit([part.layout for part in parts])
        if writer.within_limit and limit is None:
            return None
        each = parts[0].form.per_multiprocessor(parts[0].layout.config)
        lines = dispatch(parts, persistent=each > 0)
        functions = [part.function(writer) for part in parts]
        functions.append(launched_function(signature(kernel, kernel.name, {}, []), lines, writer.device))
        count = " + ".join(part.blocks for part in parts)
        launch = Launch(kernel, writer.device, parts[0].layout.config, {}, count, limit, per_multiprocessor=each)
        return file_of(launch, functions, strict=writer.numerics.strict)


def dispatch(parts: Sequence[LaunchPart], *, persistent: bool) -> list[Code]:
    """Return the lines of the launched function."""
    lines = [compose("{} = tl.program_id(0)", PROGRAM)]
    if persistent:
        lines += [Code("programs = tl.num_programs(0)"), parts[0].call(PROGRAM)]
        before = parts[0].blocks
        for part in parts[1:]:
            lines.append(part.call(compose("({} + programs - ({}) % programs) % programs", PROGRAM, Code(before))))
            before += f" + {part.blocks}"
        return lines
    lines += [Code(f"end = {parts[0].blocks}"), compose("if {} < end:", PROGRAM)]
    lines.append(compose("    {}", parts[0].call(PROGRAM)))
    for part in parts[1:]:
        lines += [Code("start = end"), Code(f"end = start + {part.blocks}")]
        lines.append(compose("if ({0} >= start) & ({0} < end):", PROGRAM))
        lines.append(compose("    {}", part.call(compose("{} - start", PROGRAM))))
    return lines


__all__ = ["JoinedAlternatingProducts", "JoinedProducts", "SideBySide", "alike"]
