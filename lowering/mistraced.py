"""Shapes that PyTorch gets wrong as it traces.

Dynamo reads sizes off what it traces and holds them for constants, so a wrong one cannot be mended in a graph: a class
too few, numbers that are not eager's.  It is right from the start where this module has been imported, for whatever
traces.  A release that errs is known by its answer; others are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dims
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode

NORM = torch.ops.aten.linalg_vector_norm.default


def _norm(
    parts: Any, x: torch.Tensor, ord: float = 2, dim: Sequence[int] | None = None, *others: object, **options: object
) -> Any:
    """A norm as `parts` make it, of dimensions counted from the first on, or of all of them.

    PyTorch 2.11 leaves a dimension of one element in the result where it is counted from the last one, and takes no
    dimensions for none where sizes are symbols; they stand for all.
    """
    return parts(x, ord, canonicalize_dims(x.ndim, tuple(dim)) if dim else None, *others, **options)


def _faked(mode: FakeTensorMode, norm: OpOverload, x: torch.Tensor, *args: Any, **options: Any) -> object:
    """A norm of fake tensors; one of all dimensions, or of some counted from the first on, is left to PyTorch."""
    dim: Sequence[int] | None = args[1] if len(args) > 1 else options.get("dim")
    if dim is None or (dim and min(dim) >= 0):
        return NotImplemented
    with mode:
        return _norm(norm, x, *args, **options)


if torch.linalg.vector_norm(torch.empty(2, 1, device="meta"), dim=-1).ndim != 1:
    register_op_impl(NORM)(_faked)
    table = global_decomposition_table["post_autograd"]  # which fake tensors of symbolic sizes ask first
    table[NORM] = partial(_norm, table[NORM])
