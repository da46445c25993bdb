"""Whether a program gives through the compiler what it gives in eager.

Numbers are judged by a run in float64: the error may be twice eager's own, and a little more; `eager.py` says how both
are had.  Whole numbers that differ between runs that roundings set apart are not compared.  Shapes, dtypes, strides,
NaN, infinities, whole numbers, what is written to inputs, and who shares memory with whom are eager's.

What PyTorch's own capture cannot run, or runs otherwise, is not held against the compiler (`captured.py`): a program is
skipped where both fail, and a result that is not eager's is excused where it is the capture's.  The verdict names each.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from fusion import fuse, report
from lowering.errors import Unsupported
from tests.random_programs.captured import Captured
from tests.random_programs.comparing import Allowed, compared, first
from tests.random_programs.eager import Eager
from tests.random_programs.program import Program
from tests.random_programs.runs import Call, Run, unlike


@dataclass
class Verdict:
    """What became of a program.

    Attributes:
        status: "pass", "mismatch", "error", or "skipped" where PyTorch's capture fails, too, or gives other views,
            where eager takes the device down, or where a later call is left to eager, which is an error under `strict`.
        unsteady: results that could not be compared, or only in part.
        excused: how results differ from eager's that PyTorch's capture gives alike.
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
    """How a run differs from eager's: what is `wrong`, empty if nothing is; the rest as in `Verdict`."""

    wrong: str = ""
    unsteady: int = 0
    excused: list[str] = field(default_factory=list)


def judge(program: Program, device: str = "cpu", target: str | None = None, *, strict: bool = True) -> Verdict:
    """Run a program through `fuse` and say what became of it."""
    torch._dynamo.reset()
    counters.clear()
    verdict = Verdict()
    fused = fuse(program.function(), dynamic=program.dynamic, options={"strict": strict, "target": target})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in [Call(program, number, device) for number in range(len(program.calls))]:
            try:
                found = call.run(fused)
                synchronize(device)
            except Unsupported as refusal:  # of this call: what fails to be compiled is raised by Dynamo
                other = judge(program, device, target, strict=False)
                return other if other.status != "pass" else Verdict("skipped", f"call {call.number}: {cause(refusal)}")
            except Exception as failure:
                verdict.status = "error" if is_lost(device) or is_captured_rightly(call) else "skipped"
                verdict.reason = f"call {call.number}: {cause(failure)}"
                break
            try:
                difference = compare(call, found)
            except RuntimeError as failure:
                if not is_lost(device):
                    raise
                reason = f"call {call.number}: eager takes the device down: {cause(failure)}"
                verdict.status, verdict.reason = "skipped", reason
                break
            verdict.unsteady += difference.unsteady
            verdict.excused += [f"call {call.number}: {excused}" for excused in difference.excused]
            if difference.wrong:
                verdict.status, verdict.reason = "mismatch", f"call {call.number}: {difference.wrong}"
                break
    for entry in report(fused).graphs:
        verdict.operations += entry.operations
        verdict.kernels += len(entry.kernels)
        verdict.externs += [extern.name for extern in entry.externs]
    verdict.breaks = bool(counters["graph_break"])
    return verdict


def compare(call: Call, found: Run) -> Difference:
    """How what a call left behind differs from what it leaves in eager."""
    eager, captured, said = Eager(call), Captured(call), Difference()
    if differences := unlike(found, eager.run):
        where = captured.formed_as(found)
        if not where:
            return Difference(differences[0])
        said.excused += [f"{difference}, as {where}" for difference in differences]
    for name, theirs in eager.run.tensors.items():
        ours = found.tensors.get(name)
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
    """Does PyTorch's own capture, without the compiler, run, and give tensors as eager gives them?"""
    captured = Captured(call).run
    return captured is not None and not unlike(captured, Eager(call).run)


def synchronize(device: str) -> None:
    """Wait for the device, so that what fails later is not what was launched before."""
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
