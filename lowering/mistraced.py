"""Shapes, strides and shared memory that PyTorch gets wrong as it traces.

Dynamo reads sizes and strides off what it traces and holds them for constants, and writes are gone from the graph that
AOTAutograd makes, so what is wrong cannot be mended in a graph: a class too few, numbers that are not eager's.  It is
right from the start of what is traced within `traced_as_eager`.  A release that errs is known by its answer; others are
left as they are.

Corrections are entries of PyTorch's own tables, which are there only while a thread is within, and do nothing in other
threads: whatever else the process traces is traced as PyTorch traces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch._C import DispatchKey
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch._prims_common import canonicalize_dims, is_contiguous_for_memory_format_or_false, suggest_memory_format
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import guard_or_false

NORM = torch.ops.aten.linalg_vector_norm.default
PAD = torch.ops.aten.constant_pad_nd.default
DROPOUT, DROP = torch.ops.aten.dropout.default, torch.ops.aten.native_dropout.default

Entry: TypeAlias = tuple[dict[Any, Any], object, object]
"""A table, a key, and what belongs there."""


class _Within(threading.local):
    """How often this thread has entered `traced_as_eager`, and not left it."""

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
    """A norm as `parts` make it, of dimensions counted from the first on, or of all of them.

    PyTorch 2.11 leaves a dimension of one element in the result where it is counted from the last one, and takes no
    dimensions for none where sizes are symbols; they stand for all.
    """
    return parts(x, ord, canonicalize_dims(x.ndim, tuple(dim)) if dim else None, *others, **options)


def _faked(mode: FakeTensorMode, norm: OpOverload, x: torch.Tensor, *args: object, **options: object) -> object:
    """A norm of fake tensors; one of all dimensions, or of some counted from the first on, is left to PyTorch."""
    dim = cast("Sequence[int] | None", args[1] if len(args) > 1 else options.get("dim"))
    if not _within.depth or dim is None or (dim and min(dim) >= 0):
        return NotImplemented
    apart: Callable[..., object] = _norm
    with mode:
        return apart(norm, x, *args, **options)


def _padded(
    mode: FakeTensorMode, pad: OpOverload, x: torch.Tensor, amounts: Sequence[int], *value: object, **named: object
) -> object:
    """A fake tensor with edges around it, of which none is wider than 0: a copy that lies as x does.

    PyTorch takes amounts that are symbols for positive, and the result for contiguous.  Which of both it is, is asked
    (and guarded) where they differ.
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
    """Dropout, which is x itself where it drops nothing: what is then written to it is written to x.

    PyTorch's own, `traced`, is a copy.
    """

    def dropped(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
        if not _within.depth:
            return traced(x, p, train)
        kept: torch.Tensor = DROP(x, p, train)[0] if train and p != 0 else x
        return kept

    return dropped


def _in_parts(parts: Callable[..., object]) -> Callable[..., object]:
    """A norm of fake tensors of symbolic sizes, which PyTorch takes apart into `parts`."""

    def norm(x: torch.Tensor, *args: Any, **options: Any) -> object:
        return _norm(parts, x, *args, **options) if _within.depth else parts(x, *args, **options)

    return norm


NORMS_ERR = torch.linalg.vector_norm(torch.empty(2, 1, device="meta"), dim=-1).ndim != 1

_PARTS = global_decomposition_table["post_autograd"]
"""Which fake tensors of symbolic sizes ask first."""

_ENTRIES: tuple[Entry, ...] = (
    *([(op_implementations_dict, NORM, _faked), (_PARTS, NORM, _in_parts(_PARTS[NORM]))] if NORMS_ERR else []),
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
_other_results: dict[Any, Any] = {}
"""What came of operations on fake tensors of known sizes, which PyTorch keeps for whoever traces next: corrected ones
outside, its own within."""


@contextmanager
def traced_as_eager() -> Iterator[None]:
    """Within, what this thread traces has the shapes, strides and shared memory that eager has."""
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
    """Write the corrections into PyTorch's tables, if no other thread has."""
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
