"""Multiplies matrices with unaligned sizes by the library's GEMM.

Input: matrices (m × k and k × n) or batches of them; output: their product.  Tensor-core libraries are several times
slower if a size is no multiple of 16 bytes, such as the vocabulary of GPT-2 (50257).  The aligned part and the few
remaining rows, columns or terms are separate calls.  (measured: docs/performance.md, `products`)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BYTES = 16
"""Sizes and strides should be multiples of this."""


def aligned_product(left: torch.Tensor, right: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """Return `left @ right` in a new tensor with these strides (elements)."""
    shape = (*left.shape[:-1], right.shape[-1])
    out = torch.empty_strided(shape, strides, dtype=left.dtype, device=left.device)
    add_aligned_product(out, left, right, beta=0)
    return out


def add_aligned_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: int) -> None:
    """Compute `out = beta · out + left @ right`, in place; `beta` is 0 or 1."""
    step = BYTES // left.dtype.itemsize
    add = torch.Tensor.addmm_ if left.ndim == 2 else torch.Tensor.baddbmm_
    with torch.no_grad():
        for rows in _parts(left.shape[-2], step):
            for columns in _parts(right.shape[-1], step):
                first = beta
                for terms in reversed(list(_parts(left.shape[-1], step))):  # the remainder first: it is rounded twice
                    part = out[..., rows, columns]
                    add(part, left[..., rows, terms], right[..., terms, columns], beta=first)
                    first = 1


def _parts(size: int, step: int) -> Iterator[slice]:
    """Yield the largest multiple of `step`, and the remainder.

    >>> list(_parts(50257, 8)), list(_parts(64, 8)), list(_parts(5, 8))
    ([slice(0, 50256, None), slice(50256, 50257, None)], [slice(0, 64, None)], [slice(0, 5, None)])
    """
    aligned = size // step * step
    if aligned:
        yield slice(0, aligned)
    if aligned < size:
        yield slice(aligned, size)
