"""Load: the text of a generated file as a Python module, and the types Triton compiles it for.

What enters is a kernel and a source (perhaps edited); what leaves is the function, its constants and options, its grid.
The text is written to the cache, because Triton reads the source of a kernel from its file, and because a traceback or
a debugger should show it.  A file that lacks `CONFIG`, `grid` or the kernel's function is refused.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fusion.codegen.cache import cache_dir, digest, publish
from fusion.codegen.triton.arguments import argument, type_of
from fusion.codegen.triton.call import COUNTER
from fusion.codegen.triton.launch import passed
from fusion.lowering.errors import BuildError
from fusion.lowering.kernel import Kernel

TRUSTING = ("make_tensor_descriptor(", "TensorDescriptor(", "_words = ")
"""What a text has that only aligned tensors allow: descriptors, masks that end with a word (`blocks/word_loads.py`)."""


@dataclass(frozen=True, slots=True)
class Generated:
    """An imported source.

    Attributes:
        function: what `@triton.jit` made of it.
        constants: values of its `tl.constexpr` parameters.
        options: `num_warps`, `num_stages` and other options of Triton.
        trusting: it serves only aligned tensors, since it reads through descriptors, or in words to the end of a row.
        passed: the types of descriptors that are passed, after all else, by parameter.
        near: one descriptor reaches from one tensor to another, as only those that lie near each other allow.
    """

    kernel: Kernel
    module: ModuleType
    function: Any
    constants: dict[str, int]
    options: dict[str, int]
    trusting: bool
    near: bool
    passed: dict[str, str]

    @property
    def persistent(self) -> bool:
        """Does the grid depend on how many programs run at once?"""
        return "processors" in inspect.signature(self.module.grid).parameters

    @property
    def limited(self) -> bool:
        """Are sizes taken only with which all indices fit into 32 bits?"""
        return hasattr(self.module, "fits")

    def fits(self, *sizes: int) -> bool:
        """Are these sizes taken?"""
        return not self.limited or self.module.fits(*sizes)

    @property
    def counted(self) -> bool:
        """Do its programs count themselves, so that the last one goes on?"""
        return self.kernel.then is not None

    @property
    def counters(self) -> int:
        """How many counts there are: one of all programs, or one of those of each tile."""
        count: Callable[[], int] | None = getattr(self.module, "counters", None)
        return 1 if count is None else count()

    def grid(self, *sizes: int, processors: int | None = None) -> int:
        """How many programs run for these sizes, on a device with so many multiprocessors."""
        count: Callable[..., tuple[int, ...]] = self.module.grid
        return count(*sizes)[0] if processors is None else count(*sizes, processors=processors)[0]


def load(kernel: Kernel, source: str) -> Generated:
    """Import `source`.

    Raises:
        BuildError: it is not a Python file, or lacks what a generated file has.
    """
    name = f"fusion_triton_{digest(source)[:32]}"
    path = cache_dir() / "triton" / f"{name}.py"
    text = source.encode()
    if not path.exists() or path.read_bytes() != text:
        publish(path, text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # a debugger and `inspect` look a function's module up here
    try:
        spec.loader.exec_module(module)
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
    further, types = parameters[len(expected) :], passed.types(kernel, module)
    given, constants = further[: len(types)], {name: config.pop(name) for name in further[len(types) :]}
    described = dict(zip(given, types, strict=True))
    return Generated(kernel, module, function, constants, config, trusting, near, described)


def signature(generated: Generated) -> dict[str, str]:
    """The type of each parameter of the function, in order."""
    types = {argument(param): type_of(param) for param in generated.kernel.params}
    types |= dict.fromkeys((size.name for size in generated.kernel.sizes), "i32" if generated.limited else "i64")
    types |= {COUNTER: "*i32"} if generated.counted else {}
    types |= generated.passed
    return types | dict.fromkeys(generated.constants, "constexpr")


def alignment(
    generated: Generated, multiples: tuple[bool, ...] = (), *, aligned: bool = True
) -> dict[tuple[int, ...], list[list[object]]]:
    """What Triton may assume of each parameter: aligned pointers (if they are as promised), sizes that are multiples
    of 16.
    """
    known = [aligned and param.aligned and not param.number for param in generated.kernel.params] + list(multiples)
    return {(position,): [["tt.divisibility", 16]] for position, divisible in enumerate(known) if divisible}
