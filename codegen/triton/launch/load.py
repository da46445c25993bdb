"""Loads the text of a generated file as a Python module, and determines the types that Triton compiles it for.

Input: a kernel and a source (perhaps edited); output: the function, its constants and options, its grid.  The text
runs from memory: Triton, `inspect` and tracebacks find it in `linecache`.  It is written to the cache for debuggers and
profilers, and never read back; no bytecode is written.  A text that lacks `CONFIG`, `grid` or the kernel's function is
refused.
"""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fusion.codegen.cache import cache_dir, digest, publish
from fusion.codegen.triton.arguments import COUNTER, argument, type_of
from fusion.codegen.triton.launch import host_descriptors
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Kernel

TRUSTING = ("make_tensor_descriptor(", "TensorDescriptor(", "_words = ")
"""Parts of a text that only aligned tensors allow: descriptors, masks of whole words (`blocks/aligned_rows.py`).

The text is searched, as it is all there is of a kernel that was cached, or edited by its user.
"""


@dataclass(frozen=True, slots=True)
class Generated:
    """An imported source.

    Attributes:
        function: the function decorated by `@triton.jit`.
        constants: values of its `tl.constexpr` parameters.
        options: `num_warps`, `num_stages` and other options of Triton.
        trusting: it serves only aligned tensors, since it loads through descriptors, or in words to the end of a row.
        descriptor_types: the types of descriptors that are passed, after all other arguments, by parameter.
        near: one descriptor spans two tensors, which must be near each other.
    """

    kernel: Kernel
    module: ModuleType
    function: Any
    constants: dict[str, int]
    options: dict[str, int]
    trusting: bool
    near: bool
    descriptor_types: dict[str, str]

    @property
    def persistent(self) -> bool:
        """Whether the grid depends on the number of programs that run at once."""
        return "processors" in inspect.signature(self.module.grid).parameters

    @property
    def limited(self) -> bool:
        """Whether the file supports only sizes with which all indices fit into 32 bits."""
        return hasattr(self.module, "fits")

    def fits(self, *sizes: int) -> bool:
        """Return whether the file supports these sizes."""
        return not self.limited or self.module.fits(*sizes)

    @property
    def counted(self) -> bool:
        """Whether the programs count themselves, so that the last one continues."""
        return self.kernel.then is not None

    @property
    def counters(self) -> int:
        """Return the number of counts: one for all programs, or one for each tile."""
        count: Callable[[], int] | None = getattr(self.module, "counters", None)
        return 1 if count is None else count()

    def grid(self, *sizes: int, processors: int | None = None) -> int:
        """Return the number of programs for these sizes, on a device with this number of multiprocessors."""
        count: Callable[..., tuple[int, ...]] = self.module.grid
        return count(*sizes)[0] if processors is None else count(*sizes, processors=processors)[0]


def load(kernel: Kernel, source: str) -> Generated:
    """Run `source` as a module.

    Raises:
        BuildError: it is no Python text, or lacks a part of a generated file.
    """
    name = f"fusion_triton_{digest(source)[:32]}"
    path = str(cache_dir() / "triton" / f"{name}.py")
    with suppress(BuildError):  # a full disk: only debuggers miss it
        publish("triton", f"{name}.py", source.encode())
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # a debugger and `inspect` look a function's module up here
    # Without a time, `linecache` does not compare the text with the file.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    try:
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))
        assert callable(module.grid)
        return _generated(
            *(kernel, module),
            trusting=any(sign in source for sign in TRUSTING),
            near="tl.pointer_type(" in source,
        )
    except Exception as error:
        sys.modules.pop(name, None)
        raise BuildError(f"the source of {kernel.name} cannot be used: {error!r}", hint=f"it is at {path}") from error


def _generated(kernel: Kernel, module: ModuleType, *, trusting: bool, near: bool) -> Generated:
    function, config = getattr(module, kernel.name), dict(module.CONFIG)
    parameters = list(function.arg_names)
    expected = [*map(argument, kernel.params)] + [size.name for size in kernel.sizes]
    expected += [COUNTER] if kernel.then is not None else []
    if parameters[: len(expected)] != expected:
        raise ValueError(f"it takes {parameters}, but is called with {expected}")
    others, types = parameters[len(expected) :], host_descriptors.types(kernel, module)
    names, constants = others[: len(types)], {name: config.pop(name) for name in others[len(types) :]}
    described = dict(zip(names, types, strict=True))
    return Generated(kernel, module, function, constants, config, trusting, near, described)


def signature(generated: Generated) -> dict[str, str]:
    """Return the type of each parameter of the function, in order."""
    types = {argument(param): type_of(param) for param in generated.kernel.params}
    types |= dict.fromkeys((size.name for size in generated.kernel.sizes), "i32" if generated.limited else "i64")
    types |= {COUNTER: "*i32"} if generated.counted else {}
    types |= generated.descriptor_types
    return types | dict.fromkeys(generated.constants, "constexpr")


def alignment(
    generated: Generated, multiples: tuple[bool, ...] = (), *, aligned: bool = True
) -> dict[tuple[int, ...], list[list[object]]]:
    """Return Triton's attributes of the parameters: aligned pointers (if `aligned`), sizes that are multiples of 16."""
    known = [aligned and param.aligned and not param.number for param in generated.kernel.params] + list(multiples)
    return {(position,): [["tt.divisibility", 16]] for position, divisible in enumerate(known) if divisible}
