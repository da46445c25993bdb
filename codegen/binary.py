"""Defines kernels that were compiled before: how a target hands them out, and how a process loads them.

A target compiles a kernel for an architecture (`Target.binary`), with or without the hardware.  A `Loader` launches it
in a process that has neither the kernel nor the compiler.  `LOADERS` lists the targets that have one; they are imported
at their first use; C's module imports no IR.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from fusion.lowering.errors import Unsupported

if TYPE_CHECKING:
    import torch

Arguments: TypeAlias = "Sequence[torch.Tensor | int]"
"""Of a launch: tensors, then sizes."""

Failed: TypeAlias = Callable[[Arguments], Exception]
"""Returns the error to raise after a launch in which a check failed."""


@dataclass(frozen=True, slots=True)
class Callee:
    """Names a kernel and the `function` in its binary, with the numbers of tensors and sizes that it takes."""

    name: str
    function: str
    tensors: int
    sizes: int


@dataclass(frozen=True, slots=True)
class Binary:
    """A kernel compiled for one architecture.

    Attributes:
        callee: how it is launched.
        suffix: of a file with the content, such as "so" or "cubin".
        content: the object.
        needs: features that a machine must have to run it, such as "x86_64" and "avx2".
        launch: further settings of a launch, such as the number of warps.
        carried: files with which the target's tools need not compile where it runs; empty if they need none.
    """

    callee: Callee
    suffix: str
    content: bytes
    needs: tuple[str, ...]
    launch: Mapping[str, int] = field(default_factory=dict)
    carried: bytes = b""


@dataclass(frozen=True, slots=True)
class Stored:
    """A kernel as a file holds it.

    Attributes:
        callee: how it is launched.
        source: its source.
        content, carried, launch: of its `Binary`; empty where there is none for this machine.
        kernel: reads the kernel, for which the IRs are imported; raises a ValueError if the file does not hold it.
        failed: returns the error for a check that failed.
    """

    callee: Callee
    source: str
    kernel: Callable[[], object]
    failed: Failed
    content: bytes = b""
    carried: bytes = b""
    launch: Mapping[str, int] = field(default_factory=dict)


class Loader(Protocol):
    """Loads the binaries of a target."""

    def lacking(self, needs: Sequence[str]) -> tuple[str, ...]:
        """Return which of `needs` this machine does not have."""

    def load(self, stored: Stored) -> Callable[..., None]:
        """Load an object, and return its launcher.

        Raises:
            OSError: it is not an object that this machine loads; also AttributeError.
        """

    def rebuild(self, stored: Stored) -> Callable[..., None]:
        """Compile the source for this machine, or take the cached binary, and return its launcher.

        Raises:
            BuildError: no compiler, or its message.
        """


LOADERS: Mapping[str, tuple[str, str]] = {
    "c": ("fusion.codegen.c.stored", "LOADER"),
    "triton": ("fusion.codegen.triton.stored", "LOADER"),
}
"""Target → the module and the name of its loader."""


class SequenceFunction(Protocol):
    """A target's function that launches several kernels in one call."""

    def source(self) -> str:
        """Return its source."""

    def object_for(self, arch: str) -> bytes:
        """Return its object for an architecture.

        Raises:
            Unsupported: nothing can be compiled for `arch` here.
            BuildError: no compiler, or its message.
        """

    def function_in(self, binary: bytes) -> Callable[..., int]:
        """Load it.

        Raises:
            OSError, AttributeError: this machine cannot load it.
        """

    def in_sequence(self) -> Callable[..., int] | None:
        """Return it, compiled for this machine; None if it cannot be."""


SEQUENCES: Mapping[str, str] = {"c": "fusion.codegen.c.sequence"}
"""Target → the module with its `SequenceFunction`; other targets launch kernels one by one."""


def sequence_function_of(target: str) -> SequenceFunction | None:
    """Return the function of a target that launches several kernels in one call; None if it has none."""
    if target not in SEQUENCES:
        return None
    return cast("SequenceFunction", importlib.import_module(SEQUENCES[target]))


def loader_of(target: str) -> Loader:
    """Return the loader of a target's binaries.

    Raises:
        Unsupported: the target has none.
    """
    if target not in LOADERS:
        raise Unsupported(
            f"kernels that the {target} target has compiled are not loaded from a file",
            hint="compile the program where it runs, by fusion.fuse",
        )
    module, name = LOADERS[target]
    loader: Loader = getattr(importlib.import_module(module), name)
    return loader


__all__ = [
    "LOADERS",
    "SEQUENCES",
    "Arguments",
    "Binary",
    "Callee",
    "Failed",
    "Loader",
    "SequenceFunction",
    "Stored",
    "loader_of",
    "sequence_function_of",
]
