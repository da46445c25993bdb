"""Writes the parts that all C functions of a kernel share: names, signature, and calls of kernels in the same launch.

Kernels that share a launch run one after the other, each on all threads: on a CPU that saves calls.

The work of a kernel may be divided into shares, which threads compute without waiting for each other.  Then the share
of one thread is a function of its own, which a team of threads calls that launches several kernels (`sequence.py`); the
kernel's function calls it in a parallel region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.codegen.c.calls import NO_MEMORY, SCRATCH_SUFFIX, SHARE_SUFFIX
from fusion.codegen.c.text.nest import NONE, WRONG, YES, Namespace, identifier, indented
from fusion.codegen.c.text.scratch import Scratch, placed
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
        return self._called([*self._unknown(), *lines])

    def shared(self, lines: Sequence[str], arrays: Sequence[Scratch]) -> tuple[str, ...]:
        """Return the functions of a kernel that is divided into shares, its own last.

        Args:
            lines: compute the share of a thread, in loops that all `threads` of a team come to; none waits for another.
            arrays: scratch arrays of one thread.
        """
        kernel, (places, size) = self._kernel, placed(arrays)
        checks = has_checks(kernel)
        share = [*self._unknown(), *places, *lines]
        share = [f"int {WRONG} = 0;", *share, f"return {WRONG};"] if checks else [*share, "return 0;"]
        each, name = self.space.fresh("each"), self.space.exactly(f"{self._name}_{SHARE_SUFFIX}")
        given = [*self.params.values(), *(self.names[symbol] for symbol in kernel.sizes)]
        own = f"scratch + omp_get_thread_num()*{each}"
        call = f"{name}({', '.join([*given, own, 'omp_get_num_threads()'])});"
        region = [
            f"const int64_t {each} = {self._name}_{SCRATCH_SUFFIX}();",
            f"char *const scratch = aligned_alloc(64, threads*{each});",
            f"if (!scratch) return {NO_MEMORY};",
            f"#pragma omp parallel num_threads(threads){f' reduction(|: {WRONG})' if checks else ''}",
            f"{WRONG} |= {call}" if checks else call,
            "__builtin_free(scratch);",
        ]
        size_of = "\n".join([f"int64_t {self._name}_{SCRATCH_SUFFIX}(void) {{", f"    return {size};", "}", ""])
        share_of = self._text(name, share, "char *restrict scratch", "int threads")
        alone = not called_by(kernel)  # else the launch is more than the shares
        return *(each if alone else f"static {each}" for each in (size_of, share_of)), self._called(region)

    def _called(self, lines: Sequence[str]) -> str:
        """Return the kernel's function, of `lines` and the kernels that share its launch."""
        calls = []
        for part in called_by(self._kernel):
            arguments = [self.params[param.name] for param in part.params]
            arguments += [self.names[symbol] for symbol in part.sizes]
            call = f"{identifier(part.name)}({', '.join([*arguments, 'threads'])})"
            calls.append(f"if (({WRONG} |= {call}) & {NO_MEMORY}) return {WRONG};")
        body = [*lines, *calls]
        if calls or has_checks(self._kernel):
            body = [f"int {WRONG} = 0;", *body, f"return {WRONG};"]
        else:
            body.append("return 0;")
        return self._text(self._name, body, "int threads")

    def _text(self, name: str, body: Sequence[str], *last: str) -> str:
        """Return a function that takes the kernel's tensors and sizes, and then `last`."""
        signature = [f"{self._parameter(param)},  // {format_param(param)}" for param in self._kernel.params]
        signature += [f"int64_t {self.names[symbol]}," for symbol in self._kernel.sizes]
        head = [f"int {name}(", *indented([*signature, ", ".join(last)]), ") {"]
        return "\n".join([*head, *indented(body), "}", ""])

    def _unknown(self) -> Sequence[str]:
        """Return the lines that declare the unknown variables that are read."""
        masked = _MASKED if YES in self.space.unknowns else ()
        return [*masked, *(_HIDDEN if NONE in self.space.unknowns else ())]

    def _parameter(self, param: Param) -> str:
        return f"{'' if param.written else 'const '}{memory_type(param.dtype)} *restrict {self.params[param.name]}"
