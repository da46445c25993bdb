"""Runs and times the alternatives for a cluster around a product (`mode="max-autotune"`, and `close_calls.py`).

Input: a program, a cluster of it and the alternatives (`schedule/clusters/alternatives.py`); output: a `Tuning` with
the microseconds of each.  The cluster, with the nodes that may take its epilogue, is extracted as a program and
scheduled in each of the ways, with its kernels in their fastest configurations.  An alternative that fails, or whose
results differ from the evaluator's, is refused.  Results are recorded like configurations, under the text of all
kernels and calls.

If sizes are unknown, or memory is short, predictions decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import sympy
import torch
from torch import fx

from fusion.codegen.target import Target
from fusion.codegen.tuning import Tuner, Tuning, Untuned, record
from fusion.codegen.tuning.check import wrong_tensor
from fusion.codegen.tuning.inputs import drawn, limits
from fusion.codegen.tuning.timing import medians
from fusion.compilation.scheduling import plan
from fusion.lowering.errors import CheckFailed, FusionError, VerifyError, brief
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.kernel import Kernel
from fusion.lowering.ir.program import BufferRef, ExternArg, Program, reads, writes
from fusion.runner.contexts import Scheduling
from fusion.runtime.splice import splice
from fusion.schedule import Schedule, grow
from fusion.schedule.clusters.alternatives import Alternative, alone, moved, nodes_of, weighed
from fusion.schedule.clusters.legality import Cluster, positions_in
from fusion.schedule.kernels import KernelCall
from fusion.schedule.reductions.partial import with_cuts


class Trials:
    """Runs and times the alternatives of clusters; equal clusters once."""

    def __init__(self, target: Target, tuner: Tuner | Untuned, hints: Mapping[sympy.Symbol, int] | None) -> None:
        self._target, self._tuner, self._hints = target, tuner, hints

    def __call__(
        self,
        program: Program,
        cluster: Cluster,
        kernel: Kernel,
        ways: Sequence[Alternative],
        allowed: Callable[[], bool] = lambda: True,
    ) -> Tuning:
        """Measure the alternatives of a cluster, where nothing is recorded and it is `allowed`.

        See `schedule.clusters.alternatives.Measure`.
        """
        part = alone(program, nodes_of(cluster, ways))
        if not _is_known(part):
            return weighed(kernel, ways, "sizes are not known")
        schedules = self._schedules(program, cluster, part, ways)
        key = self._key(schedules)
        kept = record.read(key, len(schedules))
        if kept is None and not allowed():
            return weighed(kernel, ways, "there was no time")
        if kept is None:
            kept = self._tried(part, kernel, ways, schedules)
            if not kept.reason:
                record.write(key, kept)
        return replace(kept, subject=kernel.name)

    def _schedules(
        self, program: Program, cluster: Cluster, part: Program, ways: Sequence[Alternative]
    ) -> list[Schedule]:
        """Return a schedule for each of the alternatives, the first of which is one kernel."""
        members = nodes_of(cluster, ways)
        apart = [self._apart(with_cuts(part, [moved(members, way)])) for way in ways[1:]]
        return [self._whole(program, cluster, part), *apart]

    def _key(self, schedules: Sequence[Schedule]) -> str:
        return self._tuner.key([self._text(schedule) for schedule in schedules])

    def _whole(self, program: Program, cluster: Cluster, part: Program) -> Schedule:
        (positioned,) = positions_in(part, program, [cluster])
        return plan(part, grow(part, self._target.capabilities, self._hints, [positioned]), Scheduling(self._target))

    def _apart(self, part: Program) -> Schedule:
        return plan(part, grow(part, self._target.capabilities, self._hints), Scheduling(self._target))

    def _text(self, schedule: Schedule) -> str:
        """Print a schedule for the key of its record; buffers are numbered, as names differ between layers."""
        order: dict[str, str] = {}
        lines = []
        for name in schedule.program.inputs:
            if isinstance(name, str):
                buffer = schedule.program.buffers[name]
                lines.append(f"{_numbered(BufferRef(name), order)} {buffer.dtype} {buffer.shape} {buffer.strides}")
        for step in schedule.steps:
            if isinstance(step, KernelCall):
                lines += self._tuner.sources(replace(step.kernel, origins=(), name="k"))
                lines.append(_numbered([BufferRef(name) for name in step.buffers], order))
            else:
                outs = [None if name is None else BufferRef(name) for name in step.outs]
                arguments = [*map(BufferRef, step.reads)] if isinstance(step, Chunked) else [step.args, step.kwargs]
                lines.append(f"{step.name} {_numbered([*arguments, outs], order)}")
        return "\n".join(lines)

    def _tried(
        self, part: Program, kernel: Kernel, ways: Sequence[Alternative], schedules: Sequence[Schedule]
    ) -> Tuning:
        """Run each schedule, check its results, and time it."""
        predicted = weighed(kernel, ways)
        trials = list(predicted.trials)
        try:
            inputs, results = self._expected(part)
        except (FusionError, torch.OutOfMemoryError) as error:
            return replace(predicted, reason=brief(error))
        right: dict[int, fx.GraphModule] = {}
        for number, schedule in enumerate(schedules):
            module_or_reason = self._checked(schedule, inputs, results)
            if isinstance(module_or_reason, str):
                trials[number] = replace(trials[number], refused=module_or_reason)
            else:
                right[number] = module_or_reason
        if not right:
            return replace(predicted, trials=tuple(trials), reason="no way gave the right numbers")
        calls = [partial(_run, module, inputs) for module in right.values()]
        for number, took in zip(right, medians(calls, self._tuner.device), strict=True):
            trials[number] = replace(trials[number], measured=took)
        return Tuning(kernel.name, tuple(trials), min(right, key=lambda number: trials[number].microseconds))

    def _expected(self, part: Program) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return inputs, and the evaluator's results on them."""
        buffers = [part.buffers[name] for name in part.inputs if isinstance(name, str)]
        for limit in limits(size for buffer in buffers for size in buffer.shape):
            layouts = [(buffer.shape, buffer.strides, buffer.dtype) for buffer in buffers]
            inputs = [drawn(*layout, self._tuner.device, limit) for layout in layouts]
            try:
                results = run_program(part, inputs)
            except (VerifyError, CheckFailed):  # an index out of bounds
                continue
            return inputs, [tensor for tensor in results if isinstance(tensor, torch.Tensor)]
        raise VerifyError("a product reads at positions of which nothing is known")

    def _checked(
        self, schedule: Schedule, inputs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]
    ) -> fx.GraphModule | str:
        """Return the module of a schedule, or why it is refused."""
        kernels = list(dict.fromkeys(call.kernel for call in schedule.launches()))
        try:
            built = {result.kernel: result for result, _ in self._tuner.build(kernels)}
            module = splice(schedule, built)
            results = _run(module, inputs)
            if self._tuner.device.type == "cuda":
                torch.cuda.synchronize(self._tuner.device)
        except Exception as error:  # whatever fails, this alternative does not run
            return f"it fails: {brief(error)}"
        for name, got, want in zip(schedule.program.outputs, results, wanted, strict=True):
            assert isinstance(name, BufferRef)
            refused = wrong_tensor(name.name, got, want)
            if refused is not None:
                return refused
        return module


def _is_known(part: Program) -> bool:
    """Return whether all sizes of a program are known."""
    touched = {name for node in part.nodes for name in (*reads(node), *writes(node))}
    return all(size.is_Integer for name in touched for size in part.buffers[name].shape)


def _run(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    results: tuple[torch.Tensor, ...] = module.forward(list(inputs))
    return results


def _numbered(arg: ExternArg, order: dict[str, str]) -> str:
    """Print an argument, with buffers as their numbers in `order`, to which new ones are added."""
    if isinstance(arg, BufferRef):
        return order.setdefault(arg.name, f"b{len(order)}")
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_numbered(part, order) for part in arg)}]"
    if isinstance(arg, Mapping):
        return f"{{{', '.join(f'{key}: {_numbered(part, order)}' for key, part in arg.items())}}}"
    return str(arg)
