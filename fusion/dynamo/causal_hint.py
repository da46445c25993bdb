"""Trusts the caller's hint that a mask is causal, without comparing its data.

PyTorch's transformer compares a mask with a causal one, on the device, and branches on the result.  Dynamo cannot trace
that: the graph breaks, and calls within PyTorch's own modules after a break are left to eager, which is all of the
transformer.  Using the mask as it is gives the same numbers.

Within `masks_as_given`, Dynamo takes a mask for causal if the caller says so (`tgt_is_causal`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch.nn.modules import transformer


def detect_is_causal_mask(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether the mask is causal, in place of PyTorch's function, which compares masks without a hint."""
    return is_causal is True


def _as_ours(builder: VariableBuilder, detect: object) -> VariableTracker:
    """Return the variable with which Dynamo traces the function above instead of PyTorch's, guarded by identity."""
    builder.install_guards(GuardBuilder.ID_MATCH)
    here = builder.tx.import_source(__name__)
    return VariableBuilder(builder.tx, AttrSource(here, "detect_is_causal_mask"))(detect_is_causal_mask)


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Trace PyTorch's comparison of masks as the function above; Dynamo compiles in one thread at a time."""
    functions = VariableBuilder._id_dispatch()
    known, previous = id(transformer._detect_is_causal_mask), functions.get(id(transformer._detect_is_causal_mask))
    functions[known] = _as_ours
    try:
        yield
    finally:
        functions.pop(known)
        if previous is not None:
            functions[known] = previous


__all__ = ["masks_as_given"]
