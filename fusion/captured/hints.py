"""Hints: what a program finds out of data for the sake of speed alone.

PyTorch's transformer compares a mask that it is given with a causal one, on the device, and takes another path if they
are equal.  Dynamo cannot follow that: the graph breaks, and what is called within PyTorch's own modules after a break
is left to eager, which is all of the transformer.  A mask that is used as it is gives the same numbers.

Importing this module tells Dynamo so, for all backends: a mask is causal where the caller says it (`tgt_is_causal`).
"""

from __future__ import annotations

import torch
from torch.nn.modules import transformer


@torch.compiler.substitute_in_graph(transformer._detect_is_causal_mask)
def detect_is_causal_mask(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Is the mask to be taken for a causal one?  As PyTorch's own function, which looks where nobody says."""
    return is_causal is True
