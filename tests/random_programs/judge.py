"""Whether a program gives through the compiler what it gives in eager.

Numbers are judged by a run in float64: the error may be twice eager's own, and a little more.  Eager's own error is the
largest of a few runs, on inputs and incoming gradients that are off by some percent in each, so that it is not small by
chance.  How much a program makes of small errors is seen from a few further runs in float64 whose inputs are off by a
rounding of the shortest float in it: what they change counts as eager's error too, as do what a rounding of the means
of layer norms changes, and what the conversions do that the program asks for, where eager rounds again and happens to
undo it.  Whole numbers that differ between these runs are not compared, nor those that differ where each operation is
off by one.  Shapes, dtypes, strides, NaN, infinities, whole numbers, what is written to inputs, and who shares memory
with whom are eager's.  What PyTorch's own capture cannot run, or runs otherwise, is not held against the compiler.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._dynamo.utils import counters
from torch._functorch import config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusion import fuse, report
from lowering.errors import Unsupported
from tests.lowering.lowered import layout
from tests.random_programs.backwards import Backwards
from tests.random_programs.comparing import error, numbers, whole
from tests.random_programs.inputs import SHARED
from tests.random_programs.means import Means
from tests.random_programs.products import Products
from tests.random_programs.program import Program
from tests.random_programs.roundings import Roundings

SHIFT = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
OTHER = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
DECOMPOSED = "aot_eager_decomp_partition"
"""PyTorch's capture with composite operations, and the gradients of norms, taken apart by PyTorch itself."""

ROUNDED = 16
"""Runs in which every operation is off by a rounding, where a whole number or what is no number seems wrong."""


@dataclass
class Run:
    """What a call left behind: tensors by what they are, and which of them share memory, from which element on."""

    tensors: dict[str, Tensor | None]
    shared: dict[str, tuple[str, int]] = field(default_factory=dict)


@dataclass
class Verdict:
    """What became of a program.

    Attributes:
        status: "pass", "mismatch", "error", or "skipped" where PyTorch's capture fails, too, or gives other views,
            where eager takes the device down, or where a later call is left to eager, which is an error under `strict`.
        unsteady: results that could not be compared, or only in part.
        operations: nodes computed in generated kernels.
        externs: calls left as they are.
        breaks: whether Dynamo ran a part of it in Python.
    """

    status: str = "pass"
    reason: str = ""
    unsteady: int = 0
    operations: int = 0
    kernels: int = 0
    externs: list[str] = field(default_factory=list)
    breaks: bool = False


def run(function: Callable[..., object], given: Sequence[Tensor | int], backward: bool, shift: float = 0.0) -> Run:
    """Call with fresh arguments: results, what the arguments are afterwards, gradients for `cotangent`s."""
    results = function(*given)
    assert isinstance(results, tuple)
    arguments = [argument for argument in given if isinstance(argument, Tensor)]
    named: dict[str, Tensor | None] = {f"result {k}": result for k, result in enumerate(results)}
    named.update({f"input {k}": argument for k, argument in enumerate(arguments)})
    shared = dict(_shared(named))
    leaves = [argument for argument in arguments if argument.is_leaf and argument.requires_grad]
    ends = [result for result in results if result.requires_grad]
    if backward and leaves and ends:
        weights = [cotangent(end, shift) for end in ends]
        grads = torch.autograd.grad(ends, leaves, weights, allow_unused=True)
        named.update({f"gradient {k}": grad for k, grad in enumerate(grads)})
    return Run(
        {
            name: None if value is None else value.detach().clone() if name.startswith("input") else value.detach()
            for name, value in named.items()
        },
        shared,
    )


