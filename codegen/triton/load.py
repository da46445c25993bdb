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

import torch

from codegen.cache import cache_dir, digest, publish
from codegen.triton.emit import chain
from lowering.errors import BuildError
from lowering.kernel import Kernel

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One function of a source: the kernel it computes and how it is called.

    Attributes:
        function: what `@triton.jit` made of it.
        tensors: which of the tensors of the whole launch it takes.
        constants: values of its `tl.constexpr` parameters.
        options: `num_warps`, `num_stages` and other options of Triton.
    """

    kernel: Kernel
    function: Any
    tensors: tuple[int, ...]
    constants: dict[str, int]
    options: dict[str, int]


@dataclass(frozen=True, slots=True)
class Generated:
    """An imported source: the kernel itself, then those that follow it in its launch, one program each."""

    module: ModuleType
    steps: tuple[Step, ...]

    @property
    def persistent(self) -> bool:
        """Does the grid depend on how many programs run at once?"""
        return "programs" in inspect.signature(self.module.grid).parameters

    def grid(self, *sizes: int, programs: int | None = None) -> int:
        """How many programs of the first step run for these sizes; `programs` at once, if it is persistent."""
        count: Callable[..., tuple[int, ...]] = self.module.grid
        return count(*sizes)[0] if programs is None else count(*sizes, programs=programs)[0]


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
        every = tuple(range(len(kernel.params)))
        entries = [(getattr(module, kernel.name), every, module.CONFIG), *getattr(module, "THEN", ())]
        steps = [_step(*pair) for pair in zip(chain(kernel), entries, strict=True)]
    except Exception as error:
        sys.modules.pop(name, None)
        raise BuildError(f"the source of {kernel.name} cannot be used: {error!r}", hint=f"it is at {path}") from error
    return Generated(module, tuple(steps))


def _step(kernel: Kernel, entry: tuple[Any, tuple[int, ...], dict[str, int]]) -> Step:
    function, tensors, config = entry[0], tuple(entry[1]), dict(entry[2])
    parameters = list(function.arg_names)
    expected = [f"{param.name}_ptr" for param in kernel.params] + [size.name for size in kernel.sizes]
    if parameters[: len(expected)] != expected:
        raise ValueError(f"it takes {parameters}, but is called with {expected}")
    constants = {parameter: config.pop(parameter) for parameter in parameters[len(expected) :]}
    return Step(kernel, function, tensors, constants, config)


def signature(step: Step) -> dict[str, str]:
    """The type of each parameter of the function, in order."""
    types = {f"{param.name}_ptr": POINTERS[param.dtype] for param in step.kernel.params}
    types |= dict.fromkeys((size.name for size in step.kernel.sizes), "i64")
    return types | dict.fromkeys(step.constants, "constexpr")


def alignment(step: Step, multiples: tuple[bool, ...] = ()) -> dict[tuple[int, ...], list[list[object]]]:
    """What Triton may assume of each parameter: aligned pointers, and sizes that are multiples of 16."""
    known = [param.aligned for param in step.kernel.params] + list(multiples)
    return {(position,): [["tt.divisibility", 16]] for position, divisible in enumerate(known) if divisible}
