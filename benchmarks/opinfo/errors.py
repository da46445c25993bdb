"""How far eager is from float64: for a sample, and for others near it, as it may be near by chance.

Roundings may cancel, as those of two distances do in their difference.  So where eager's error for the sample is too
small, what counts is the largest one for inputs that are smaller by up to some percent each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import SampleInput

from benchmarks.opinfo.calls import Call, Run, run
from benchmarks.opinfo.pairs import Pair

SMALLER = (0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08)
"""By how much inputs of other runs are smaller at most: so what an operation is defined for, they mostly stay."""

OVERFLOWN = torch.finfo(torch.float64).max
"""The error of an infinity where the number is finite."""


class Errors:
    """Eager against float64, for a sample; results and gradients are counted in one list."""

    def __init__(self, pair: Pair, sample: SampleInput, backward: bool, expected: Run) -> None:
        """`expected` is what eager gives for the sample."""
        self._pair, self._sample, self._backward, self._expected = pair, sample, backward, expected

    def truth(self, k: int) -> Tensor | None:
        """Tensor `k` in float64; None where it cannot be had."""
        return _tensor(self._exact, k)

    def of_eager(self, k: int) -> Iterator[float]:
        """The largest error of an element of tensor `k` for the sample, and then for others near it, too."""
        largest = _largest(self._expected, self._exact, k)
        yield largest
        others = (_largest(theirs, truth, k) for theirs, truth in self._nearby)
        yield max(largest, *(other for other in others if other < OVERFLOWN))

    @cached_property
    def _exact(self) -> Run | None:
        return exact(self._pair, self._sample, self._backward, self._expected)

    @cached_property
    def _nearby(self) -> list[tuple[Run | None, Run | None]]:
        return [self._smaller(by) for by in SMALLER]

    def _smaller(self, by: float) -> tuple[Run | None, Run | None]:
        """Eager and eager in float64 on inputs that are smaller by up to `by`."""
        sample = self._sample.transform(lambda leaf: _less(leaf, by))
        call = Call(self._pair.op, sample)
        try:
            theirs = run(call, call.tensors, self._backward)
        except Exception:  # eager's own, of inputs that are not the sample's: there is nothing to compare with
            return None, None
        return theirs, exact(self._pair, sample, self._backward, theirs)


def exact(pair: Pair, sample: SampleInput, backward: bool, expected: Run) -> Run | None:
    """Eager in float64, where it can be had, of the same inputs and gradients as `expected`."""

    def wide(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return torch.float64 if leaf in (torch.float16, torch.bfloat16, torch.float32) else leaf

    try:
        call = Call(pair.op, sample.transform(wide))
        return run(call, call.tensors, backward, dtypes=[out.dtype for out in expected.outputs])
    except Exception:  # whatever eager refuses in float64, it cannot be had
        return None


def distance(tensor: Tensor, truth: Tensor) -> Tensor:
    """|tensor - truth rounded to its dtype|, equal infinities and NaNs of the tensor counting as none."""
    wide, there = tensor.double(), truth.to(torch.float64).to(tensor.dtype).double()
    return torch.where((wide == there) | wide.isnan(), 0.0, (wide - there).abs()).nan_to_num(nan=0.0)


def _less(leaf: object, by: float) -> object:
    """Floats, each smaller by another part of up to `by`."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    steps = torch.arange(1, leaf.numel() + 1, device=leaf.device, dtype=torch.float64)
    parts = (steps * 0.7548776662466927 % 1.0).view(leaf.shape)
    return (leaf.detach() * (1 - by * parts)).to(leaf.dtype).requires_grad_(leaf.requires_grad)


def _tensor(made: Run | None, k: int) -> Tensor | None:
    tensors = [] if made is None else [*made.outputs, *made.grads]
    return tensors[k] if k < len(tensors) else None


def _largest(theirs: Run | None, truth: Run | None, k: int) -> float:
    """The largest error of an element of a tensor; 0 where it cannot be said."""
    one, other = _tensor(theirs, k), _tensor(truth, k)
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return 0.0
    return float(distance(one, other).max())
