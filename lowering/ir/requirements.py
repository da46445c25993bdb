"""Defines requirements: conditions of an operation on the data in its operands, other than positions in range.

In the operation `checked` (`lowering/checks/checked.py`) a requirement stands in the place of the dimension, as a
negative number, so that kernels need nothing new for it.
"""

from __future__ import annotations

from enum import Enum

import torch

from fusion.lowering.errors import CheckFailed, DataRefused, DivisionByZero
from fusion.lowering.ir.expr import Const, const


class Requirement(Enum):
    """A condition on data; its value is eager's message where it does not hold, without the numbers of the call."""

    DIVISOR = "ZeroDivisionError"
    PROBABILITY = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."
    DEVIATION = "normal expects all elements of std >= 0.0"
    UNIT_INTERVAL = "all elements of input should be between 0 and 1"
    WEIGHT = "probability tensor contains either `inf`, `nan` or element < 0"
    TOTAL_WEIGHT = "invalid multinomial distribution (sum of probabilities <= 0)"
    ENOUGH_SOURCES = "Number of elements of source < number of ones in mask"
    MATCHING_SOURCES = "shape mismatch: value tensor cannot be broadcast to indexing result"
    HISTC_RANGE = "torch.histc: range is not finite"
    HISTOGRAM_RANGE = "torch.histogramdd: range is not finite"
    LENGTH = "lengths contains negative value!"
    LENGTHS = (
        "segment_reduce(): Expected all rows of lengths along axis to sum to data.size(lengths.dim()-1) when !unsafe."
    )
    SORTER = "torch.searchsorted(): sorter index out of range"
    FIRST_OFFSET = "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0."
    LAST_OFFSET = "offsets[-1] can not be greater than input's length"
    OFFSETS = "offsets have to ascend"  # eager reads other memory

    @property
    def dim(self) -> Const:
        """Return the constant that encodes the requirement in a check."""
        return const(-1 - list(Requirement).index(self), torch.int64)

    def failure(self) -> CheckFailed:
        """Return the error to raise where the condition does not hold."""
        return (DivisionByZero if self is Requirement.DIVISOR else DataRefused)(self.value)


def requirement_of(dim: int) -> Requirement | None:
    """Decode the requirement from a check's last operand; None if it is a dimension.

    >>> requirement_of(-1), requirement_of(0)
    (<Requirement.DIVISOR: 'ZeroDivisionError'>, None)
    """
    return list(Requirement)[-1 - dim] if dim < 0 else None
