"""Compares two tensors, ours and eager's, within eager's possible results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROOM = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerance in addition to eager's error: relative to a number, and half of it to the tensor's largest or 1."""

UNSTEADY = 0.05
"""Error of eager, relative to the largest number, above which a comparison says little."""


@dataclass(frozen=True)
class Allowed:
    """The allowed values of a result.

    Attributes:
        truths: the result in float64, then in float64 on inputs that are off by a rounding; empty: as eager has it.
        usual: eager's usual error.
        forms: the results of other forms of the program, any of which may decide on an infinity or NaN: an infinity
            becomes a NaN where a kernel subtracts another one, and kernels for CPUs and CUDA differ in this.
    """

    truths: Sequence[Tensor] = ()
    usual: float = 0.0
    forms: Sequence[Tensor] = ()


def compared(ours: Tensor, theirs: Tensor, allowed: Allowed) -> tuple[Tensor, bool]:
    """Which elements of ours are wrong; and whether some were not compared, or not well."""
    return (_numbers if theirs.is_floating_point() else _integers)(ours, theirs, allowed)


def _integers(ours: Tensor, theirs: Tensor, allowed: Allowed) -> tuple[Tensor, bool]:
    """Compare integers: equal wherever eager has the same in every precision."""
    steady = torch.ones_like(theirs, dtype=torch.bool)
    for truth in allowed.truths:
        if truth.shape == theirs.shape:
            steady &= truth == theirs
    return (ours != theirs) & steady, not bool(steady.all())


def _numbers(ours: Tensor, theirs: Tensor, allowed: Allowed) -> tuple[Tensor, bool]:
    """Compare floats: within twice eager's error, here and usually, and a little; infinities and NaN as eager's."""
    room, a, b = ROOM[theirs.dtype], ours.double(), theirs.double()
    truths = allowed.truths
    if not truths or any(truth.shape != theirs.shape for truth in truths):
        truths = [b]
    truth = truths[0].double()
    finite = torch.where(truth.isfinite(), truth, 0.0).abs()
    largest = finite.max() if finite.numel() else finite.sum()
    errors = [error(other, truth) for other in (b, *(other.double() for other in truths[1:]))]
    own = torch.stack([each.max() if each.numel() else each.sum() for each in errors]).max().clamp(min=allowed.usual)
    steady = torch.ones_like(b, dtype=torch.bool)
    for other in truths[1:]:
        steady &= other.double().isfinite() == truth.isfinite()
    misplaced = (_kind(a) != _kind(b)) & (_kind(a) != _kind(truth)) & steady
    for form in allowed.forms:
        if form.shape == ours.shape:
            misplaced &= _kind(a) != _kind(form.double())
    lost = ~b.isfinite() & truth.isfinite()  # eager rounds it to an infinity: its error has no bound there
    off = (error(a, truth) > room * (finite + largest.clamp(min=1.0) / 2) + 2 * own) & steady & ~lost
    vague = bool(own > max(UNSTEADY, 4 * room) * largest) or not bool((steady & ~lost).all())
    return misplaced | off, vague


def _kind(tensor: Tensor) -> Tensor:
    """0 for a finite number, ±1 for an infinity, 2 for NaN."""
    return torch.where(tensor.isfinite(), 0.0, tensor).nan_to_num(nan=2.0, posinf=1.0, neginf=-1.0)


def error(tensor: Tensor, truth: Tensor) -> Tensor:
    """|tensor - truth| where both are finite."""
    return torch.where(tensor.isfinite() & truth.isfinite(), (tensor - truth).abs(), 0.0)


def first(ours: Tensor, theirs: Tensor, wrong: Tensor) -> str:
    """A sentence on the first of the elements that are wrong."""
    at = wrong.nonzero()[0].tolist()
    return f"is {ours[tuple(at)].item():.9g} at {at}, eager's {theirs[tuple(at)].item():.9g} ({int(wrong.sum())} such)"