def _shared(named: dict[str, Tensor | None]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Each tensor that lies in the memory of an input or of an earlier result."""
    first: dict[int, str] = {}
    for name in sorted(named):  # inputs before results
        tensor = named[name]
        if tensor is None or not tensor.numel():
            continue
        memory = tensor.untyped_storage()._cdata
        if memory in first:
            other = named[first[memory]]
            assert other is not None
            yield name, (first[memory], int(tensor.storage_offset() - other.storage_offset()))
        else:
            first[memory] = name


def cotangent(end: Tensor, shift: float = 0.0) -> Tensor:
    """A fixed gradient of numbers between 0.5 and 1.5, off by up to `shift` of each."""
    steps = torch.arange(end.numel(), device=end.device, dtype=torch.float64)
    numbers = 0.5 + (steps * 0.6180339887498949) % 1.0
    return (numbers * (1 + shift * (2 * ((steps + 1) * 0.7548776662466927 % 1.0) - 1))).view(end.shape).to(end.dtype)


def judge(program: Program, device: str = "cpu", target: str | None = None, *, strict: bool = True) -> Verdict:
    """Run a program through `fuse` and say what became of it."""
    torch._dynamo.reset()
    counters.clear()
    verdict = Verdict()
    fused = fuse(program.function(), dynamic=program.dynamic, options={"strict": strict, "target": target})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in range(len(program.calls)):
            try:
                found = run(fused, program.arguments(call, device), program.backward)
                synchronize(device)
            except Unsupported as refusal:  # of this call: what fails to be compiled is raised by Dynamo
                other = judge(program, device, target, strict=False)
                return other if other.status != "pass" else Verdict("skipped", f"call {call}: {cause(refusal)}")
            except Exception as failure:
                status = "error" if is_lost(device) or _captured_rightly(program, call, device) else "skipped"
                verdict.status, verdict.reason = status, f"call {call}: {cause(failure)}"
                break
            try:
                differs, unsteady = difference(program, call, device, found)
            except RuntimeError as failure:
                if not is_lost(device):
                    raise
                reason = f"call {call}: eager takes the device down: {cause(failure)}"
                verdict.status, verdict.reason = "skipped", reason
                break
            verdict.unsteady += unsteady
            if differs:
                verdict.status, verdict.reason = "mismatch", f"call {call}: {differs}"
                break
    for entry in report(fused).graphs:
        verdict.operations += entry.operations
        verdict.kernels += len(entry.kernels)
        verdict.externs += [extern.name for extern in entry.externs]
    verdict.breaks = bool(counters["graph_break"])
    return verdict


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


def difference(program: Program, call: int, device: str, found: Run) -> tuple[str, int]:
    """How a run differs from eager's, empty if it does not; and how many of its tensors could not be compared well."""
    expected = run(program.function(), program.arguments(call, device), program.backward)
    layout = _layout(found, expected)
    if layout and not any(other and not _layout(found, other) for other in _captures(program, call, device)):
        return layout, 0
    used = {entry.dtype for entry in program.inputs}
    step = max(
        shift
        for dtype, shift in SHIFT.items()
        if dtype in used or str(dtype) in program.source or dtype is torch.float32
    )
    exact = [_exact(program, call, device, shift) for shift in (0.0, step, -step, 0.8 * step, -0.8 * step, 0.6 * step)]
    ways = (True, False) if any(entry.layout in SHARED for entry in program.inputs) else (False,)
    others = [_error_of(program, call, device, shift, apart=apart) for shift in OTHER for apart in ways]
    others.append(_change_by(program, call, device, step))
    more = [_exact(program, call, device, shift) for shift in (2 * step, -2 * step)]  # rounded more than once
    unsteady = 0
    for name, theirs in expected.tensors.items():
        ours = found.tensors.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape:  # of another shape in PyTorch's own capture
            continue
        wide = exact if theirs.is_floating_point() else [*exact, *more]
        truths = [truth for run_ in wide if run_ is not None and (truth := run_.tensors.get(name)) is not None]
        if theirs.is_floating_point():
            usual = max(other.get(name, 0.0) for other in others)
            wrong, vague = numbers(ours, theirs, truths, usual)
            if wrong:
                runs = (_captured(program, call, device, DECOMPOSED), _exact(program, call, device, 0.0, Backwards()))
                rounding = SHIFT[torch.float32]
                means = [_exact(program, call, device, 0.0, Means(off)) for off in (rounding, -rounding)]
                runs = (*runs, *means, _in_order(program, call, device))
                forms = [form for run_ in runs if run_ is not None and (form := run_.tensors.get(name)) is not None]
                changes = (_largest(means[0], exact[0]), _change_by_conversions(program, call, device))
                usual = max(usual, *(change.get(name, 0.0) for change in changes))
                wrong, vague = numbers(ours, theirs, truths, usual, forms)
            if wrong:  # times an infinity, a number is of its sign or NaN, and a rounding may decide which
                forms += _rounded(program, call, device, name, step)
                wrong, vague = numbers(ours, theirs, truths, usual, forms)
        else:
            wrong, vague = whole(ours, theirs, truths)
            if wrong:
                truths += _rounded(program, call, device, name, step)
                wrong, vague = whole(ours, theirs, truths)
        unsteady += vague
        if wrong and not _wrongly_captured(program, call, device, name, theirs, truths):
            return f"{name} of {theirs.dtype}{list(theirs.shape)} {wrong}", unsteady
    return "", unsteady


def _captures(program: Program, call: int, device: str) -> Iterator[Run | None]:
    """What PyTorch's own capture gives, and what its fake tensors say that it gives: where these err, so do we.

    Fake tensors say nothing where a size is unknown to them: asking for its number raises.
    """
    yield _captured(program, call, device)
    for sizes, real in ((None, False), (ShapeEnv(), False), (ShapeEnv(), True)):
        with suppress(Exception):
            faked = _faked(program, call, device, sizes, real=real)
            tensors = [tensor for tensor in faked.tensors.values() if tensor is not None]
            assert all(int(n) >= 0 for tensor in tensors for n in (*tensor.shape, *tensor.stride()))
            yield faked


def _faked(program: Program, call: int, device: str, sizes: ShapeEnv | None, *, real: bool) -> Run:
    """What fake tensors say; with `sizes`, those are symbols, for which PyTorch works out strides in another way.

    A size that only data say is a number where it is `real`: then all is computed beside the fakes, if it can be.
    """
    with config.patch(fake_tensor_propagate_real_tensors=real):
        mode, arguments = FakeTensorMode(shape_env=sizes), list[Tensor | int]()
    for k, tensor in enumerate(program.arguments(call, device)):
        if isinstance(tensor, int):
            arguments.append(tensor)
            continue
        symbols = None if sizes is None else StatelessSymbolicContext([DimDynamic.DUCK] * tensor.dim())
        arguments.append(mode.from_tensor(tensor, symbolic_context=symbols, source=ConstantSource(f"x{k}")))
    with mode:
        return run(program.function(), arguments, program.backward)


def _captured(program: Program, call: int, device: str, backend: str = "aot_eager") -> Run | None:
    """What PyTorch's own capture gives after the earlier calls, without the compiler; None where it fails."""
    torch._dynamo.reset()
    captured = torch.compile(program.function(), backend=backend, dynamic=program.dynamic)
    try:
        return [run(captured, program.arguments(k, device), program.backward) for k in range(call + 1)][-1]
    except Exception:
        return None


def _captured_rightly(program: Program, call: int, device: str) -> bool:
    """Does PyTorch's own capture, without the compiler, run, and give tensors as eager gives them?"""
    captured = _captured(program, call, device)
    if captured is None:
        return False
    return not _layout(captured, run(program.function(), program.arguments(call, device), program.backward))


def _wrongly_captured(
    program: Program, call: int, device: str, name: str, theirs: Tensor, truths: Sequence[Tensor]
) -> bool:
    """Does PyTorch's own capture, without the compiler, give another result than eager, too?"""
    captured = _captured(program, call, device)
    other = None if captured is None else captured.tensors.get(name)
    if other is None:
        return False
    wrong, _ = numbers(other, theirs, truths, 0.0) if theirs.is_floating_point() else whole(other, theirs, truths)
    return bool(wrong)


def _exact(
    program: Program,
    call: int,
    device: str,
    shift: float,
    mode: AbstractContextManager[object] | None = None,
    *,
    apart: bool = False,
    rounded: bool | None = None,
) -> Run | None:
    """Eager in float64, where it can be had, on inputs that are off by up to `shift`, in a `mode` that changes it.

    Unless `rounded` is None, casts give copies, which are `rounded` or not.
    """
    other = shift if shift in OTHER else 0.0
    torch.set_default_dtype(torch.float64)
    try:
        # autograd may miss what was overwritten where a cast is none any more
        for copies in (False, True) if rounded is None else (True,):
            with suppress(RuntimeError):
                function = program.function(wide=True, copies=copies, rounded=bool(rounded))
                arguments = program.arguments(call, device, wide=True, shift=shift, apart=apart)
                with mode or nullcontext():
                    return run(function, arguments, program.backward, other)
    finally:
        torch.set_default_dtype(torch.float32)
    return None


def _rounded(program: Program, call: int, device: str, name: str, step: float) -> list[Tensor]:
    """A tensor in float64 where every operation is off by up to a rounding or two, as often as that can be had."""
    runs = (_exact(program, call, device, 0.0, Roundings((1 + k % 2) * step, k)) for k in range(ROUNDED))
    return [tensor for run_ in runs if run_ is not None and (tensor := run_.tensors.get(name)) is not None]


def _in_order(program: Program, call: int, device: str) -> Run | None:
    """Eager with products made from number to number, where that runs: what leaves the range on the way differs."""
    with suppress(RuntimeError), Products():
        return run(program.function(), program.arguments(call, device), program.backward)
    return None


def _error_of(program: Program, call: int, device: str, shift: float, *, apart: bool) -> dict[str, float]:
    """Eager's largest error in each float tensor, on inputs that are off by up to `shift`.

    Rows that share their memory are rounded alike, and their sum is off by as many times as there are rows; where they
    are `apart`, roundings that are zero by chance are not zero in all of them.  Both are what eager's error may be.
    """
    try:
        own = run(
            program.function(), program.arguments(call, device, shift=shift, apart=apart), program.backward, shift
        )
    except RuntimeError:
        return {}
    return _largest(own, _exact(program, call, device, shift, apart=apart))


def _change_by(program: Program, call: int, device: str, step: float) -> dict[str, float]:
    """By how much each float tensor changes where elements that share a place in memory are off by different roundings.

    Sums of equal numbers may be exact in eager's order, and in no other; there each addition rounds in the same
    direction, so more than one rounding is asked for.
    """
    if not any(entry.layout in SHARED for entry in program.inputs):
        return {}
    return _largest(*(_exact(program, call, device, shift, apart=True) for shift in (2 * step, 0.0)))


def _change_by_conversions(program: Program, call: int, device: str) -> dict[str, float]:
    """By how much each float tensor changes where only the conversions that the program asks for round.

    What follows in a short float is not rounded by the compiler; where eager does, it may round back what they changed.
    """
    return _largest(*(_exact(program, call, device, 0.0, rounded=rounded) for rounded in (True, False)))


def _largest(one: Run | None, exact: Run | None) -> dict[str, float]:
    """The largest difference of two runs in each float tensor."""
    found: dict[str, float] = {}
    for name, tensor in ({} if one is None or exact is None else one.tensors).items():
        truth = exact.tensors.get(name)
        if tensor is not None and truth is not None and tensor.shape == truth.shape and tensor.is_floating_point():
            errors = error(tensor.double(), truth.double())
            found[name] = float(errors.max()) if errors.numel() else 0.0
    return found


def _layout(found: Run, expected: Run) -> str:
    if found.tensors.keys() != expected.tensors.keys():
        return f"gives {sorted(found.tensors)}, eager {sorted(expected.tensors)}"
    for name, theirs in expected.tensors.items():
        ours = found.tensors[name]
        if ours is None or theirs is None:
            if ours is not theirs and not (ours is not None and not ours.any()):
                return f"{name} is {'missing' if ours is None else 'too many'}"
            continue
        if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
            return f"{name} is {ours.dtype}{list(ours.shape)}, eager's {theirs.dtype}{list(theirs.shape)}"
        if name.startswith("result") and layout(ours) != layout(theirs):
            return f"{name} of shape {list(ours.shape)} has strides {ours.stride()}, eager's {theirs.stride()}"
    if found.shared != expected.shared:
        return f"shares memory as {found.shared}, eager as {expected.shared}"
    return ""
