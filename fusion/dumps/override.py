"""Replaces generated sources by edited ones: `FUSION_OVERRIDE=dir`, `options={"override": dir}`.

Input: the kernels of a graph with their generated sources, and a directory with files of kernels as dumps write them;
output: launchers of the edited ones.  A file belongs to the kernel whose block program it holds, whatever its name.  An
edited kernel is first built and run on drawn inputs; it is refused if its numbers are wrong.  A file is stale if it was
edited from another text than is generated now.  Whatever is not used is named in a warning, and the generated source
runs; under `strict`, wrong numbers and failed builds raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion.calls.fallback import warn_once
from fusion.codegen.build import Built, is_idle
from fusion.codegen.target import Target
from fusion.dumps.checks import Case
from fusion.dumps.kernel_files import (
    KernelFile,
    Unreadable,
    inputs_of,
    is_kernel_file,
    mark_of,
    read_kernel_file,
    sizes_of,
)
from fusion.lowering.errors import FusionError
from fusion.lowering.ir.kernel import Kernel


class WrongKernel(FusionError):
    """An edited kernel cannot be built, or computes other numbers than the generated one."""


@dataclass(frozen=True, slots=True)
class Overridden:
    """A kernel whose source was replaced by a file's."""

    built: Built
    path: Path

    def __str__(self) -> str:
        return f"kernel {self.built.kernel.name}: from {self.path}"


def overridden(
    folder: Path, sources: Mapping[Kernel, str], target: Target, device: torch.device, *, strict: bool
) -> dict[Kernel, Overridden]:
    """Build the edited kernels in a directory that replace some of `sources`.

    Args:
        sources: the generated sources.
        device: where inputs are drawn.
        strict: raise where an edited kernel is refused.

    Raises:
        WrongKernel: an edited kernel is refused, under `strict`.
    """
    used: dict[Kernel, Overridden] = {}
    names = {kernel.name for kernel in sources}
    for file in _edited(folder):
        if file.target != target.name:
            continue
        if file.kernel not in sources:
            if file.kernel.name in names:
                warn_once(
                    f"{file.path} is not used in this graph: its kernel {file.kernel.name} has other sizes, dtypes "
                    "or operations than the graph's of that name"
                )
        elif (why := _stale(file, sources[file.kernel], target)) or file.kernel in used:
            warn_once(f"{file.path} is not used: {why or f'{used[file.kernel].path} replaces the same kernel'}")
        else:
            try:
                used[file.kernel] = Overridden(_checked(file, target, device), file.path)
            except WrongKernel as refusal:
                if strict:
                    raise
                warn_once(f"the generated kernel is used instead: {refusal}")
    return used


def _stale(file: KernelFile, generated: str, target: Target) -> str:
    """Return why an edit does not belong to the text that is generated now; empty if it does."""
    if file.numerics != target.numerics:
        return f"it was generated for other numerics ({file.numerics})"
    if mark_of(file.kernel, generated) != file.original:
        return "it is stale: another source is generated for its kernel now; dump it again and repeat the edit"
    return ""


def _checked(file: KernelFile, target: Target, device: torch.device) -> Built:
    """Build the source in a file, and run it on drawn inputs.

    Raises:
        WrongKernel: that fails, or its results are wrong.
    """
    kernel = file.kernel
    sizes = sizes_of(kernel)
    try:
        launch = target.build(kernel, file.source)
        with unset_fake_temporarily():  # it is compiled while PyTorch traces
            results = Case.of(kernel, inputs_of(kernel), [sizes[size] for size in kernel.sizes], device).run(launch)
    except Exception as error:  # whatever an edited text does: the generated one is there
        raise WrongKernel(f"the edited kernel {file.path} cannot be checked: {error}") from error
    wrong = [f"\n  {result}" for result in results if not result.is_right]
    if wrong:
        raise WrongKernel(f"the edited kernel {file.path} computes other numbers:{''.join(wrong)}")
    return Built(kernel, file.source, launch)


def _edited(folder: Path) -> list[KernelFile]:
    """Return the files below a directory whose source was edited, by path."""
    files = []
    for path in sorted(folder.rglob("*.py")):
        status = path.stat()
        try:
            file = _read(path, status.st_mtime_ns, status.st_size)
        except Unreadable as error:
            warn_once(str(error))
        else:
            if file is not None and file.is_edited and not is_idle(file.kernel):
                files.append(file)
    return files


@lru_cache(maxsize=1 << 10)
def _read(path: Path, changed: int, size: int) -> KernelFile | None:
    """Return the kernel in a file as it was last changed; None if it is a file of another kind."""
    is_one = is_kernel_file(path.read_text(encoding="utf-8", errors="replace"))
    return read_kernel_file(path) if is_one else None


__all__ = ["Overridden", "WrongKernel", "overridden"]
