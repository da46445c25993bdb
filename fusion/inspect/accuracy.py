"""Measures how far the results of each kernel launch are from exact arithmetic on the same inputs.

Input: launches as they happen; output: an error for each written tensor.  The reference evaluator runs the same kernel
twice on copies of its tensors: in float64, as the exact result, and in the kernel's own dtypes with the kernel's
roundings, as the expected error.  An error many times the expected one is the kernel's; a similar one comes from the
precision of the program (`options={"numerics": "strict"}` rounds as eager does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fusion.inspect.watch import Watch
from fusion.lowering.errors import by_place
from fusion.lowering.interpret import run_kernel
from fusion.lowering.interpret.calls import as_double
from fusion.lowering.interpret.evaluate import flat_view
from fusion.lowering.ir.kernel import Fold, Kernel, only_stored, statements
from fusion.lowering.ir.program import Extern
from fusion.schedule.kernels import KernelCall

UNWRITTEN = -1.2345e300
"""Marks elements of float64 results that the kernel does not store."""
_EXPLAINED = 8.0
"""How many times the error of the evaluator, in the dtypes of the kernel, the kernel's may be."""
_ROUNDINGS = 4.0
"""Allowed error without folds, in units in the last place."""
_SUMS, _TF32 = 1e-5, 2e-3
"""Allowed error of folds, which targets compute in other orders, and of products whose operands are rounded to TF32."""
_SHARE = 1e-4
"""Allowed share of wrong integers and booleans: rounded numbers may compare differently."""


@dataclass(frozen=True, slots=True)
class LaunchError:
    """Holds the error of one tensor that one launch wrote.

    Attributes:
        kernel: the name of the kernel.
        tensor: the name of the kernel's parameter.
        origins: the operations that the launch computes, with the lines of the program (`errors.by_place`).
        error: relative error against float64, by norms: |written - exact| / |exact|.  Of integers and booleans, the
            share of wrong elements.  Infinite where NaN or an infinity is at another place.
        rounding: the same error of the evaluator, which computes in the kernel's dtypes: the part due to rounding.
        largest: the largest absolute error of one element.
        is_right: whether rounding and the order of sums explain the error; else the kernel is wrong.
    """

    kernel: str
    tensor: str
    origins: tuple[str, ...]
    error: float
    rounding: float
    largest: float
    is_right: bool = True

    def __str__(self) -> str:
        wrong = "" if self.is_right else "WRONG: "
        head = f"{wrong}kernel {self.kernel}, {self.tensor}: error {self.error:.1e}, by its dtypes {self.rounding:.1e}"
        return "\n".join([f"{head}; at most {self.largest:.1e}", *(f"    {origin}" for origin in self.origins)])


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Holds the errors of the launches of one call, an entry for each tensor that was written.

    Attributes:
        launches: in the order in which they ran.
    """

    launches: tuple[LaunchError, ...]

    @property
    def worst(self) -> tuple[LaunchError, ...]:
        """The launches, sorted by the ratio of the error to the error that rounding explains, the largest first."""
        return tuple(sorted(self.launches, key=_beyond, reverse=True))

    def __str__(self) -> str:
        return "\n".join(map(str, self.worst)) or "no kernel was launched"


def _beyond(launch: LaunchError) -> tuple[float, float]:
    if math.isinf(launch.rounding):  # the dtypes do not hold the numbers
        return 0.0, launch.error
    return launch.error / max(launch.rounding, 1e-9), launch.error


def watching(tell: Callable[[LaunchError], object]) -> Watch:
    """Return a `Watch` that compares each launch with the evaluator, and calls `tell` for every written tensor."""
    return _Comparing(tell)


@dataclass(frozen=True)
class _Comparing(Watch):
    tell: Callable[[LaunchError], object]

    def __call__(self, step: KernelCall | Extern, run: Callable[..., object]) -> Callable[..., object]:
        if not isinstance(step, KernelCall):
            return run

        def launched(*args: object) -> None:
            for error in compared(step, run, args):
                self.tell(error)

        return launched


def compared(call: KernelCall, launch: Callable[..., object], args: Sequence[object]) -> Iterator[LaunchError]:
    """Launch, and compare the results with the evaluator's on the same inputs."""
    kernel, origins = call.kernel, by_place(call.origins)
    count = len(kernel.params)
    tensors, sizes = cast("Sequence[torch.Tensor]", args[:count]), cast("Sequence[int]", args[count:])
    rounded = [copied(tensor, tensor.dtype) for tensor in tensors]
    exact = [copied(tensor, torch.float64 if tensor.is_floating_point() else tensor.dtype) for tensor in tensors]
    contents_unused = only_stored(kernel)
    for param, tensor in zip(kernel.params, exact, strict=True):
        if param.name in contents_unused and tensor.is_floating_point():
            flat_view(tensor).fill_(UNWRITTEN)
    launch(*args)
    run_kernel(kernel, rounded, sizes)
    run_kernel(kernel, exact, sizes, exact=False)
    for param, ours, same, theirs in zip(kernel.params, tensors, rounded, exact, strict=True):
        if param.written and ours.numel():
            held = theirs != UNWRITTEN
            if not held.all():
                ours, same, theirs = ours[held], same[held], theirs[held]
            is_right, error, rounding, largest = judged(ours, same, theirs, floor_of(kernel, ours.dtype))
            yield LaunchError(kernel.name, param.name, origins, error, rounding, largest, is_right)


def copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy with the same strides, also with gaps or overlapping elements."""
    memory = flat_view(tensor).to(dtype, copy=True)
    return memory.as_strided(tensor.shape, tensor.stride())


def distance(computed: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return the error relative to the norm of `exact`, and that of the worst element; infinite where NaN or an
    infinity is at another place.  Of integers and booleans it is the share of wrong elements.
    """
    if not exact.is_floating_point():
        wrong = (computed != exact).double()
        return (wrong.mean().item(), wrong.max().item()) if wrong.numel() else (0.0, 0.0)
    computed = computed.double()
    error = computed - exact
    if math.isfinite(whole := error.norm().item()):  # so no number of either is infinite or NaN
        norm = exact.norm().item()
        return whole / norm if norm else whole, error.abs_().max().item() if error.numel() else 0.0
    finite = torch.isfinite(exact)
    same = (computed == exact).logical_or_(computed.isnan().logical_and_(exact.isnan()))
    outside = ~finite
    whole = error.masked_fill_(outside, 0.0).norm().item()
    if not same.logical_or_(finite).all() or not math.isfinite(whole):
        return math.inf, math.inf
    norm = exact.masked_fill(outside, 0.0).norm().item()
    return whole / norm if norm else whole, error.abs_().max().item()


def floor_of(kernel: Kernel, dtype: torch.dtype) -> float:
    """Return the error of a result of a kernel that is allowed whatever rounding explains."""
    if not dtype.is_floating_point:
        return _SHARE
    folds = [stmt for part in kernel.launched for stmt in statements(part.body) if isinstance(stmt, Fold)]
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32" and any(fold.op == "dot" for fold in folds)
    return max(_ROUNDINGS * torch.finfo(dtype).eps, _TF32 if tf32 else _SUMS if folds else 0.0)


def is_close(
    ours: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor, floor: float | None = None
) -> tuple[bool, float, float]:
    """Return whether `ours` may be right, its error and `rounded`'s against `exact`.

    Args:
        rounded: the results of the same operations in the same dtypes.
        exact: the results in float64.
        floor: the error that is always allowed; by default, the error of sums in another order.
    """
    if floor is None:
        floor = max(_ROUNDINGS * torch.finfo(ours.dtype).eps, _SUMS) if ours.is_floating_point() else _SHARE
    return judged(ours, rounded, exact, floor)[:3]


def judged(
    ours: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor, floor: float
) -> tuple[bool, float, float, float]:
    """Return the same as `is_close`, and the error of the worst element."""
    (error, largest), explained = distance(ours, exact), distance(rounded, exact)[0]
    near = error <= max(_EXPLAINED * explained if math.isfinite(explained) else 0.0, floor)
    # Where the dtypes cannot represent the numbers, the result has to agree with the reference in the same dtypes.
    return near or distance(ours, as_double(rounded))[0] <= floor, error, explained, largest
