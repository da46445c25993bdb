"""Checks the memory layout of results of calls for the kernels that read them.

A kernel is generated for the shape and strides that PyTorch traced for a call.  These are wrong for some operations in
some releases: strides of Fourier transforms, data-dependent sizes.  Input: a result, with its traced layout; output:
that result, or a copy in the traced layout.  A result with the negative bit (the imaginary part of a conjugate) is
copied, too: kernels read its memory.  Another shape is refused.
"""

from __future__ import annotations

import torch

from fusion.lowering.errors import FusionError


def as_traced(
    result: torch.Tensor, name: str, shape: tuple[int | None, ...], strides: tuple[int, ...] | None
) -> torch.Tensor:
    """Return the result of the call `name` in the layout that kernels expect.

    Args:
        shape: as traced; None for unknown sizes.
        strides: as traced; None unless all are known.

    Raises:
        FusionError: the shape is another one.

    >>> as_traced(torch.ones(3, 2).t(), "aten.t.default", (2, 3), (3, 1)).stride()
    (3, 1)
    """
    if result.is_neg():
        result = result.resolve_neg()
    if result.shape == shape and result.stride() == strides:
        return result
    if any(traced is not None and size != traced for size, traced in zip(result.shape, shape, strict=True)):
        raise FusionError(
            f"{name} returned shape {list(result.shape)}, but PyTorch traced {list(shape)}",
            hint="this release of PyTorch traces the operation wrongly; exclude it from compilation",
        )
    if strides is None or not result.numel() or _same(result, strides):
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def _same(result: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Return whether a result has these strides in every dimension of more than one element."""
    zipped = zip(result.shape, result.stride(), strides, strict=True)
    return all(size == 1 or stride == traced for size, stride, traced in zipped)
