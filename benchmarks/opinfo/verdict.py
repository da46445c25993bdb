"""Judges one (operation, dtype): right or not, and by whose kernels.

A result is right if it is within the tolerance of PyTorch's own tests (`tolerances.py`), against eager or against eager
in float64, or if its error against float64 is no more than twice eager's (`errors.py`); shapes, dtypes and strides are
eager's, and NaNs are where eager's or float64's are.  Of random results only shape, dtype and strides are compared.  If
elements are equal, the position of either may be returned (`topk`), as PyTorch documents.  Calls that AOTAutograd alone
cannot run, or runs differently from eager, are not counted.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import SampleInput

from benchmarks.opinfo.calls import Call, Run, aot_eager, compiled, cotangent, run
from benchmarks.opinfo.errors import Errors, distance
from benchmarks.opinfo.pairs import Pair, samples
from benchmarks.opinfo.tolerances import tolerance

UNINITIALISED = ("empty",)
"""Operations with this in their name return uninitialised memory."""

MOST_FREQUENT = ("mode",)
"""Operations that return any of the most frequent elements: the smallest one on a CPU, but not on a GPU."""


@dataclass
class Verdict:
    """The verdict on one (operation, dtype).

    Attributes:
        status: "pass", "mismatch", "error" or "skipped".
        reason: why it is not a pass, with the sample.
        samples: the number of samples run.
        random: only shapes, dtypes and strides were compared.
        externs: operation left to the library → why.
        kernels: generated kernels launched.
    """

    op: str
    dtype: str
    status: str = "pass"
    reason: str = ""
    samples: int = 0
    random: bool = False
    kernels: int = 0
    externs: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def native(self) -> bool:
        """Whether everything runs in generated kernels."""
        return self.status == "pass" and not self.externs


def judge(pair: Pair, device: str, *, count: int = 3, backward: bool = True, target: str | None = None) -> Verdict:
    """Run the samples of a pair and return the verdict; the first failure decides, mismatches before errors."""
    verdict, start = Verdict(pair.name, pair.dtype), time.perf_counter()
    backward = backward and pair.differentiable(device)
    try:
        chosen = samples(pair, device, count, backward)
    except Exception as failure:
        chosen, verdict.reason = [], f"no samples: {_first_line(failure)}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for position, sample in enumerate(chosen):
            torch._dynamo.reset()
            _one(verdict, pair, sample, position, backward, target)
    if not verdict.samples and verdict.status == "pass":
        verdict.status = "skipped"
    verdict.seconds = round(time.perf_counter() - start, 2)
    return verdict


def _one(verdict: Verdict, pair: Pair, sample: SampleInput, position: int, backward: bool, target: str | None) -> None:
    call = Call(pair.op, sample)
    try:
        expected = run(call, call.tensors, backward)
        captured, random = aot_eager(call, backward)
    except Exception as failure:
        verdict.reason = verdict.reason or f"without the compiler: {_first_line(failure)}"
        return
    if not expected.outputs:
        verdict.reason = verdict.reason or "no tensor comes out"
        return
    random |= any(word in pair.op.name for word in UNINITIALISED)
    if not random and _difference(captured, expected, pair.name, None):
        verdict.reason = verdict.reason or "without the compiler: the results differ"
        return
    verdict.random |= random
    verdict.samples += 1
    try:
        result = compiled(call, backward, target)
    except Exception as failure:
        if verdict.status == "pass":
            verdict.status, verdict.reason = "error", f"sample {position}: {_cause(failure)}"
        return
    for report in result.reports:
        verdict.kernels += len(report.kernels)
        # A call without a reason is inserted by the compiler: it draws a seed, or allocates memory.
        verdict.externs.update({extern.name: extern.reason for extern in report.externs if extern.reason})
    differs = _layout(result, captured) and _layout(result, expected)  # either will do: the capture's may be wrong
    if not differs and not random:
        chosen = _by_eagers_choice(result, expected, call)
        differs = _difference(chosen, expected, pair.name, Errors(pair, sample, backward, expected))
    if differs and verdict.status != "mismatch":
        verdict.status, verdict.reason = "mismatch", f"sample {position} {_shapes(call)}: {differs}"


def _by_eagers_choice(result: Run, expected: Run, call: Call) -> Run:
    """Replace positions by eager's if the elements there are equal: of values and positions, the second.

    The same holds for gradients at these positions, and for elements that are as frequent as eager's.
    """
    if not call.returns_positions or len(result.outputs) != 2:
        return result
    (values, ours), (eager_values, theirs) = result.outputs, expected.outputs
    source = call.tensors[0].detach()
    for dim in range(source.ndim):
        named = [_named_by(source, dim, positions) for positions in (ours, theirs)]
        right = all(
            at is not None and torch.equal(at, built) for at, built in zip(named, (values, eager_values), strict=True)
        )
        if right and (torch.equal(values, eager_values) or _as_frequent(call, source, dim, values, eager_values)):
            rows = (ours if ours.ndim == source.ndim else ours.unsqueeze(dim)).sort(dim).values
            if (rows.diff(dim=dim) != 0).all():  # none is named twice
                return replace(
                    result, outputs=[eager_values, theirs], grads=_chosen(result, expected, source, dim, ours)
                )
    return result


def _as_frequent(call: Call, source: Tensor, dim: int, values: Tensor, eager_values: Tensor) -> bool:
    """Return whether the operation returns most frequent elements along `dim`, and both results are as frequent."""
    if call.op.name not in MOST_FREQUENT or values.shape != eager_values.shape:
        return False
    lots = (
        positions if positions.ndim == source.ndim else positions.unsqueeze(dim) for positions in (values, eager_values)
    )
    first, second = ((source == lot).sum(dim) for lot in lots)
    return torch.equal(first, second)


def _chosen(result: Run, expected: Run, source: Tensor, dim: int, ours: Tensor) -> list[Tensor | None]:
    """Return eager's gradients if the actual ones go to elements of `source` along `dim` at the actual positions."""
    at, along = ours, cotangent(result.outputs[0])
    if ours.ndim < source.ndim:
        at, along = at.unsqueeze(dim), along.unsqueeze(dim)
    there = torch.zeros_like(source).scatter_add(dim, at, along)
    same = len(result.grads) == 1 and result.grads[0] is not None and torch.equal(result.grads[0], there)
    return expected.grads if same else result.grads


