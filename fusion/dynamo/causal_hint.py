"""Takes a mask for causal where the caller says so, without comparing its data.

PyTorch's transformer compares a mask that it is given with a causal one, on the device, and takes another path if they
are equal.  Dynamo cannot follow that: the graph breaks, and what is called within PyTorch's own modules after a break
is left to eager, which is all of the transformer.  A mask that is used as it is gives the same numbers.

Dynamo knows it of what it traces within `masks_as_given`: a mask is causal where the caller says so (`tgt_is_causal`).
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
    """Is the mask to be taken for a causal one?  As PyTorch's own function, which looks where nobody says."""
    return is_causal is True


def _as_ours(builder: VariableBuilder, detect: object) -> VariableTracker:
    """What Dynamo takes PyTorch's function for, as long as it is that: the one above."""
    builder.install_guards(GuardBuilder.ID_MATCH)
    here = builder.tx.import_source(__name__)
    return VariableBuilder(builder.tx, AttrSource(here, "detect_is_causal_mask"))(detect_is_causal_mask)


@contextmanager
def masks_as_given() -> Iterator[None]:
    """Within, Dynamo does not compare masks; it compiles in one thread at a time, the one that is within."""
    functions = VariableBuilder._id_dispatch()
    known, whose = id(transformer._detect_is_causal_mask), functions.get(id(transformer._detect_is_causal_mask))
    functions[known] = _as_ours
    try:
        yield
    finally:
        functions.pop(known)
        if whose is not None:
            functions[known] = whose


__all__ = ["masks_as_given"]
