"""Ahead of time: the kernels of a program, generated without running it and without the device they are for.

What enters is a function or module and example inputs, of which only shapes, strides and dtypes matter.  The program is
traced over tensors that hold no data, on the target's device where there is one and else on the CPU.  What leaves are
the kernels with every artefact the target's tools can make here.  Inference only; Python control flow is followed as it
goes for the given inputs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter, traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fusion.attention import Chooser
from fusion.attention.export import ChosenAhead
from fusion.codegen.numerics import current
from fusion.codegen.target import Target
from fusion.codegen.targets import DEFAULTS, TARGETS
from fusion.compile import schedule_graph
from fusion.inspect.trace import SUFFIXES, Trace
from fusion.lowering.decompositions import decompositions
from fusion.lowering.kernel import Kernel
from fusion.lowering.printer import format_kernel
from fusion.schedule.kernels import KernelCall


@dataclass(frozen=True, slots=True)
class ExportedKernel:
    """One distinct kernel.

    Attributes:
        text: the Kernel, printed.
        source: in the target's language, of which `suffix` is that of a file.
        artefacts: what the target's tools made of the source, by file suffix ("ttir", "ptx", …), in the order of the
            path from source to binary.
        origins: one line per operation of the program that it computes.
    """

    name: str
    text: str
    source: str
    suffix: str
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
            for suffix, content in {"txt": kernel.text, kernel.suffix: kernel.source, **kernel.artefacts}.items():
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
        ValueError: an unknown target.
        FusionError: an architecture that the target does not build for, or a graph that cannot be compiled as a whole.

    >>> export = export_kernels(lambda x: torch.exp(x) + 1, torch.empty(8, 128), target="c")
    >>> [kernel.name for kernel in export.kernels]
    ['exp_add']
    """
    if target not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(sorted(TARGETS))}")
    machine = TARGETS[target](arch, current(strict=False))
    present = torch.cuda.is_available() and DEFAULTS["cuda"] == target
    graph = _capture(program, args, kwargs, torch.device("cuda" if present else "cpu"), machine)
    _, schedule = schedule_graph(graph, machine, Trace(None, "export", machine))
    steps = [step.kernel.name if isinstance(step, KernelCall) else step.name for step in schedule.steps]
    distinct: dict[Kernel, KernelCall] = {}
    for call in schedule.launches():
        distinct.setdefault(call.kernel, call)
    return Export(tuple(steps), tuple(_export(machine, call) for call in distinct.values()))


def _capture(
    program: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    device: torch.device,
    machine: Target,
) -> GraphModule:
    """The functional ATen graph of one call, over fake tensors on `device`; parameters and buffers become inputs."""
    attention = ChosenAhead(Chooser(lambda device: machine))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    state: dict[str, torch.Tensor] = {}
    if isinstance(program, torch.nn.Module):
        state = {**dict(program.named_parameters()), **dict(program.named_buffers())}

    def call(state: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> object:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        args, kwargs = pytree.tree_unflatten(filled, spec)
        if isinstance(program, torch.nn.Module):
            return torch.func.functional_call(program, state, args, kwargs)
        return program(*args, **kwargs)

    with FakeTensorMode(), torch.no_grad(), traceback.preserve_node_meta():

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

        inputs = {name: fake(tensor) for name, tensor in state.items()}, [fake(leaves[place]) for place in places]
        with attention, _UserLines():  # the last one sees the user's frames
            call(*inputs)
        functional = torch.func.functionalize(call, remove="mutations")
        with attention, _UserLines():
            graph: GraphModule = make_fx(functional, decomposition_table=decompositions())(*inputs)
        if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in graph.graph.nodes):
            # What PyTorch takes operations apart into may change in place what it has just made.
            graph = make_fx(torch.func.functionalize(Interpreter(graph).run, remove="mutations"))(*inputs)
    return graph


class _UserLines(TorchFunctionMode):
    """Notes, for each operation that is traced, the innermost line outside PyTorch that asked for it."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        frame = _user_frame(sys._getframe(1))
        if frame is not None:
            code = frame.f_code
            traceback.set_stack_trace([f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n'])
        return func(*args, **(kwargs or {}))


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside PyTorch; for modules that PyTorch calls itself, the innermost one of a module."""
    module: FrameType | None = None
    while frame is not None and frame.f_code.co_filename != __file__:
        file = frame.f_code.co_filename
        if not file.startswith(_PYTORCH):
            return frame
        if module is None and file.startswith(_MODULES):
            module = frame
        frame = frame.f_back
    return module


_PYTORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_PYTORCH, "nn", "modules") + os.sep


def _export(target: Target, call: KernelCall) -> ExportedKernel:
    kernel = call.kernel
    source = target.emit(kernel)
    artefacts = dict(target.stages(kernel, source))
    suffix = SUFFIXES.get(target.name, "txt")
    return ExportedKernel(kernel.name, format_kernel(kernel), source, suffix, artefacts, tuple(map(str, call.origins)))
