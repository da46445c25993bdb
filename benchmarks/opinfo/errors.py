"""Measures eager's error against float64: for a sample, and for perturbed samples, as the error may be small by chance.

Roundings may cancel, as those of two distances do in their difference.  So if eager's error for the sample is too
small, the largest one for inputs that are smaller by up to some percent counts.
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
"""The relative perturbations: inputs become smaller, so that they mostly stay in the operation's domain."""

OVERFLOWN = torch.finfo(torch.float64).max
"""The error of an infinity if the exact number is finite."""


class Errors:
    """Eager's errors against float64 for a sample; results and gradients are numbered in one list."""

    def __init__(self, pair: Pair, sample: SampleInput, backward: bool, expected: Run) -> None:
        """`expected` is eager's run of the sample."""
        self._pair, self._sample, self._backward, self._expected = pair, sample, backward, expected

    def truth(self, k: int) -> Tensor | None:
        """Return tensor `k` in float64, or None."""
        return _tensor(self._exact, k)

    def of_eager(self, k: int) -> Iterator[float]:
        """Yield the largest error of an element of tensor `k` for the sample, and then with perturbed samples."""
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
        """Return eager and eager in float64 on inputs that are smaller by up to `by`."""
        sample = self._sample.transform(lambda leaf: _less(leaf, by))
        call = Call(self._pair.op, sample)
        try:
            theirs = run(call, call.tensors, self._backward)
        except Exception:  # eager's own, for inputs that are not the sample's: there is nothing to compare with
            return None, None
        return theirs, exact(self._pair, sample, self._backward, theirs)


def exact(pair: Pair, sample: SampleInput, backward: bool, expected: Run) -> Run | None:
    """Return eager in float64, if possible, for the same inputs and gradients as `expected`."""

    def wide(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().double().requires_grad_(leaf.requires_grad)
        return torch.float64 if leaf in (torch.float16, torch.bfloat16, torch.float32) else leaf

    try:
        call = Call(pair.op, sample.transform(wide))
        return run(call, call.tensors, backward, dtypes=[out.dtype for out in expected.outputs])
    except Exception:  # eager refuses float64
        return None


def distance(tensor: Tensor, truth: Tensor) -> Tensor:
    """Return |tensor - truth rounded to its dtype|; 0 for equal infinities and NaNs of the tensor."""
    wide, there = tensor.double(), truth.to(torch.float64).to(tensor.dtype).double()
    return torch.where((wide == there) | wide.isnan(), 0.0, (wide - there).abs()).nan_to_num(nan=0.0)


def _less(leaf: object, by: float) -> object:
    """Return floats, each smaller by another fraction of up to `by`."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    steps = torch.arange(1, leaf.numel() + 1, device=leaf.device, dtype=torch.float64)
    parts = (steps * 0.7548776662466927 % 1.0).view(leaf.shape)
    return (leaf.detach() * (1 - by * parts)).to(leaf.dtype).requires_grad_(leaf.requires_grad)


def _tensor(run: Run | None, k: int) -> Tensor | None:
    tensors = [] if run is None else [*run.outputs, *run.grads]
    return tensors[k] if k < len(tensors) else None


def _largest(theirs: Run | None, truth: Run | None, k: int) -> float:
    """Return the largest error of an element of a tensor; 0 if it is unknown."""
    one, other = _tensor(theirs, k), _tensor(truth, k)
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return 0.0
    return float(distance(one, other).max())
