"""Generates the kernels of a program ahead of time, without running it and without its device.

Input: a function or module and example inputs, of which only shapes, strides and dtypes matter.  Dynamo captures the
program over fake tensors, on the target's device if present and else on the CPU; it then passes the stages of every
compilation (`stages.py`).  Output: the kernels with every artefact that the target's tools can make here.  Inference
only; all graphs of a program with graph breaks are exported, in order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fusion.attention import Chooser
from fusion.calls.fallback import as_it_is, located
from fusion.calls.prewarm import ours
from fusion.calls.reports import RegionReports, Reports
from fusion.codegen.target import Target
from fusion.codegen.targets import DEFAULTS, TARGETS
from fusion.compilation.compile import prepare, schedule_graph
from fusion.compilation.control_flow import compile_bodies
from fusion.compilation.graph_compiler import GraphCompiler
from fusion.compilation.graphs import donated_inputs, holds_tensors, size_hints
from fusion.compilation.region import RegionCompiler, compile_anew
from fusion.dumps.trace import Trace
from fusion.inspect.explanation import Explanation
from fusion.inspect.report import Report
from fusion.lowering.aten.mistraced import traced_as_eager
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.printer import format_kernel
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.runtime.recording import Recorder
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall

AHEAD = ("numerics", "workspace")
"""The options that count ahead of time: the others are about a run."""


@dataclass(frozen=True, slots=True)
class ExportedKernel:
    """Holds one kernel with every artefact on the way from block program to binary.

    Attributes:
        name: the name of the kernel, composed of its operations.
        text: the block program, printed.
        source: the source in the language of the target.
        suffix: the suffix of a file with the source, such as "py".
        artefacts: file suffix ("ttir", "ttgir", "llir", "ptx", "cubin", "sass") → content, in the order of the path
            from source to binary, as far as the target's tools are installed.
        origins: the operations that it computes, a line each, with module and line of the program.
    """

    name: str
    text: str
    source: str
    suffix: str
    artefacts: dict[str, str | bytes]
    origins: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Export:
    """Holds the kernels and library calls that would run.

    Attributes:
        steps: the names of launches and calls, in order.
        kernels: each distinct kernel once.
        explanation: the reports of its graphs, as `explain` returns them, with the times that the target predicts.
    """

    steps: tuple[str, ...]
    kernels: tuple[ExportedKernel, ...]
    explanation: Explanation = field(default=Explanation(()), repr=False)

    def write(self, folder: str | Path) -> list[Path]:
        """Write text, source and artefacts of every kernel into `folder`, and return the paths of the files."""
        root = Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        written: list[Path] = []
        for number, kernel in enumerate(self.kernels):
            stem = f"{number:02d}_{kernel.name}"
            for suffix, content in {"txt": kernel.text, kernel.suffix: kernel.source, **kernel.artefacts}.items():
                path = root / f"{stem}.{suffix}"
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
                written.append(path)
        return written


def export_kernels(
    program: Callable[..., object],
    *args: object,
    target: str = DEFAULTS["cuda"],
    arch: str | None = None,
    **kwargs: object,
) -> Export:
    """Generate the kernels of `program` for `target` ahead of time; nothing is launched.

    Args:
        program: a function or `nn.Module`, in the state (train or eval) it is to be exported in.
        args: example inputs; only their shapes, strides and dtypes matter.
        target: the name of a target; by default the target of CUDA devices.
        arch: the architecture to build for where a target knows several, such as "sm_90"; None takes the architecture
            of the current device, or sm_90 where there is none.
        kwargs: example inputs by keyword.

    Raises:
        ValueError: unknown target.
        FusionError: the target does not build for this architecture, or a graph cannot be compiled as a whole.

    >>> export = export_kernels(lambda x: torch.exp(x) + 1, torch.empty(8, 128), target="c")
    >>> [kernel.name for kernel in export.kernels]
    ['exp_add']
    """
    return exported(program, args, kwargs, target, arch, Options())


def exported(
    program: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    target: str,
    arch: str | None,
    options: Options,
) -> Export:
    """Generate kernels as `export_kernels` does; of the options those in `AHEAD` count.

    Raises:
        ValueError: unknown target.
        FusionError: the target does not build for this architecture, or a graph cannot be compiled as a whole.
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(sorted(TARGETS))}")
    chosen = Options(strict=True, graph_cache=False, **{name: getattr(options, name) for name in AHEAD})
    ahead = _Ahead(TARGETS[target](arch, chosen.current_numerics), chosen)
    present = torch.cuda.is_available() and DEFAULTS["cuda"] == target
    _run(program, args, kwargs, torch.device("cuda" if present else "cpu"), ahead)
    steps: list[str] = []
    distinct: dict[Kernel, KernelCall] = {}
    for schedule in ahead.schedules:
        steps += [step.kernel.name if isinstance(step, KernelCall) else step.name for step in schedule.steps]
        for call in schedule.launches():
            distinct.setdefault(call.kernel, call)
    kernels = tuple(_export(ahead.machine, call, ahead.sources[call.kernel]) for call in distinct.values())
    return Export(tuple(steps), kernels, Explanation(tuple(ahead.reports.all), target=ahead.machine))


