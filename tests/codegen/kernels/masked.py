"""Attention kernels with masks in memory: documents, lengths, flags, in forward and both backward loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.lowering.indexing import over_symbol
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, const, rewrite
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Param, Stmt
from tests.codegen.kernels.attention import attention_dkv, attention_dq, online_attention
from tests.codegen.kernels.making import BOOL, I32, I64, b, i, j, load, param, tensors

Sizes = tuple[int, int, int]
"""Heads, queries, keys."""


@dataclass(frozen=True)
class Mask:
    """The keys that a query attends to: a condition over the symbols of both, and the params that it reads."""

    sees: Callable[[sympy.Expr, sympy.Expr, Sizes], Expr]
    params: Callable[[Sizes], Sequence[Param]]


def _of_one_document(query: sympy.Expr, key: sympy.Expr, sizes: Sizes) -> Expr:
    return op("eq", load("query_ids", query, I64), load("key_ids", key, I64))


def _ids(sizes: Sizes) -> Sequence[Param]:
    return param("query_ids", I64, sizes[1]), param("key_ids", I64, sizes[2])


def _not_after(query: sympy.Expr, key: sympy.Expr) -> Expr:
    return op("le", IndexValue(key), IndexValue(query))


MASKS: Mapping[str, Mask] = {
    "documents": Mask(_of_one_document, _ids),
    "causal documents": Mask(lambda q, k, n: op("and", _of_one_document(q, k, n), _not_after(q, k)), _ids),
    "documents or a prefix": Mask(
        lambda q, k, n: op("or", _of_one_document(q, k, n), op("lt", IndexValue(k), const(20, I64))), _ids
    ),
    "documents of each head": Mask(
        lambda q, k, n: op("eq", load("query_ids", n[1] * b + q, I32), load("key_ids", n[2] * b + k, I32)),
        lambda n: (param("query_ids", I32, n[0], n[1]), param("key_ids", I32, n[0], n[2])),
    ),
    "no document twice in a row": Mask(
        lambda q, k, n: op("ne", load("query_ids", q, I64), load("key_ids", k, I64)),
        _ids,
    ),
    "lengths": Mask(
        lambda q, k, n: op("lt", IndexValue(k), load("lengths", b, I64)), lambda n: (param("lengths", I64, n[0]),)
    ),
    "from a start": Mask(
        lambda q, k, n: op("and", op("le", Cast(load("starts", q, I32), I64), IndexValue(k)), _not_after(q, k)),
        lambda n: (param("starts", I32, n[1]),),
    ),
    "flags": Mask(
        lambda q, k, n: op("and", load("seen", n[2] * b + k, BOOL), _not_after(q, k)),
        lambda n: (param("seen", BOOL, n[0], n[2]),),
    ),
}

EACH = Mask(
    lambda q, k, n: load("each", n[2] * q + k, BOOL),
    lambda n: (param("each", BOOL, n[1], n[2]),),
)
"""A mask of rows and keys, whose ends are unknown before a loop."""

WALKS: Mapping[str, tuple[Callable[..., Kernel], sympy.Symbol, sympy.Symbol]] = {
    "forward": (online_attention, i, over_symbol(2)),
    "dkv": (attention_dkv, over_symbol(2), j),
    "dq": (attention_dq, i, over_symbol(2)),
}
"""The builder of each kernel, its queries and its keys."""


def masked(one_loop: str, mask: str | Mask, sizes: Sizes, width: int = 16) -> Kernel:
    """An attention kernel with a mask in memory, whose params precede the others."""
    mask = MASKS[mask] if isinstance(mask, str) else mask
    result, query, key = WALKS[one_loop]
    kernel = result(*sizes, width, causal=True)
    (loop,) = (stmt for stmt in kernel.body if isinstance(stmt, Loop))
    old, new = loop.where, mask.sees(query, key, sizes)

    def rule(node: Expr) -> Expr | None:
        return new if node is old else None

    def rebuilt(stmt: Stmt) -> Stmt:
        assert isinstance(stmt, Fold)
        return replace(stmt, args=tuple(rewrite(stmt.args, rule)))

    other = Loop(loop.axes, tuple(rebuilt(stmt) for stmt in loop.body), new)
    body = tuple(other if stmt is loop else stmt for stmt in kernel.body)
    return replace(kernel, params=(*mask.params(sizes), *kernel.params), body=body)


DOCUMENTS: Mapping[str, Callable[[int], torch.Tensor]] = {
    "in order": lambda n: torch.arange(n) // 37,
    "in any order": lambda n: torch.randint(0, 4, (n,), generator=torch.Generator().manual_seed(1)),
    "one": lambda n: torch.full((n,), -7),
    "all distinct": lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(2)) - 9,
    "far apart": lambda n: torch.where(torch.arange(n) < n // 2, 2**31 - 1, -(2**31)),
}


def given(kernel: Kernel, sizes: Sizes, ids: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Tensors for a masked kernel; documents by number of the longer side, of which the shorter one has the first."""
    heads, queries, keys = sizes
    ids = DOCUMENTS["in order"](max(queries, keys)) if ids is None else ids
    known = {
        "query_ids": ids[:queries],
        "key_ids": ids[:keys],
        "lengths": torch.tensor([0, keys - 30, keys, 1])[:heads],
        "starts": torch.arange(queries) // 29 * 29,
        "each": (torch.arange(queries * keys).view(queries, keys) * 7 // 5) % 3 == 0,
        "seen": (torch.arange(heads * keys).view(heads, keys) // 23) % 2 == 0,
    }
    result = tensors(kernel)
    for position, p in enumerate(kernel.params):
        if p.name in known:
            shape = [int(size) for size in p.shape]
            result[position] = known[p.name].to(p.dtype).broadcast_to(shape).contiguous()
        if p.name == "lse":  # exponentials of scores below it are small
            result[position] = result[position].abs() + 4
    return result
