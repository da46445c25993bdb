"""Checks data-dependent indices against their bounds, and integer divisors against 0.

`checked(index, wrap, last, dim)` is the scalar operation: its value is `index`, plus `wrap` where that is negative.
The launch fails if an evaluated index is outside `[0, last]`, even if its result is discarded.  Input: indices as a
tensor holds them; output: an expression.  A check is placed where eager checks, not at the load:
indices derived from a checked index need no check.  A value that is not computed is not checked, except in
results that are not read (`unused.py`).

A requirement on other data (`lowering/ir/requirements.py`), such as a divisor that may not be zero, is checked as an
index along no dimension.  The operand `dim` is a number that also stands for eager's message
(`lowering/ir/error_messages.py`).

A target that can report a failure to the host reports only that some check failed; `failure` finds the check, by
evaluating all checks of the kernel over its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import sympy
import torch

from fusion.lowering.errors import CheckFailed, DataRefused, EitherOutOfRange, VerifyError
from fusion.lowering.indexing import ZERO, within
from fusion.lowering.interpret.evaluate import (
    Scope,
    boxes,
    evaluate,
    flat_view,
    pieces,
    points_of,
)
from fusion.lowering.interpret.kernels import run_kernel
from fusion.lowering.ir.error_messages import Wording, worded
from fusion.lowering.ir.expr import Const, Expr, Op, TileRef, const, make_cast, make_op, position, postorder
from fusion.lowering.ir.kernel import Kernel, spans, statements, values_of
from fusion.lowering.ir.requirements import Requirement, requirement_of
from fusion.lowering.ir.scalar_ops import CHECKED
from fusion.lowering.ir.sizes import may_be_empty, size_value
from fusion.lowering.value import Shape, axis_bounds

MOST_EVALUATED: Final = 1 << 26
"""Points of a kernel that is evaluated to tell which of its checks has failed; this takes a few seconds."""


def checked(index: Expr, size: sympy.Expr, dim: int, *, wrap: bool, wording: Wording = Wording.SUBSCRIPT) -> Op:
    """Check `index` (int64) along a dimension of size `size`; with `wrap`, negative ones count from the end.

    `wording` is how eager refuses a position out of range.

    >>> from fusion.lowering.ir.expr import Load
    >>> place = Load("places", (), torch.int64)
    >>> [arg.value for arg in checked(place, sympy.Integer(5), 0, wrap=True).args[1:]]
    [5, 4, 0]
    """
    args = (index, position(size if wrap else ZERO), position(size - 1), wording.number(dim))
    return Op(CHECKED, args, torch.int64)


def divisor(number: Expr) -> Expr:
    """Return an integer divisor that fails the launch where it is 0."""
    one, zero = const(1, torch.int64), const(0, torch.int64)
    is_zero, dim = make_op("eq", number, const(0, number.dtype)), Requirement.DIVISOR.dim
    check = Op(CHECKED, (Op("where", (is_zero, one, zero), torch.int64), zero, zero, dim), torch.int64)
    return Op("add", (number, make_cast(check, number.dtype)), number.dtype)


def required(value: Expr, holds: Expr, requirement: Requirement) -> Expr:
    """Return `value`; the launch fails where the bool `holds` is false."""
    zero, two, beyond = (const(number, torch.int64) for number in (0, 2, 3))
    place = Op("where", (holds, zero, beyond), torch.int64)
    check = Op(CHECKED, (place, zero, two, requirement.dim), torch.int64)  # a range in which the result is not known
    return Op("where", (make_op("le", check, zero), value, const(0, value.dtype)), value.dtype)


def is_within(index: sympy.Expr, size: sympy.Expr, shape: Shape) -> bool:
    """Return whether an index over the axes of `shape` certainly lies within a dimension of this size."""
    return not may_be_empty(size) and within(index, size, axis_bounds(shape))


def wrapped(check: Op) -> Expr:
    """Return the value of a check that holds."""
    index, wrap, *_ = check.args
    zero = const(0, torch.int64)
    if wrap is zero:
        return index
    negative = make_op("lt", index, zero)
    return Op("where", (negative, Op("add", (index, wrap), torch.int64), index), torch.int64)


def has_checks(kernel: Kernel) -> bool:
    """Return whether a launch of `kernel` may fail because of the data in its inputs."""
    return any(next(checks_of(part), None) is not None for part in kernel.launched)


def checks_of(kernel: Kernel) -> Iterator[Op]:
    """Return the checks of a kernel, without those of other kernels in its launch."""
    roots = [value for stmt in statements(kernel.body) for value in values_of(stmt)]
    return (node for node in postorder(*roots) if isinstance(node, Op) and node.name == CHECKED)


def failure(kernel: Kernel, args: Sequence[torch.Tensor | int]) -> CheckFailed:
    """Return the error to raise after a launch on `args` (tensors, then sizes) in which a check failed."""
    tensors = {p.name: t for p, t in zip(kernel.params, args, strict=False) if isinstance(t, torch.Tensor)}
    sizes = {symbol: int(size) for symbol, size in zip(kernel.sizes, args[len(kernel.params) :], strict=True)}
    for part in kernel.launched:
        error = _failure_in(part, tensors, sizes)
        if error is not None:
            return error
    return _failure_by_folds(kernel, tensors, sizes) or _one_of(kernel)


def _failure_by_folds(
    kernel: Kernel, tensors: Mapping[str, torch.Tensor], sizes: Mapping[sympy.Symbol, int]
) -> CheckFailed | None:
    """Return the error of a check that depends on a fold of the kernel, by evaluating all of a kernel that is small."""
    if math.prod(size_value(axis.size, sizes) for part in kernel.launched for axis in part.axes) > MOST_EVALUATED:
        return None
    copies = [_copied(tensors[param.name]) if param.written else tensors[param.name] for param in kernel.params]
    try:
        run_kernel(kernel, copies, list(sizes.values()))
    except CheckFailed as error:
        return error
    except VerifyError:
        return None
    return None


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _one_of(kernel: Kernel) -> CheckFailed:
    """Return an error that names all that a kernel checks of its folds, or all that it checks."""
    checks = [check for part in kernel.launched for check in checks_of(part)]
    numbers = {_number(check) for check in list(filter(_is_computed, checks)) or checks}
    kinds = {requirement_of(number) for number in numbers}
    if len(kinds) == 1 and (only := next(iter(kinds))) is not None:
        return only.failure()
    reasons = ", or: ".join(sorted("an index is out of bounds" if kind is None else kind.value for kind in kinds))
    errors = {worded(number)[0].error for number in numbers if number >= 0}
    return (errors.pop() if len(errors) == 1 else EitherOutOfRange if errors else DataRefused)(reasons)


def _is_computed(check: Op) -> bool:
    """Return whether a check depends on a fold of its own kernel, without which it is not evaluated."""
    return any(isinstance(node, TileRef) for node in postorder(check))


def requirement_checked_by(check: Op) -> Requirement | None:
    """Return the requirement that an operation checks; None for a position."""
    return requirement_of(_number(check))


def _number(check: Op) -> int:
    """Return the number that encodes a requirement, or a wording and a dimension."""
    number = check.args[-1]
    assert isinstance(number, Const)
    return int(number.value)


def _failure_in(
    kernel: Kernel, tensors: Mapping[str, torch.Tensor], sizes: Mapping[sympy.Symbol, int]
) -> CheckFailed | None:
    flats = {param.name: flat_view(tensors[param.name]) for param in kernel.params}
    where, scope = spans(kernel), Scope(flats, sizes, {})
    for check in checks_of(kernel):
        if _is_computed(check):
            continue
        axes = {a.symbol: range(size_value(a.size, sizes)) for a in kernel.axes if a.symbol in where[check]}
        try:
            for box in boxes(axes, pieces(points_of([where[check]], axes))):
                evaluate([check], box, scope)
        except CheckFailed as error:
            return error
    return None
