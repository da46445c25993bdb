"""Shapes, strides and shared memory that PyTorch gets wrong as it traces.

Dynamo reads sizes and strides off what it traces and holds them for constants, and writes are gone from the graph that
AOTAutograd makes, so what is wrong cannot be mended in a graph: a class too few, numbers that are not eager's.  It is
right from the start where this module has been imported, for whatever traces.  A release that errs is known by its
answer; others are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._C import DispatchKey
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dims, is_contiguous_for_memory_format_or_false, suggest_memory_format
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import guard_or_false

NORM = torch.ops.aten.linalg_vector_norm.default
PAD = torch.ops.aten.constant_pad_nd.default
DROPOUT, DROP = torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default


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


@register_op_impl(PAD)
def _padded(
    mode: FakeTensorMode, pad: OpOverload, x: torch.Tensor, amounts: Sequence[int], *value: object, **named: object
) -> object:
    """A fake tensor with edges around it, of which none is wider than 0: a copy that lies as x does.

    PyTorch takes amounts that are symbols for positive, and the result for contiguous.  Which of both it is, is asked
    (and guarded) where they differ.
    """
    if is_contiguous_for_memory_format_or_false(x, memory_format=suggest_memory_format(x)):
        return NotImplemented
    if len(amounts) > 2 * x.ndim or not all(guard_or_false(amount <= 0) for amount in amounts):
        return NotImplemented
    with mode:
        for k in range(len(amounts) // 2):
            dim = x.ndim - 1 - k
            before, after = -amounts[2 * k], -amounts[2 * k + 1]
            x = x.narrow(dim, before, x.shape[dim] - before - after)
        return x.clone()


def _dropped(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
    """Dropout, which is x itself where it drops nothing: what is then written to it is written to x.

    PyTorch traces a copy.
    """
    kept: torch.Tensor = DROP(x, p, train)[0] if train and p != 0 else x
    return kept


for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd):
    DROPOUT.py_kernels[key] = _dropped
DROPOUT._dispatch_cache.clear()
