"""Masks of attention as tensors, of all kinds: true where a row sees a column."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def masks(rows: int, columns: int | None = None) -> Mapping[str, Tensor]:
    """Return masks of this many rows and columns by the name of their kind."""
    columns = columns or rows
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    causal, distance = column <= row, row - column
    document = row * 5 // rows == column * 5 // columns
    generator = torch.Generator().manual_seed(1)
    emptied = causal.clone()
    emptied[rows // 5 : rows // 3] = False
    last = torch.rand(rows, columns, generator=generator) < 0.02
    last[:, -1] = True
    return {
        "causal": causal,
        "later": row <= column,
        "window": causal & (distance < 70),
        "both sides": distance.abs() < 90,
        "documents": document & causal,
        "first and window": causal & ((distance < 60) | (column < 4)),
        "random": torch.rand(rows, columns, generator=generator) < 0.5,
        "everything": torch.ones(rows, columns, dtype=torch.bool),
        "nothing": torch.zeros(rows, columns, dtype=torch.bool),
        "empty rows": emptied,
        "sparse": last,
    }


def added(mask: Tensor, dtype: torch.dtype, hidden: float, *, biased: bool = False) -> Tensor:
    """Return a mask as numbers to add: 0 where it is true, or with `biased` a slope, and `hidden` elsewhere."""
    row, column = torch.arange(mask.shape[-2])[:, None], torch.arange(mask.shape[-1])[None, :]
    shown = (column - row) / 64 if biased else torch.zeros(mask.shape[-2:])
    return torch.where(mask, shown, hidden).to(dtype)