def _named_by(source: Tensor, dim: int, positions: Tensor) -> Tensor | None:
    """Return the elements of `source` at positions along `dim`; None if the positions do not fit."""
    reduced = positions.ndim < source.ndim
    index = positions.unsqueeze(dim) if reduced else positions
    fits = index.ndim == source.ndim and all(
        d == dim or a == b for d, (a, b) in enumerate(zip(index.shape, source.shape, strict=True))
    )
    if not fits or not ((index >= 0) & (index < source.shape[dim])).all():
        return None
    at = source.gather(dim, index)
    return at.squeeze(dim) if reduced else at


def _layout(result: Run, expected: Run) -> str:
    """Return how shapes, dtypes and strides differ; empty if they do not.  Strides are compared for results alone."""
    named = [*_named("result", result.outputs, expected.outputs), *_named("gradient", result.grads, expected.grads)]
    for name, ours, theirs in named:
        if (ours is None) != (theirs is None):
            return f"{name} is {'missing' if ours is None else 'too many'}"
        if ours is None or theirs is None:
            continue
        if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
            return f"{name} is {ours.dtype}{list(ours.shape)}, eager's {theirs.dtype}{list(theirs.shape)}"
        if name.startswith("result") and _relevant_strides(ours) != _relevant_strides(theirs):
            return f"{name} of shape {list(ours.shape)} has strides {ours.stride()}, eager's {theirs.stride()}"
    return ""


def _relevant_strides(tensor: Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and tensor.numel() > 0]


def _named(
    kind: str, ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]
) -> list[tuple[str, Tensor | None, Tensor | None]]:
    if len(ours) != len(theirs):
        return [(f"one {kind} of {len(theirs)}", None, torch.empty(()))]
    return [(f"{kind} {k}", a, b) for k, (a, b) in enumerate(zip(ours, theirs, strict=True))]


def _difference(result: Run, expected: Run, operation: str, errors: Errors | None) -> str:
    """Return how numbers differ, in the first tensor in which they do; empty if they do not."""
    pairs = [*_named("result", result.outputs, expected.outputs), *_named("gradient", result.grads, expected.grads)]
    off = [k for k, (_, a, b) in enumerate(pairs) if a is not None and b is not None and not _close(a, b, operation)]
    if not off:
        return ""
    for k in off:
        name, ours, theirs = pairs[k]
        assert ours is not None and theirs is not None
        if errors is None or not _no_worse(ours, theirs, k, operation, errors):
            return f"{name} of {theirs.dtype}{list(theirs.shape)} is off by {_worst(ours, theirs)}"
    return ""


def _close(ours: Tensor, theirs: Tensor, operation: str) -> bool:
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return False
    relative, absolute = tolerance(operation, theirs.dtype, theirs.device.type)
    return torch.allclose(ours, theirs, rtol=relative, atol=absolute, equal_nan=True)


def _no_worse(ours: Tensor, theirs: Tensor, k: int, operation: str, errors: Errors) -> bool:
    """Return whether the error against float64 is within tolerance, or no more than twice eager's largest."""
    truth = errors.truth(k)
    if truth is None or ours.shape != truth.shape or not ours.is_floating_point():
        return False
    nan = ours.isnan()
    if not ((nan == theirs.isnan()) | (nan == truth.isnan())).all():
        return False
    relative, absolute = tolerance(operation, ours.dtype, ours.device.type)
    error = distance(ours, truth)
    finite = torch.where(truth.isfinite(), truth, 0.0).abs()
    return any(bool((error <= absolute + relative * finite + 2 * own).all()) for own in errors.of_eager(k))


def _worst(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape or ours.dtype is not theirs.dtype:
        return f"its form: {ours.dtype}{list(ours.shape)}"
    a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64).flatten() for t in (ours, theirs))
    gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    at = int(gap.nan_to_num(nan=torch.inf).argmax())
    return f"{gap[at].item():.3g} (is {a[at].item():.7g}, eager {b[at].item():.7g})"


def _shapes(call: Call) -> str:
    return ", ".join(f"{list(t.shape)}" for t in call.tensors)


def _cause(failure: Exception) -> str:
    """Return the innermost failure."""
    cause: BaseException = failure
    while cause.__cause__ not in (None, cause):
        assert cause.__cause__ is not None
        cause = cause.__cause__
    return f"{type(cause).__name__}: {' '.join(str(cause).split())[:400]}"


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0][:300]
