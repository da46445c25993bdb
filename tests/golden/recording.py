"""Decisions as text: which kernels a program becomes on a target, in which form, at which predicted price.

Input: a program over fake tensors; output: a text of one line per launch and call.  Dynamo, AOTAutograd and every pass
run as they do for a user; only building and launching is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

import fusion.compilation.graph_compiler
import fusion.stages
from fusion.attention.choose import Choice
from fusion.backend import Backend
from fusion.calls.fallback import as_it_is
from fusion.codegen import targets
from fusion.codegen.c import device
from fusion.codegen.numerics import current
from fusion.codegen.target import Target
from fusion.codegen.targets import builder_for
from fusion.codegen.triton.blocks import describe
from fusion.codegen.triton.target import TritonTarget
from fusion.compilation.compile import prepare, schedule_graph
from fusion.compilation.graphs import donated_inputs, main_device, size_hints
from fusion.dumps.trace import Trace
from fusion.inspect.report import Report
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.kernel import Kernel
from fusion.options import Options
from fusion.runtime import Boxed
from fusion.schedule import Schedule
from fusion.schedule.kernels import KernelCall
from fusion.schedule.kernels.time import kernel_time
from tests.golden.models import Model
from tests.golden.programs import Program

TARGETS = {"sm_90": "triton", "c": "c"}
"""Folder of the texts → the target that generates for it on a machine without a GPU."""

THREADS = 2
"""Threads that the C target is to price for."""


def decisions(program: Program | Model, target: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The text of one program, forward and backward."""
    recorder = _recorded(program, target, monkeypatch)
    assert recorder.kernels, "nothing was generated: there is no decision to record"
    return "\n".join([*recorder.lines, ""])


def kernels_for(program: Program | Model, arch: str, monkeypatch: pytest.MonkeyPatch) -> Mapping[Kernel, str]:
    """The kernels of one program, forward and backward, with their sources for an architecture."""
    monkeypatch.setattr(targets, "_builders", {})
    monkeypatch.setitem(targets.TARGETS, "triton", lambda _, numerics: TritonTarget(arch, numerics))
    return _recorded(program, "triton", monkeypatch).kernels