class _Ahead(GraphCompiler):
    """Schedules graphs for a target that need not be present; the graphs run eagerly, over fake tensors."""

    launched = False

    def __init__(self, machine: Target, options: Options) -> None:
        super().__init__(options, Reports())
        self.machine = machine
        self.schedules: list[Schedule] = []
        self.sources: dict[Kernel, str] = {}

    def target(self, device: torch.device) -> Target:
        """Return the exported target, whatever device the fake tensors are on."""
        return self.machine

    def compile(self, recorder: Recorder | None, graph: fx.GraphModule, label: str) -> Boxed:
        """Schedule a graph, and return a function that runs its operations eagerly."""
        if not holds_tensors(graph):
            return as_it_is(graph)
        compile_bodies(graph, partial(self._compile_body, label))
        trace = Trace(None, label)
        prepare(graph, label, self.machine, self.options, trace.log)
        hints, donated = size_hints(graph), donated_inputs(graph)
        lowered, schedule = schedule_graph(graph, self.machine, trace, hints, self.options.workspace, None, donated)
        self.schedules.append(schedule)
        with trace.log.timed("build", "generate"):
            for call in schedule.launches():
                if call.kernel not in self.sources:
                    self.sources[call.kernel] = self.machine.emit(call.kernel)
        report = Report.of(label, lowered, schedule, self.sources, self.machine, hints)
        self.reports.add(replace(report, passes=tuple(trace.log.times)))
        return as_it_is(graph)

    def gave_up(self, graph: fx.GraphModule, label: str, failure: Exception) -> None:
        """Raise: an export has no eager fallback."""
        raise located(failure, graph)


@ours
@dataclass(frozen=True, slots=True)
class _Backend:
    """The Dynamo backend for export."""

    regions: RegionCompiler

    @traced_as_eager()
    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[object], within: RegionReports | None = None
    ) -> Callable[..., object]:
        return self.regions.compile(graph, inputs, self, within=within)


def _run(
    program: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    device: torch.device,
    ahead: _Ahead,
) -> None:
    """Run a program once over fake tensors on `device`, with every captured region compiled by `ahead`."""
    backend = _Backend(RegionCompiler(ahead, Chooser(ahead.target)))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes: dict[int, object] = {}

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in fakes:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                fakes[id(tensor)] = (
                    torch.nn.Parameter(empty, False) if isinstance(tensor, torch.nn.Parameter) else empty
                )
            return cast("torch.Tensor", fakes[id(tensor)])

        if isinstance(program, torch.nn.Module):
            for tensor in (*program.parameters(), *program.buffers()):
                fake(tensor)
            program = copy.deepcopy(program, fakes)
        fake_args, named = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
        compile_anew(program, backend, dynamic=False)(*fake_args, **named)


def _export(target: Target, call: KernelCall, source: str) -> ExportedKernel:
    kernel = call.kernel
    artefacts, origins = dict(target.stages(kernel, source)), tuple(map(str, call.origins))
    return ExportedKernel(kernel.name, format_kernel(kernel), source, target.suffix, artefacts, origins)
