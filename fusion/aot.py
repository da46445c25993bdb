"""Ahead of time: the kernels of a program, generated without running it and without the device they are for.

What enters is a function or module and example inputs, of which only shapes, strides and dtypes matter.  They are
captured as tensors on the target's device that hold no data, so that the graph is the one that device would see.  What
leaves are the kernels with every artefact the target's tools can make here.  Inference only; Python control flow is
followed for the given inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from codegen.target import Target
from codegen.targets import DEFAULTS, TARGETS, builder_for
from fusion.schedule import Schedule, grow, plan
from fusion.schedule.inline import inline_cheap_maps
from fusion.schedule.kernels import KernelCall
from fusion.schedule.split import split_reductions
from lowering.decompositions import decompositions
from lowering.errors import Unsupported
from lowering.kernel import Kernel
from lowering.lower import lower
from lowering.printer import format_kernel
from lowering.program import Extern
from lowering.verify import verify_kernel, verify_program


@dataclass(frozen=True, slots=True)
class ExportedKernel:
    """One distinct kernel.

    Attributes:
        text: the Kernel, printed.
        source: in the target's language.
        artefacts: what the target's tools made of the source, by file suffix ("ttir", "ptx", …), in the order of the
            path from source to binary.
        origins: one line per operation of the program that it computes.
    """

    name: str
    text: str
    source: str
    artefacts: dict[str, str | bytes]
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """What would run: the launches and calls in order, by name, and each distinct kernel once."""

    steps: tuple[str, ...]
    kernels: tuple[ExportedKernel, ...]

    def write(self, folder: str | Path) -> list[Path]:
        """Write every kernel's text, source and artefacts as files of `folder`; returns their paths."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        for number, kernel in enumerate(self.kernels):
            stem = f"{number:02d}_{kernel.name}"
            for suffix, content in {"txt": kernel.text, "source": kernel.source, **kernel.artefacts}.items():
                path = root / f"{stem}.{suffix}"
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                written.append(path)
        return written


def export_kernels(
    program: Callable[..., object],
    *args: object,
    target: str = "triton",
    arch: str | None = None,
    **kwargs: object,
) -> Export:
    """Generate the kernels of `program` for `target` ahead of time; nothing is launched.

    Args:
        program: a function or `nn.Module`, in the state (train or eval) it is to be exported in.
        args, kwargs: example inputs; their values are not used.
        target: "triton" or "c".
        arch: the architecture to build for where a target knows several, such as "sm_90".

    Raises:
        ValueError: an unknown target, or an architecture it does not build for.
        FusionError: the graph as a whole cannot be compiled.

    >>> export = export_kernels(lambda x: torch.relu(x) + 1, torch.empty(8, 128), target="c")
    >>> [kernel.name for kernel in export.kernels]
    ['relu_add']
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(sorted(TARGETS))}")
    machine = builder_for("", target).target
    device = next((kind for kind, name in DEFAULTS.items() if name == target), "cpu")
    schedule = _schedule(_capture(program, args, kwargs, torch.device(device)), torch.device(device), machine)
    steps = [step.kernel.name if isinstance(step, KernelCall) else str(step.target) for step in schedule.steps]
    distinct: dict[Kernel, KernelCall] = {}
    for step in schedule.steps:
        if isinstance(step, KernelCall):
            distinct.setdefault(step.kernel, step)
    return Export(tuple(steps), tuple(_export(machine, call) for call in distinct.values()))
