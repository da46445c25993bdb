"""Products of products: attention and its gradients, cross-entropy of logits that are never stored."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from fusion.lowering.algebra.conditions import negated
from fusion.lowering.indexing import FloorDiv, over_symbol
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Param, Stmt, Store
from tests.codegen.kernels.making import (
    BF16,
    F16,
    F32,
    GRID,
    I64,
    LOOP,
    WHOLE,
    b,
    i,
    j,
    kernel,
    load,
    narrowed,
    param,
    r,
)


def attention(heads: int, queries: int, keys: int, width: int) -> Kernel:
    """softmax(q · kᵀ) · v with all keys in one tile: a contraction of a contraction"""
    d, e, s = over_symbol(0), over_symbol(1), over_symbol(2)
    query, key = load("q", width * (queries * b + i) + d, F16), load("k", width * (keys * b + s) + d, F16)
    scores = Fold("scores", "dot", (query, key), (d,), F32, (i,), (s,))
    top = Fold("top", "max", (scores.ref,), (s,), F32)
    power = op("exp", op("sub", scores.ref, top.ref))
    whole = Fold("whole", "sum", (power,), (s,), F32)
    value = load("v", width * (keys * b + s) + e, F16)
    mixed = Fold("mixed", "dot", (Cast(power, F16), value), (s,), F32, (i,), (e,))
    params = (
        *(param("q", F16, heads, queries, width), param("k", F16, heads, keys, width)),
        *(param("v", F16, heads, keys, width), param("out", F32, heads, queries, width, written=True)),
    )
    axes = {b: (heads, GRID), i: (queries, GRID), d: (width, WHOLE), e: (width, WHOLE), s: (keys, WHOLE)}
    store = Store("out", width * (queries * b + i) + e, op("truediv", mixed.ref, whole.ref))
    return kernel("attention", params, axes, scores, top, whole, mixed, store)


LOW = const(float("-inf"), F32)


def visible_keys(query: sympy.Expr, key: sympy.Expr, *, shift: int, window: int = 0, prefix: int = 0) -> Expr:
    """The keys that a query attends to: none after it, only the last `window` before it, and always the first `prefix`.

    `shift` keys come before the first query.
    """
    where = op("le", IndexValue(key), IndexValue(query + shift))
    if window:
        where = op("and", where, op("gt", IndexValue(key + window), IndexValue(query + shift)))
    if prefix:
        where = op("or", where, op("lt", IndexValue(key), const(prefix, I64)))
    return where


def running_softmax(scaled: Expr, over: sympy.Symbol) -> tuple[Fold, Fold, Expr, Expr]:
    """The running maximum and sum of exponentials, the exponentials, and the factor that corrects a running sum"""
    top = Fold("top", "max", (scaled,), (over,), F32)
    safe = op("where", op("eq", top.ref, LOW), const(0.0, F32), top.ref)
    power = op("exp", op("sub", scaled, safe))
    moved = op("where", op("eq", top.before, top.ref), const(1.0, F32), op("exp", op("sub", top.before, top.ref)))
    whole = Fold("whole", "sum", (power,), (over,), F32)
    return top, replace(whole, carry=op("mul", whole.before, moved)), power, moved


def online_attention(
    heads: int,
    queries: int,
    keys: int,
    width: int,
    *,
    dtype: torch.dtype = F16,
    causal: bool = False,
    window: int = 0,
    prefix: int = 0,
    step: int = 0,
    group: int = 1,
    scale: float = 0.5,
    hidden: bool = False,
) -> Kernel:
    """softmax(q · kᵀ · scale) · v in one loop over the keys: running values are updated block by block.

    `step`: the width is also looped over, inside the loop over keys, instead of held whole for the scores.  `group`:
    the number of heads of q that share one of k and v.  `hidden`: the mask selects invisible keys, not visible ones.
    """
    d, e, s = over_symbol(0), over_symbol(1), over_symbol(2)
    head = FloorDiv(b, group) if group > 1 else b
    query, key = load("q", width * (queries * b + i) + d, dtype), load("k", width * (keys * head + s) + d, dtype)
    scores = Fold("scores", "dot", (query, key), (d,), F32, (i,), (s,))
    scaled, where = op("mul", scores.ref, const(scale, F32)), None
    if causal or window or prefix:
        where = visible_keys(i, s, shift=keys - queries, window=window, prefix=prefix)
        scaled = op("where", negated(where), LOW, scaled) if hidden else op("where", where, scaled, LOW)
    top, whole, power, moved = running_softmax(scaled, s)
    value = load("v", width * (keys * head + s) + e, dtype)
    mixed = Fold("mixed", "dot", (narrowed(power, dtype), value), (s,), F32, (i,), (e,))
    mixed = replace(mixed, carry=op("mul", mixed.before, moved))
    params = (
        *(param("q", dtype, heads, queries, width), param("k", dtype, heads // group, keys, width)),
        *(param("v", dtype, heads // group, keys, width), param("out", dtype, heads, queries, width, written=True)),
    )
    axes = {b: (heads, GRID), i: (queries, GRID), d: (width, LOOP if step else WHOLE), e: (width, WHOLE)}
    inner: Stmt = Loop((d,), (scores,)) if step else scores
    store = Store("out", width * (queries * b + i) + e, narrowed(op("truediv", mixed.ref, whole.ref), dtype))
    loop = Loop((s,), (inner, top, whole, mixed), where)
    return kernel("attention", params, {**axes, s: (keys, LOOP)}, loop, store)


def _attention_gradients(
    heads: int, queries: int, keys: int, width: int, dtype: torch.dtype, causal: bool, at: tuple[sympy.Symbol, ...]
) -> tuple[tuple[Param, ...], tuple[Fold, Fold], tuple[Expr, Expr], Expr | None]:
    """The common part of both backward kernels for a query and a key: params, (scores, dp), (p, ds) in `dtype`,
    visibility
    """
    d, e, query, key = at
    row, column = width * (queries * b + query), width * (keys * b + key)
    scores = (load("q", row + d, dtype), load("k", column + d, dtype))
    slopes = (load("do", row + e, dtype), load("v", column + e, dtype))
    scores_fold = Fold("scores", "dot", scores, (d,), F32, (query,), (key,))
    slopes_fold = Fold("slopes", "dot", slopes, (e,), F32, (query,), (key,))
    share = op("exp", op("sub", op("mul", scores_fold.ref, const(0.25, F32)), load("lse", queries * b + query)))
    where = None
    if causal:
        where = visible_keys(query, key, shift=keys - queries)
        share = op("where", where, share, const(0.0, F32))
    slope = op("mul", op("sub", slopes_fold.ref, load("delta", queries * b + query)), const(0.25, F32))
    params = (
        *(param("q", dtype, heads, queries, width), param("k", dtype, heads, keys, width)),
        *(param("v", dtype, heads, keys, width), param("do", dtype, heads, queries, width)),
        *(param("lse", F32, heads, queries), param("delta", F32, heads, queries)),
    )
    return (
        params,
        (scores_fold, slopes_fold),
        (narrowed(share, dtype), narrowed(op("mul", share, slope), dtype)),
        where,
    )


def attention_dkv(
    heads: int, queries: int, keys: int, width: int, *, dtype: torch.dtype = F16, causal: bool = False
) -> Kernel:
    """Gradients of k and v: a loop over the queries, four products, the last two of a product of the first two"""
    d, e, s = over_symbol(0), over_symbol(1), over_symbol(2)
    params, folds, (share, slope), where = _attention_gradients(
        heads, queries, keys, width, dtype, causal, (d, e, s, j)
    )
    row = width * (queries * b + s)
    dv = Fold("dv", "dot", (share, load("do", row + e, dtype)), (s,), F32, (j,), (e,))
    dk = Fold("dk", "dot", (slope, load("q", row + d, dtype)), (s,), F32, (j,), (d,))
    params = (*params, *(param(f"d{name}", dtype, heads, keys, width, written=True) for name in ("k_out", "v_out")))
    column = width * (keys * b + j)
    stores = (
        Store("dk_out", column + d, narrowed(dk.ref, dtype)),
        Store("dv_out", column + e, narrowed(dv.ref, dtype)),
    )
    axes = {b: (heads, GRID), j: (keys, GRID), d: (width, WHOLE), e: (width, WHOLE), s: (queries, LOOP)}
    return kernel("attention_dkv", params, axes, Loop((s,), (*folds, dv, dk), where), *stores)


def attention_dq(
    heads: int, queries: int, keys: int, width: int, *, dtype: torch.dtype = F16, causal: bool = False
) -> Kernel:
    """The gradient of q: a loop over the keys, three products"""
    d, e, s = over_symbol(0), over_symbol(1), over_symbol(2)
    params, folds, (_, slope), where = _attention_gradients(heads, queries, keys, width, dtype, causal, (d, e, i, s))
    dq = Fold("dq", "dot", (slope, load("k", width * (keys * b + s) + d, dtype)), (s,), F32, (i,), (d,))
    params = (*params, param("dq_out", dtype, heads, queries, width, written=True))
    store = Store("dq_out", width * (queries * b + i) + d, narrowed(dq.ref, dtype))
    axes = {b: (heads, GRID), i: (queries, GRID), d: (width, WHOLE), e: (width, WHOLE), s: (keys, LOOP)}
    return kernel("attention_dq", params, axes, Loop((s,), (*folds, dq), where), store)


def linear_logsumexp(rows: int, vocabulary: int, features: int, dtype: torch.dtype = BF16) -> Kernel:
    """log Σ exp(x · wᵀ) and the logit of a label, in one loop over the vocabulary around the loop of the product"""
    s = over_symbol(2)
    logits = Fold(
        "logits", "dot", (load("x", features * i + r, dtype), load("w", features * s + r, dtype)), (r,), F32, (i,), (s,)
    )
    top, whole, _, _ = running_softmax(logits.ref, s)
    is_label = op("eq", IndexValue(s), load("labels", i, I64))
    label = Fold("label", "sum", (op("where", is_label, logits.ref, const(0.0, F32)),), (s,), F32)
    params = (
        *(param("x", dtype, rows, features), param("w", dtype, vocabulary, features), param("labels", I64, rows)),
        *(param("lse", F32, rows, written=True), param("picked", F32, rows, written=True)),
    )
    axes = {i: (rows, GRID), r: (features, LOOP), s: (vocabulary, LOOP)}
    loop = Loop((s,), (Loop((r,), (logits,)), top, whole, label))
    stores = (Store("lse", i, op("add", top.ref, op("log", whole.ref))), Store("picked", i, label.ref))
    return kernel("linear_logsumexp", params, axes, loop, *stores)


def linear_logsumexp_parts(rows: int, parts: int, columns: int, features: int, dtype: torch.dtype = BF16) -> Kernel:
    """max x · wᵀ and Σ exp(x · wᵀ - max) of each part of the columns, one per program"""
    s = over_symbol(1)
    given = load("x", features * i + r, dtype), load("w", features * (columns * j + s) + r, dtype)
    logits = Fold("logits", "dot", given, (r,), F32, (i,), (j, s))
    top, whole, _, _ = running_softmax(logits.ref, s)
    params = (
        *(param("x", dtype, rows, features), param("w", dtype, parts * columns, features)),
        *(param("tops", F32, rows, parts, written=True), param("wholes", F32, rows, parts, written=True)),
    )
    axes = {i: (rows, GRID), j: (parts, GRID), s: (columns, LOOP), r: (features, WHOLE)}
    stores = (Store("tops", parts * i + j, top.ref), Store("wholes", parts * i + j, whole.ref))
    return kernel("linear_logsumexp_parts", params, axes, Loop((s,), (logits, top, whole)), *stores)
