"""Judges whether a compiled program agrees with eager.

Numbers are judged by a run in float64: the error may be twice eager's own, and a little more; `eager.py` computes both.
Integers that differ between runs whose roundings differ are not compared.  Shapes, dtypes, strides, NaN, infinities,
integers, writes to inputs, and shared memory must agree with eager.

Programs that PyTorch's own capture cannot run, or runs differently, do not count against the compiler (`captured.py`):
a program is skipped if both fail, and a result that differs from eager's is excused if the capture's is the same.  The
verdict names each.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fusion import fuse, report
from fusion.lowering.errors import Unsupported
from tests.random_programs.captured import Captured
from tests.random_programs.comparing import Allowed, compared, first
from tests.random_programs.eager import Eager, RefusedError
from tests.random_programs.program import Function, Program
from tests.random_programs.runs import Call, Run, unlike


@dataclass
class Verdict:
    """The verdict on a program.

    Attributes:
        status: "pass", "mismatch", "error", or "skipped" where PyTorch's capture fails, too, or gives other views,
            where eager takes the device down or refuses a call, or where a later call is left to eager, which is an
            error under `strict`.
        unsteady: results that could not be compared, or only in part.
        excused: differences from eager's results that PyTorch's capture has, too.
        operations: nodes computed in generated kernels.
        externs: calls left as they are.
        breaks: whether Dynamo ran a part of it in Python.
    """

    status: str = "pass"
    reason: str = ""
    unsteady: int = 0
    excused: list[str] = field(default_factory=list)
    operations: int = 0
    kernels: int = 0
    externs: list[str] = field(default_factory=list)
    breaks: bool = False


@dataclass
class Difference:
    """How a run differs from eager's: `wrong` describes it, empty if it agrees; the rest as in `Verdict`."""

    wrong: str = ""
    unsteady: int = 0
    excused: list[str] = field(default_factory=list)


def judge(program: Program, device: str = "cpu", target: str | None = None, *, strict: bool = True) -> Verdict:
    """Run a program through `fuse` and return the verdict."""
    torch._dynamo.reset()
    counters.clear()
    function, base = program.function(), {"strict": strict, "target": target}
    fused = [fuse(function, dynamic=program.dynamic, options={**base, **each}) for each in program.options]
    calls = [Call(program, number, device) for number in range(len(program.calls))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result, failure = _called(fused, calls)  # all of them, before the capture makes Dynamo forget the first
        verdict = _counted(fused)
        if failure is not None and is_lost(device):
            return replace(verdict, status="error", reason=f"call {len(result)}: {cause(failure)}")
        for call, run in zip(calls, result, strict=False):
            _compare(verdict, call, run)
            if verdict.status != "pass":
                return verdict
        if failure is None:
            return verdict
        verdict.reason = f"call {len(result)}: {cause(failure)}"
        refused = strict and isinstance(failure, Unsupported)  # Dynamo raises the failures of compilation
        if not refused and is_captured_rightly(calls[len(result)]):
            return replace(verdict, status="error")
        if not strict:
            return replace(verdict, status="skipped")
        eager = judge(program, device, target, strict=False)  # the fallback of such a call
        return eager if eager.status != "pass" else replace(eager, status="skipped", reason=verdict.reason)


def _called(fused: Sequence[Function], calls: Sequence[Call]) -> tuple[list[Run], Exception | None]:
    """Return the runs of the calls, by the functions in turn, and the exception of the call after the last of these."""
    results: list[Run] = []
    try:
        for call in calls:
            run = call.run(fused[call.number % len(fused)])
            synchronize(call.device)
            results.append(run)
    except Exception as failure:
        return results, failure
    return results, None


def _counted(fused: Sequence[Function]) -> Verdict:
    """Return the initial verdict on a program, without any mismatch."""
    verdict = Verdict(breaks=bool(counters["graph_break"]))
    for entry in (graph for each in fused for graph in report(each).graphs):
        verdict.operations += entry.operations
        verdict.kernels += len(entry.kernels)
        verdict.externs += [extern.name for extern in entry.externs]
    return verdict


def _compare(verdict: Verdict, call: Call, result: Run) -> None:
    """Add the comparison of one call to a verdict."""
    try:
        difference = compare(call, result)
    except (RuntimeError, RefusedError) as failure:
        lost = is_lost(call.device)
        if not lost and isinstance(failure, RuntimeError):
            raise
        does = "takes the device down" if lost else "refuses it"
        verdict.status, verdict.reason = "skipped", f"call {call.number}: eager {does}: {cause(failure)}"
        return
    verdict.unsteady += difference.unsteady
    verdict.excused += [f"call {call.number}: {excused}" for excused in difference.excused]
    if difference.wrong:
        verdict.status, verdict.reason = "mismatch", f"call {call.number}: {difference.wrong}"


def compare(call: Call, result: Run) -> Difference:
    """Compare the results and effects of a call with eager's."""
    eager, captured, said = Eager(call), Captured(call), Difference()
    if differences := unlike(result, eager.run):
        where = captured.formed_as(result)
        if not where:
            return Difference(differences[0])
        said.excused += [f"{difference}, as {where}" for difference in differences]
    for name, theirs in eager.run.tensors.items():
        ours = result.tensors.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            continue
        wrong, vague, allowed = _wrong(name, ours, eager)
        said.unsteady += vague
        if wrong.any():
            sentence = f"{name} of {theirs.dtype}{list(theirs.shape)} {first(ours, theirs, wrong)}"
            if not captured.as_wrong(name, ours, theirs, wrong, allowed):
                said.wrong = sentence
                break
            said.excused.append(f"{sentence}, as in PyTorch's capture")
    return said


def _wrong(name: str, ours: Tensor, eager: Eager) -> tuple[Tensor, bool, Allowed]:
    """Which elements are wrong, whether some could not be compared well, and by which allowances."""
    theirs = eager.run.tensors[name]
    assert theirs is not None
    for allowed in eager.allowances(name):
        wrong, vague = compared(ours, theirs, allowed)
        if not wrong.any():
            break
    return wrong, vague, allowed


def is_captured_rightly(call: Call) -> bool:
    """Does PyTorch's own capture, without the compiler, run, and agree with eager?"""
    captured = Captured(call).run
    with suppress(RefusedError):
        return captured is not None and not unlike(captured, Eager(call).run)
    return False


def synchronize(device: str) -> None:
    """Wait for the device, so that a later failure is not attributed to earlier launches."""
    if device == "cuda":
        torch.cuda.synchronize()


def is_lost(device: str) -> bool:
    """Has something failed on the device?  Then each later call fails, until the process ends."""
    try:
        synchronize(device)
    except RuntimeError:
        return True
    return False


def cause(failure: BaseException) -> str:
    """The innermost failure, with the place it was raised at."""
    seen = [failure]
    while inner := failure.__cause__ or getattr(failure, "inner_exception", None):  # Dynamo's own
        if inner in seen:
            break
        failure = inner
        seen.append(inner)
    trace = failure.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = "" if trace is None else f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}{place}"
