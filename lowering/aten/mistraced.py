"""Corrects shapes, strides and aliasing that PyTorch traces wrongly.

Dynamo reads sizes and strides off traced tensors and treats them as constants, and the graph that AOTAutograd returns
no longer contains writes; so an error cannot be repaired in a graph (numbers would differ from eager's).  Instead,
everything traced within `traced_as_eager` is traced correctly.  A faulty release is recognised by its results; others
are left as they are.

The corrections are entries of PyTorch's own tables, present only while a thread is within the context, and without
effect on other threads: everything else in the process is traced as PyTorch traces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch._C import DispatchKey
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dims, is_contiguous_for_memory_format_or_false, suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import guard_or_false

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import _DispatchCacheEntry, _DispatchCacheKey

NORM = torch.ops.aten.linalg_vector_norm.default
PAD = torch.ops.aten.constant_pad_nd.default
DROPOUT, DROP = torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default

Entry: TypeAlias = tuple[dict[Any, Any], object, object]
"""A table, a key, and the corrected value."""


class _Within(threading.local):
    """Counts the nested uses of `traced_as_eager` in this thread."""

    depth = 0


_within = _Within()


def _norm(
    parts: Callable[..., object],
    x: torch.Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    *others: object,
    **options: object,
) -> object:
    """Compute a norm by `parts` with non-negative dimensions, or over all of them.

    PyTorch 2.11 leaves a dimension of one element in the result if it is given as a negative number, and does not
    accept an empty list of dimensions with symbolic sizes; it stands for all.
    """
    return parts(x, ord, canonicalize_dims(x.ndim, tuple(dim)) if dim else None, *others, **options)


def _faked(mode: FakeTensorMode, norm: OpOverload, x: torch.Tensor, *args: object, **options: object) -> object:
    """Compute a norm of fake tensors if a dimension is negative or the list is empty; else leave it to PyTorch."""
    dim = cast("Sequence[int] | None", args[1] if len(args) > 1 else options.get("dim"))
    if not _within.depth or dim is None or (dim and min(dim) >= 0):
        return NotImplemented
    decomposed: Callable[..., object] = _norm
    with mode:
        return decomposed(norm, x, *args, **options)


def _padded(
    mode: FakeTensorMode, pad: OpOverload, x: torch.Tensor, amounts: Sequence[int], *value: object, **named: object
) -> object:
    """Compute constant padding of a fake tensor by amounts ≤ 0 (cropping): a copy in the memory format of x.

    PyTorch assumes that symbolic amounts are positive, and the result contiguous.  Where the two formats differ, this
    guards on the amounts.
    """
    if not _within.depth or is_contiguous_for_memory_format_or_false(x, memory_format=suggest_memory_format(x)):
        return NotImplemented
    if len(amounts) > 2 * x.ndim or not all(guard_or_false(amount <= 0) for amount in amounts):
        return NotImplemented
    with mode:
        for k in range(len(amounts) // 2):
            dim = x.ndim - 1 - k
            before, after = -amounts[2 * k], -amounts[2 * k + 1]
            x = x.narrow(dim, before, x.shape[dim] - before - after)
        return x.clone()


def _dropout(traced: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make dropout return x itself where it drops nothing, so that writes to the result reach x, as in eager.

    PyTorch's own `traced` returns a copy.
    """

    def dropped(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
        if not _within.depth:
            return traced(x, p, train)
        result: torch.Tensor = DROP(x, p, train)[0] if train and p != 0 else x
        return result

    return dropped


def _corrected_norm(parts: Callable[..., object]) -> Callable[..., object]:
    """Correct the decomposition of a norm, which PyTorch uses for fake tensors of symbolic sizes."""

    corrected: Callable[..., object] = partial(_norm, parts)

    def norm(x: torch.Tensor, *args: object, **options: object) -> object:
        return corrected(x, *args, **options) if _within.depth else parts(x, *args, **options)

    return norm


NORMS_ERR = torch.linalg.vector_norm(torch.empty(2, 1, device="meta"), dim=-1).ndim != 1

_PARTS = global_decomposition_table["post_autograd"]
"""The table that fake tensors of symbolic sizes use first."""

_ENTRIES: tuple[Entry, ...] = (
    *([(op_implementations_dict, NORM, _faked), (_PARTS, NORM, _corrected_norm(_PARTS[NORM]))] if NORMS_ERR else []),
    (op_implementations_dict, PAD, _padded),
    *(
        (DROPOUT.py_kernels, key, _dropout(DROPOUT.py_kernels[key]))
        for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    ),
)

_MISSING = object()

_lock = threading.Lock()
_inside = 0
_before: list[Entry] = []
_other_results: dict[_DispatchCacheKey, _DispatchCacheEntry] = {}
"""PyTorch's cache of results on fake tensors of known sizes, swapped with its own: the corrected results while outside,
PyTorch's while within."""


@contextmanager
def traced_as_eager() -> Iterator[None]:
    """Trace in this thread with the shapes, strides and aliasing of eager."""
    outermost = not _within.depth
    if outermost:
        _enter()
    _within.depth += 1
    try:
        yield
    finally:
        _within.depth -= 1
        if outermost:
            _leave()


def _enter() -> None:
    """Write the corrections into PyTorch's tables, unless another thread has."""
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            _before[:] = [(table, key, table.get(key, _MISSING)) for table, key, _ in _ENTRIES]
            _write(_ENTRIES)


def _leave() -> None:
    """Restore PyTorch's tables, once no thread needs the corrections."""
    global _inside
    with _lock:
        _inside -= 1
        if not _inside:
            _write(_before)


def _write(entries: Sequence[Entry]) -> None:
    global _other_results
    if NORMS_ERR:
        FakeTensorMode.cache, _other_results = _other_results, FakeTensorMode.cache
    for table, key, value in entries:
        if value is _MISSING:
            table.pop(key, None)
        else:
            table[key] = value
    DROPOUT._dispatch_cache.clear()


__all__ = ["traced_as_eager"]
