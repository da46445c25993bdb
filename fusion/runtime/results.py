"""Results of calls, as kernels are to find them in memory.

A kernel is generated for the shape and strides that PyTorch said a call would give.  What it says is wrong for some
operations in some releases: strides of Fourier transforms, sizes that only data tell.  Input: a result, with what was
said of it; output: that result, or a copy of it that lies as was said.  So it is of a result that is negated where it
is read (the imaginary part of a conjugate): kernels read its memory.  Another shape is refused.
"""

from __future__ import annotations

import torch

from fusion.lowering.errors import FusionError


def as_said(
    result: torch.Tensor, name: str, shape: tuple[int | None, ...], strides: tuple[int, ...] | None
) -> torch.Tensor:
    """The result of the call `name`, laid out as kernels expect it.

    Args:
        shape: as was said; None for what was not known.
        strides: likewise; None where they were not all known.

    Raises:
        FusionError: the shape is another one.

    >>> as_said(torch.ones(3, 2).t(), "aten.t.default", (2, 3), (3, 1)).stride()
    (3, 1)
    """
    if result.is_neg():
        result = result.resolve_neg()
    if result.shape == shape and result.stride() == strides:
        return result
    if any(said is not None and size != said for size, said in zip(result.shape, shape, strict=True)):
        raise FusionError(
            f"{name} gave a result of shape {list(result.shape)}, where PyTorch had said {list(shape)}",
            hint="this release of PyTorch traces the operation wrongly; keep it out of what is compiled",
        )
    if strides is None or not result.numel() or _same(result, strides):
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)


def _same(result: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Are the strides these wherever they matter?"""
    zipped = zip(result.shape, result.stride(), strides, strict=True)
    return all(size == 1 or stride == said for size, stride, said in zipped)