def _recorded(program: Program | Model, target: str, monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    recorder = _Recorder()
    monkeypatch.setattr(fusion.compilation.graph_compiler, "compile_graph", recorder.compile_graph)
    monkeypatch.setattr(fusion.stages, "refuse_fake_inputs", lambda graph: None)
    monkeypatch.setattr(fusion.compilation.graph_compiler, "guard_dispatch", lambda run, *others: run)
    monkeypatch.setattr(torch, "get_num_threads", lambda: THREADS)
    monkeypatch.setattr(device, "assumed", lambda: device.EPYC)
    backend = Backend(Options(target=target, strict=True, graph_cache=False))
    choose = backend._regions.attention

    def noted(graph: fx.GraphModule) -> tuple[Choice, ...]:
        choices = choose(graph)
        recorder.lines += [str(choice) for choice in choices]
        return choices

    monkeypatch.setattr(backend._regions, "attention", noted)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if isinstance(program, Model):
            _run_model(program, backend)
        else:
            _run_program(program, backend)
    return recorder


def _run_program(program: Program, backend: Backend) -> None:
    inputs = [given.tensor() for given in program.inputs]
    compiled = torch.compile(program.function, backend=backend, dynamic=program.dynamic)
    with torch.set_grad_enabled(program.backward):
        results = compiled(*inputs)
        if program.backward:
            _backward(results, [given for given in inputs if given.requires_grad])


def _run_model(model: Model, backend: Backend) -> None:
    module = _without_data(model)
    for name, value in model.settings.items():
        setattr(module, name, value)
    module.train(model.backward)
    with torch.set_grad_enabled(model.backward):
        results = torch.compile(module, backend=backend, dynamic=False)(**model.inputs())
        if model.backward:
            loss = getattr(results, "loss", None)
            _backward(results if loss is None else loss, list(module.parameters()))


def _without_data(model: Model) -> nn.Module:
    """Return the module with fake parameters and buffers; numbers that its constructor computes are real."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(model.dtype)
    try:
        with unset_fake_temporarily(), torch.device("meta"):
            module = model.make()
    finally:
        torch.set_default_dtype(before)
    fakes: dict[Tensor, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if tensor not in fakes:
            result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            fakes[tensor] = nn.Parameter(result) if isinstance(tensor, nn.Parameter) else result
        return fakes[tensor]

    for part in module.modules():
        for entries in (part._parameters, part._buffers):
            entries.update({name: fake(tensor) for name, tensor in entries.items() if tensor is not None})
    return module


def _backward(results: object, inputs: Sequence[Tensor]) -> None:
    first = next(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor) and leaf.requires_grad)
    torch.autograd.grad(first, inputs, torch.empty_like(first), allow_unused=True)


class _Recorder:
    """Replaces the compiler of graphs: schedules and generates each, records it, and runs its operations."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.kernels: dict[Kernel, str] = {}

    def compile_graph(
        self, graph: fx.GraphModule, options: Options, label: str = "graph", *others: object
    ) -> tuple[Boxed, Report]:
        device = main_device(graph)
        target = builder_for(device.type, options.target, current(strict=options.exact)).target
        trace = Trace(None, label)
        prepare(graph, label, target, options, trace.log)
        hints = size_hints(graph)
        lowered, schedule = schedule_graph(graph, target, trace, hints, options.workspace, None, donated_inputs(graph))
        sources = {call.kernel: target.emit(call.kernel) for call in schedule.launches()}
        self.kernels |= sources
        self.lines += [f"{label}:", *_steps(schedule, target)]
        self.lines += [f"  {line}" for tuning in schedule.choices for line in str(tuning).splitlines()]
        return as_it_is(graph), Report.of(label, lowered, schedule, sources, target, hints)


def _steps(schedule: Schedule, target: Target, indent: str = "  ") -> Iterator[str]:
    for step in schedule.steps:
        if isinstance(step, KernelCall):
            yield f"{indent}kernel {step.kernel.name}: {_form(step, target)}; {_digest(step.kernel, target)}"
        elif isinstance(step, Chunked):
            yield f"{indent}chunks {step.name}: {step.reason}"
            for body in schedule.bodies[step]:
                yield from _steps(body, target, indent + "  ")
        elif not step.is_view:
            yield f"{indent}call {step.name}: {step.reason}"


def _form(step: KernelCall, target: Target) -> str:
    """The configuration, where the target has a choice, the bytes that are moved, and the predicted time."""
    moved = f"reads {step.bytes_read}, writes {step.bytes_written}"
    price = f"{_price(step, target)}, {moved}"
    if not isinstance(target, TritonTarget):
        return price
    parts = [replace(part, beside=(), then=None) for part in step.kernel.parts]
    return " | ".join(describe(target.configs(part)[0]) for part in parts) + f", {price}"


def _price(step: KernelCall, target: Target) -> str:
    try:
        return f"{kernel_time(step, target):.4g} µs"
    except Unsupported:  # the speed of attention is known in some dtypes alone
        return "no price"


def _digest(kernel: Kernel, target: Target) -> str:
    """The hash of the source without the origins of its operations, which name lines of other libraries."""
    return hashlib.sha256(target.emit(_without_origins(kernel)).encode()).hexdigest()[:12]


def _without_origins(kernel: Kernel) -> Kernel:
    beside = tuple(_without_origins(part) for part in kernel.beside)
    then = None if kernel.then is None else _without_origins(kernel.then)
    return replace(kernel, origins=(), beside=beside, then=then)


def versions() -> Mapping[str, str]:
    """The releases that decide which graphs there are."""
    return {name: version(name).partition("+")[0] for name in ("torch", "transformers", "triton")}


__all__ = ["TARGETS", "decisions", "versions"]
