"""Writes the parts that all C functions of a kernel share: names, signature, and calls of kernels in the same launch.

Kernels that share a launch run one after the other, each on all threads: on a CPU that saves calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.codegen.c.calls import NO_MEMORY
from fusion.codegen.c.text.nest import NONE, WRONG, YES, Namespace, identifier, indented
from fusion.codegen.c.text.storage import memory_type
from fusion.lowering.checks.checked import has_checks
from fusion.lowering.ir.kernel import Kernel, Param
from fusion.lowering.printer import format_param

# For a load under a mask that it knows (of lanes that it counts one by one), GCC 12 reads all lanes with AVX-512, and
# selects then: it reads past the end of a row, which may be past the memory of the process.
_MASKED = (f"_Bool {YES} = 1;", f'__asm__("" : "+r"({YES}));  // unknown to the compiler, and so is a mask with it')

# An offset with it is neither a condition nor a multiple of elements (see `values.py`).
_HIDDEN = (f"int64_t {NONE} = 0;", f'__asm__("" : "+r"({NONE}));  // unknown to the compiler, too')


def called_by(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return the kernels that run after `kernel` in its launch, in order, each under its own name."""
    parts = [replace(part, name=f"{kernel.name}_{number}") for number, part in enumerate(kernel.beside, 1)]
    last, name = kernel.then, f"{kernel.name}_last"
    while last is not None:  # all are called here, where the parameters of all of them are known
        parts.append(replace(last, name=name, then=None))
        last, name = last.then, f"{name}_last"
    return tuple(parts)


class Frame:
    """The names of one kernel in C.

    Attributes:
        space: allocates unused names.
        params: param → its name.
        names: size and axis symbols → their names.
    """

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.space = Namespace()
        self._name = self.space.exactly(kernel.name)
        self.params = {param.name: self.space.exactly(param.name) for param in kernel.params}
        symbols = (*kernel.sizes, *(axis.symbol for axis in kernel.axes))
        self.names = {symbol: self.space.exactly(symbol.name) for symbol in symbols}
        for name in self.names.values():  # the bounds and the step of a block
            self.space.reserve(f"{name}_0", f"{name}_end", f"{name}_step")

    def function(self, lines: Sequence[str]) -> str:
        """Return the function whose body is `lines`, followed by the kernels that share its launch.

        It returns 0, or the bits 1 (a check has failed) and `NO_MEMORY`.
        """
        signature = [f"{self._parameter(param)},  // {format_param(param)}" for param in self._kernel.params]
        signature += [f"int64_t {self.names[symbol]}," for symbol in self._kernel.sizes]
        calls = []
        for part in called_by(self._kernel):
            arguments = [self.params[param.name] for param in part.params]
            arguments += [self.names[symbol] for symbol in part.sizes]
            call = f"{identifier(part.name)}({', '.join([*arguments, 'threads'])})"
            calls.append(f"if (({WRONG} |= {call}) & {NO_MEMORY}) return {WRONG};")
        masked = _MASKED if YES in self.space.unknowns else ()
        hidden = _HIDDEN if NONE in self.space.unknowns else ()
        body = [*masked, *hidden, *lines, *calls]
        if calls or has_checks(self._kernel):
            body = [f"int {WRONG} = 0;", *body, f"return {WRONG};"]
        else:
            body.append("return 0;")
        head = [f"int {self._name}(", *indented([*signature, "int threads"]), ") {"]
        return "\n".join([*head, *indented(body), "}", ""])

    def _parameter(self, param: Param) -> str:
        return f"{'' if param.written else 'const '}{memory_type(param.dtype)} *restrict {self.params[param.name]}"
