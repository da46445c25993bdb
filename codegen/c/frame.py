"""What every C function of a kernel has: its names, its signature, and the call of what follows in the launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from codegen.c.nest import Namespace, indented
from codegen.c.storage import memory_type
from lowering.kernel import Kernel, Param


def last_of(kernel: Kernel) -> Kernel | None:
    """What runs once `kernel` is done, under a name of its own."""
    return None if kernel.then is None else replace(kernel.then, name=f"{kernel.name}_last")


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
        """The function whose body is `lines`, followed by what follows in the launch."""
        sizes = [f"int64_t {self.names[symbol]}" for symbol in self._kernel.sizes]
        signature = ", ".join([*map(self._parameter, self._kernel.params), *sizes, "int threads"])
        last = last_of(self._kernel)
        calls = []
        if last is not None:
            arguments = [self.params[param.name] for param in last.params]
            arguments += [self.names[symbol] for symbol in last.sizes]
            calls.append(f"{last.name}({', '.join([*arguments, 'threads'])});")
        return "\n".join([f"void {self._name}({signature}) {{", *indented([*lines, *calls]), "}", ""])

    def _parameter(self, param: Param) -> str:
        return f"{'' if param.written else 'const '}{memory_type(param.dtype)} *restrict {self.params[param.name]}"
