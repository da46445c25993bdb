"""Functions with colliding writes, with inputs for each: also enough sources that each has its own element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

Function = Callable[..., torch.Tensor]


def _index(size: int, *shape: int) -> torch.Tensor:
    """Indices below `size`, of which some occur often and some never."""
    return (torch.rand(shape) ** 2 * size).long()


def _rows(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.randn(count, *x.shape[1:]).to(x.dtype)


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors by the names of the parameters of the functions below."""
    torch.manual_seed(0)
    x = torch.randn(1031, 37)
    return {
        "x": (x * 4).to(dtype),
        "rows": _index(1031, 2003),
        "source": (torch.randn(2003, 37) * 4).to(dtype),
        "each": _index(1031, 1201, 37),
        "parts": (torch.randn(1301, 41) * 4).to(dtype),
        "columns": _index(37, 2003) - 37,
        "numbers": torch.randn(2003).to(dtype),
    }


SUMS: dict[str, Function] = {
    "index_add": lambda x, rows, source: x.index_add(0, rows, source * 2, alpha=3) + 1,
    "index_add_across": lambda x, rows, source: x.t().index_add(1, rows.int(), source.t()).sin(),
    "scatter_add": lambda x, each, parts: x.scatter_add(0, each, parts),
    "scatter_add_flat": lambda numbers, rows: numbers.new_zeros(1031).scatter_add(0, rows, numbers * numbers),
    "accumulated": lambda x, rows, source: torch.ops.aten.index_put(x, [rows], source, True),
    "accumulated_at": lambda x, rows, columns, numbers: torch.ops.aten.index_put(x, [rows, columns], numbers, True),
    "accumulated_number": lambda x, rows, columns: torch.ops.aten.index_put(x, [rows, columns], x[:1, 0], True),
    "put_accumulated": lambda x, rows, numbers: x.put(rows * 37 - 5, numbers, True),
    "of_row_sums": lambda x, rows, source: x[:, 0].index_add(0, rows, source.sum(1, dtype=source.dtype)),
    "of_normalised_rows": lambda x, rows, source: x.index_add(0, rows, source.float().softmax(1).to(x.dtype)),
    "of_shared_rows": lambda x, rows, source: (source.sum(0), x.index_add(0, rows, source)),
}

FOLDED = {
    f"{reduce}{'' if kept else '_alone'}": (
        lambda x, each, parts, reduce=reduce, kept=kept: x.scatter_reduce(0, each, parts, reduce, include_self=kept)
    )
    for reduce in ("sum", "prod", "mean", "amax", "amin")
    for kept in (True, False)
}

EXTREMES: dict[str, Function] = {
    "index_reduce": lambda x, rows, source: x.index_reduce(0, rows, source, "amax"),
    "index_reduce_alone": lambda x, rows, source: x.index_reduce(0, rows, source, "amin", include_self=False),
}

STORED: dict[str, Function] = {
    "index_fill": lambda x, rows: x.index_fill(0, rows, 7),
    "scatter_value": lambda x, each: x.scatter(0, each, 2),
    "index_copy": lambda x, source: x.index_copy(0, torch.arange(1030, -1, -2, device=x.device), source[:516] + 1),
    "index_put": lambda x, source: torch.ops.aten.index_put(
        x, [torch.arange(1000, device=x.device).flip(0)], source[:1000]
    ),
    "scatter": lambda x, parts: x.scatter(
        0, torch.arange(1000, device=x.device).flip(0)[:, None].expand(-1, 37), parts
    ),
    "put": lambda x, numbers: x.put(torch.arange(2003, device=x.device).flip(0) * 3, numbers),
    "put_at": lambda x, numbers: torch.ops.aten.index_put(
        x,
        [torch.arange(31, device=x.device).flip(0)[:, None] * 7, torch.arange(37, device=x.device) - 37],
        numbers[:37],
    ),
}

GRADIENTS: dict[str, Function] = {
    "embedding": lambda x, rows: F.embedding(rows.view(-1, 2003), x, padding_idx=3).sin(),
    "index": lambda x, rows, columns: x[rows, columns] * 2,
    "index_rows": lambda x, rows: x[rows.view(2003, 1)].exp(),
    "gather": lambda x, each: x.gather(0, each).tanh(),
    "take": lambda x, rows: x.take(rows * 7).cos(),
    "index_select": lambda x, rows: x.index_select(0, rows) ** 2,
    "index_add": lambda x, rows, source: x.index_add(0, rows, source * source),
    "nearest": lambda x: F.interpolate(x[None, None], size=(700, 90)).sin(),
    "bilinear": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x[None, None, :300], scale_factor=1.5, mode="bicubic", align_corners=True),
    "bags": lambda x, rows: F.embedding_bag(rows, x, torch.arange(0, 2003, 7, device=x.device), mode="mean"),
    "max_pool": lambda x: F.max_pool2d(x[None, None], 3, 2, 1).sin(),
}


def arguments(function: Function, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs that a function takes, in its order."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return [given[name] for name in names if name in given]
