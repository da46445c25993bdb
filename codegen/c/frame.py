"""What every C function of a kernel has: its names, its signature, and the calls of what shares its launch.

What stands beside a kernel runs after it, each on all threads: on a CPU a launch shared is one call instead of several.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fusion.codegen.c.text.nest import NONE, WRONG, YES, Namespace, identifier, indented
from fusion.codegen.c.text.storage import memory_type
from fusion.lowering.checks import has_checks
from fusion.lowering.kernel import Kernel, Param
from fusion.lowering.printer import format_param

# Of a load under a mask that it knows (of lanes that it counts one by one), GCC 12 reads all lanes for AVX-512, and
# chooses then: it reads behind a row, which may be behind the memory of the process.
_MASKED = (f"_Bool {YES} = 1;", f'__asm__("" : "+r"({YES}));  // unknown to the compiler, and so is a mask with it')

# A position with it is neither a condition nor a step of so many elements (see `values.py`).
_HIDDEN = (f"int64_t {NONE} = 0;", f'__asm__("" : "+r"({NONE}));  // unknown to the compiler, too')


def called_by(kernel: Kernel) -> tuple[Kernel, ...]:
    """What runs once `kernel` is done, in order, each under a name of its own."""
    found = [replace(part, name=f"{kernel.name}_{number}") for number, part in enumerate(kernel.beside, 1)]
    last, name = kernel.then, f"{kernel.name}_last"
    while last is not None:  # all are called from here, where the parameters of all of them are known
        found.append(replace(last, name=name, then=None))
        last, name = last.then, f"{name}_last"
    return tuple(found)


class Frame:
    """The names of one kernel in C.

    Attributes:
        space: gives out the names that are still free.
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
        """The function whose body is `lines`, followed by what shares its launch.

        It returns whether a check has failed, if it has any.
        """
        signature = [f"{self._parameter(param)},  // {format_param(param)}" for param in self._kernel.params]
        signature += [f"int64_t {self.names[symbol]}," for symbol in self._kernel.sizes]
        calls = []
        for part in called_by(self._kernel):
            arguments = [self.params[param.name] for param in part.params]
            arguments += [self.names[symbol] for symbol in part.sizes]
            call = f"{identifier(part.name)}({', '.join([*arguments, 'threads'])});"
            calls.append(f"{WRONG} |= {call}" if has_checks(part) else call)
        masked = any(re.search(rf"& {YES}\b", line) for line in lines)
        hidden = any(re.search(rf"\| {NONE}\b", line) for line in lines)
        body = [*(_MASKED if masked else ()), *(_HIDDEN if hidden else ()), *lines, *calls]
        if has_checks(self._kernel):
            body = [f"int {WRONG} = 0;", *body, f"return {WRONG};"]
        result = "int" if has_checks(self._kernel) else "void"
        head = [f"{result} {self._name}(", *indented([*signature, "int threads"]), ") {"]
        return "\n".join([*head, *indented(body), "}", ""])

    def _parameter(self, param: Param) -> str:
        return f"{'' if param.written else 'const '}{memory_type(param.dtype)} *restrict {self.params[param.name]}"
