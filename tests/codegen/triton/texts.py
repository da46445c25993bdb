"""The text of a kernel, and Triton's artefacts of it without a GPU, for the tests of the Triton target."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton")

from fusion.codegen.triton import Config, TritonTarget
from fusion.lowering.ir.kernel import Kernel

TARGET = TritonTarget("sm_90")


# Compiling needs a Triton that does not interpret.
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets")


def body(kernel: Kernel, config: Config | None = None) -> str:
    """The lines of the kernel's function."""
    source = TARGET.emit(kernel, config)
    return source[source.index(f"def {kernel.name}(") :].partition("\n):\n")[2].partition("\n\n")[0]


def stages(kernel: Kernel, arch: str = "sm_90", config: Config | None = None) -> dict[str, str]:
    """Return the artefacts up to the binary, which takes less time than with its disassembly."""
    target = TritonTarget(arch)
    found: dict[str, str] = {}
    for name, content in target.stages(kernel, target.emit(kernel, config), arch):
        found[name] = content
        if name == "cubin":
            break
    return found


def instructions(kernel: Kernel, arch: str = "sm_90", config: Config | None = None) -> set[str]:
    """The names of all PTX instructions."""
    ptx = stages(kernel, arch, config)["ptx"]
    return set(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]+)", ptx, re.MULTILINE))


def has(result: set[str], *beginnings: str) -> bool:
    return all(any(name.startswith(beginning) for name in result) for beginning in beginnings)
