"""Products by the library, of matrices whose sizes it does not like.

Input: matrices (m × k and k × n) or batches of them; output: their product.  Libraries for matrix units are several
times slower where a size is no multiple of 16 bytes, as the 50257 words of GPT-2 are not.  The multiple is multiplied
by itself, and the few rows, columns or terms that are left over are, too.  (H200, bf16, 2048 × 768 × 50257 into rows
that start at aligned addresses: 1.68 ms in one call, 0.22 ms and 0.03 ms in two.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BYTES = 16
"""What sizes and strides are best a multiple of."""


def aligned_product(left: torch.Tensor, right: torch.Tensor, strides: list[int]) -> torch.Tensor:
    """`left @ right` in a new tensor with these strides (elements)."""
    shape = (*left.shape[:-1], right.shape[-1])
    out = torch.empty_strided(shape, strides, dtype=left.dtype, device=left.device)
    add_aligned_product(out, left, right, beta=0)
    return out


def add_aligned_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: int) -> None:
    """`out = beta · out + left @ right`, in place; `beta` is 0 or 1."""
    step = BYTES // left.dtype.itemsize
    add = torch.Tensor.addmm_ if left.ndim == 2 else torch.Tensor.baddbmm_
    with torch.no_grad():
        for rows in _parts(left.shape[-2], step):
            for columns in _parts(right.shape[-1], step):
                first = beta
                for terms in reversed(list(_parts(left.shape[-1], step))):  # the few first: they are rounded twice
                    part = out[..., rows, columns]
                    add(part, left[..., rows, terms], right[..., terms, columns], beta=first)
                    first = 1


def _parts(size: int, step: int) -> Iterator[slice]:
    """The largest multiple of `step`, and the rest.

    >>> list(_parts(50257, 8)), list(_parts(64, 8)), list(_parts(5, 8))
    ([slice(0, 50256, None), slice(50256, 50257, None)], [slice(0, 64, None)], [slice(0, 5, None)])
    """
    whole = size // step * step
    if whole:
        yield slice(0, whole)
    if whole < size:
        yield slice(whole, size)
