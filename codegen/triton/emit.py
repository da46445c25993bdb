"""Emits a Kernel as the text of a Python file.

Input: a Kernel; output: a self-contained file: a docstring with the operations it computes, the device functions it
needs, the `@triton.jit` kernel, its configuration, its grid, and a `launch` function.  It is imported and compiled as
it is, so an edited file is an edited kernel.  Equal kernels give equal text (up to the comments on their origin).
"""

from __future__ import annotations

from dataclasses import replace

from fusion.codegen.numerics import DEFAULT, Numerics
from fusion.codegen.triton.blocks import Config
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.forms import Task, candidates, form_of
from fusion.codegen.triton.writer import Writer
from fusion.lowering.kernel import Kernel


def emit(
    kernel: Kernel,
    config: Config | None = None,
    *,
    device: Device,
    numerics: Numerics = DEFAULT,
    wide: bool = False,
) -> str:
    """Return the source of `kernel` for `device`, in `config` or in the default configuration.

    The source is for symbolic sizes with which all indices fit into 32 bits, as its function `fits` decides; it is for
    any sizes if `wide`, or where there is no such limit (`limits`).

    Raises:
        ValueError: no form of the kernel supports `config`.
    """
    task = Task(kernel, device, numerics)
    form, chosen = candidates(task)[0] if config is None else (form_of(task, config), config)
    writer = Writer(device, numerics, within_limit=bool(kernel.sizes) and not wide)
    text = form.emit(chosen, writer)
    if text is None:  # no sizes are within a limit
        text = form.emit(chosen, replace(writer, within_limit=False))
    assert text is not None
    return text
