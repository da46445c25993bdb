"""Kernels that fold, scan or scatter along an axis."""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch

from fusion.lowering.indexing import ZERO
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, Load, Random, const, rewrite
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Prefix, Role, Stmt, Store
from tests.codegen.kernels.attention import running_softmax, visible_keys
from tests.codegen.kernels.making import BF16, BOOL, F32, GRID, I64, LOOP, WHOLE, i, j, kernel, load, param, q, r

# Reductions -----------------------------------------------------------------------------------------------------------


def scattered(name: str, sources: int, rows: int, columns: int, dtype: torch.dtype = F32, role: Role = GRID) -> Kernel:
    """out[at[i], j] op= x[i, j] where at[i] < 3; the sources are spread over programs or looped over."""
    source = i if role is GRID else r
    at = load("at", source, I64)
    offset = op("add", op("mul", at, IndexValue(sympy.Integer(columns))), IndexValue(j))
    held = op("lt", at, const(3, I64))
    update = Store("out", offset, load("x", columns * source + j, dtype), name, (source, j), held)
    x, out = param("x", dtype, sources, columns), param("out", dtype, rows, columns, written=True)
    axes: dict[sympy.Symbol, tuple[object, Role]] = {i: (sources, GRID), j: (columns, GRID)}
    if role is not GRID:
        axes = {j: (columns, GRID), r: (sources, role)}
    body = Loop((r,), (update,)) if role is LOOP else update
    return kernel(f"scatter_{name}", (x, param("at", I64, sources), out), axes, body)


def softmax(rows: int | sympy.Expr, columns: int | sympy.Expr, role: Role, dtype: torch.dtype = F32) -> Kernel:
    """Three loops over each row, or the row held whole"""
    offset = columns * i + r
    x: Expr = load("x", offset, dtype)
    x = x if dtype is F32 else Cast(x, F32)
    top = Fold("top", "max", (x,), (r,), F32)
    power = op("exp", op("sub", x, top.ref))
    total = Fold("total", "sum", (power,), (r,), F32)
    value = op("truediv", power, total.ref)
    store = Store("out", offset, value if dtype is F32 else Cast(value, dtype))
    body: tuple[Stmt, ...] = (top, total, store)
    if role is LOOP:
        body = tuple(Loop((r,), (stmt,)) for stmt in body)
    params = (param("x", dtype, rows, columns), param("out", dtype, rows, columns, written=True))
    return kernel("softmax", params, {i: (rows, GRID), r: (columns, role)}, *body)


def dropped(rows: int, columns: int, role: Role) -> Kernel:
    """The elements of each row that random numbers keep, less their sum"""
    offset = columns * i + r
    kept = op("lt", Random("uniform", load("seed", 0, I64), offset), const(0.75, F32))
    value = op("mul", load("x", offset), Cast(kept, F32))
    total = Fold("total", "sum", (value,), (r,), F32)
    body: tuple[Stmt, ...] = (total, Store("out", offset, op("sub", value, total.ref)))
    if role is LOOP:
        body = tuple(Loop((r,), (stmt,)) for stmt in body)
    params = (param("x", F32, rows, columns), param("seed", I64), param("out", F32, rows, columns, written=True))
    return kernel("dropped", params, {i: (rows, GRID), r: (columns, role)}, *body)


def shifted_softmax(rows: int, columns: int, apart: int, results: int, first: int, dtype: torch.dtype) -> Kernel:
    """Softmax over a part of each row: rows of x are `apart`, those of the result `results`, parts begin at `first`"""
    whole = softmax(rows, columns, LOOP, dtype)
    offset, moved = columns * i + r, {columns * i + r: first + apart * i + r}

    def from_part(node: Expr) -> Expr | None:
        return Load("x", (moved[offset],), dtype) if isinstance(node, Load) else None

    def rebuilt(stmt: Stmt) -> Stmt:
        if isinstance(stmt, Loop):
            return replace(stmt, body=tuple(rebuilt(inner) for inner in stmt.body))
        if isinstance(stmt, Fold):
            return replace(stmt, args=tuple(rewrite(stmt.args, from_part)))
        assert isinstance(stmt, Store)
        return replace(stmt, value=rewrite([stmt.value], from_part)[0], offset=results * i + r)

    params = (param("x", dtype, rows + 1, apart), param("out", dtype, rows, results, written=True))
    return replace(whole, name="shifted_softmax", params=params, body=tuple(rebuilt(stmt) for stmt in whole.body))


def column_softmax(rows: int, columns: int) -> Kernel:
    """Softmax down the columns of [rows, columns], which are declared WHOLE"""
    offset = columns * r + i
    top = Fold("top", "max", (load("x", offset),), (r,), F32)
    power = op("exp", op("sub", load("x", offset), top.ref))
    total = Fold("total", "sum", (power,), (r,), F32)
    params = (param("x", F32, rows, columns), param("top", F32, columns, written=True))
    params = (*params, param("out", F32, rows, columns, written=True))
    stores = (Store("top", i, top.ref), Store("out", offset, op("truediv", power, total.ref)))
    return kernel("column_softmax", params, {i: (columns, GRID), r: (rows, WHOLE)}, top, total, *stores)


def column_shift(rows: int, columns: int, dtype: torch.dtype = F32) -> Kernel:
    """Columns of [rows, columns] less their maximum, transposed; and as they are"""
    x = load("x", columns * r + i, dtype)
    top = Fold("top", "max", (x,), (r,), dtype)
    value = op("sub", x, top.ref)
    params = (param("x", dtype, rows, columns), param("out", dtype, columns, rows, written=True))
    params = (*params, param("same", dtype, rows, columns, written=True))
    stores = (Store("out", rows * i + r, value), Store("same", columns * r + i, value))
    return kernel("column_shift", params, {i: (columns, GRID), r: (rows, WHOLE)}, top, *stores)


def layernorm(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    """Two dependent folds over a whole row, then scale and shift"""
    offset = columns * i + r
    x = Cast(load("x", offset, dtype), F32)
    total = Fold("total", "sum", (x,), (r,), F32)
    centred = op("sub", x, op("mul", total.ref, const(1 / columns, F32)))
    squares = Fold("squares", "sum", (op("mul", centred, centred),), (r,), F32)
    scale = op("rsqrt", op("add", op("mul", squares.ref, const(1 / columns, F32)), const(1e-5, F32)))
    value = op("mul", op("mul", centred, scale), Cast(load("weight", r, dtype), F32))
    value = op("add", value, Cast(load("bias", r, dtype), F32))
    params = (
        *(param("x", dtype, rows, columns), param("weight", dtype, columns), param("bias", dtype, columns)),
        *(param("out", dtype, rows, columns, written=True), param("mean", F32, rows, written=True)),
    )
    stores = (Store("out", offset, Cast(value, dtype)), Store("mean", i, op("mul", total.ref, const(1 / columns, F32))))
    return kernel("layernorm", params, {i: (rows, GRID), r: (columns, WHOLE)}, total, squares, *stores)


def fold(name: str, rows: int, columns: int, role: Role, dtype: torch.dtype = F32, *, along: int = 1) -> Kernel:
    """One fold along either dimension of [rows, columns]"""
    kept, folded = (rows, columns) if along == 1 else (columns, rows)
    offset = columns * i + r if along == 1 else columns * r + i
    args: tuple[Expr, ...] = (load("x", offset, dtype),)
    result = dtype
    if name in ("argmax", "argmin"):
        args, result = (*args, IndexValue(r)), I64
    f = Fold("f", name, args, (r,), result)
    params = (param("x", dtype, rows, columns), param("out", result, kept, written=True))
    body: tuple[Stmt, ...] = (Loop((r,), (f,)),) if role is LOOP else (f,)
    return kernel(f"fold_{name}", params, {i: (kept, GRID), r: (folded, role)}, *body, Store("out", i, f.ref))


def scan(name: str, rows: int, columns: int, role: Role, dtype: torch.dtype = F32, *, along: int = 1) -> Kernel:
    """One scan along either dimension of [rows, columns]; of extremes, values and positions"""
    kept, looped = (rows, columns) if along == 1 else (columns, rows)
    offset = columns * i + r if along == 1 else columns * r + i
    x = load("x", offset, dtype)
    results = [Prefix("p", name, (x,), r, dtype)]
    if name in ("max", "min"):
        place = Prefix("q", f"arg{name}", (x, IndexValue(r)), r, I64)
        results = [place, *results] if along == 0 else [*results, place, replace(results[0], name="again")]
    params = [param(f"out{k}", f.dtype, rows, columns, written=True) for k, f in enumerate(results)]
    stores = [Store(f"out{k}", offset, f.ref) for k, f in enumerate(results)]
    body: tuple[Stmt, ...] = (*results, *stores)
    body = (Loop((r,), body),) if role is LOOP else body
    axes = {i: (kept, GRID), r: (looped, role)}
    return kernel(f"scan_{name}", (param("x", dtype, rows, columns), *params), axes, *body)


def scan_normalised(rows: int, columns: int, role: Role) -> Kernel:
    """A scan of exponentials relative to the row's maximum, divided by its own sum: before and after it are folds"""
    offset = columns * i + r
    top = Fold("top", "max", (load("x", offset),), (r,), F32)
    args = (op("exp", op("sub", load("x", offset), top.ref)),)
    p, again = (Prefix(name, "sum", args, r, F32) for name in ("p", "again"))
    total = Fold("total", "sum", (p.ref,), (r,), F32)
    params = (param("x", F32, rows, columns), param("out", F32, rows, columns, written=True))
    last = again if role is LOOP else p
    store = Store("out", offset, op("truediv", last.ref, total.ref))
    body: tuple[Stmt, ...] = (top, p, total, store)
    if role is LOOP:
        body = (Loop((r,), (top,)), Loop((r,), (p, total)), Loop((r,), (again, store)))
    return kernel("scan_normalised", params, {i: (rows, GRID), r: (columns, role)}, *body)


def count(rows: int, columns: int) -> Kernel:
    """How many columns each row has, and how many elements are 0: folds of values that do not vary along the fold"""
    ones = Fold("ones", "sum", (const(1.0, F32),), (r,), F32)
    zero = Cast(op("eq", load("x", columns * i + r, I64), const(0, I64)), I64)
    zeros = Fold("zeros", "sum", (zero,), (r,), I64)
    params = (
        param("x", I64, rows, columns),
        param("ones", F32, rows, written=True),
        param("zeros", I64, rows, written=True),
    )
    axes = {i: (rows, GRID), r: (columns, WHOLE)}
    return kernel("count", params, axes, ones, zeros, Store("ones", i, ones.ref), Store("zeros", i, zeros.ref))


def two_folds(rows: int, columns: int) -> Kernel:
    """Folds over different axes of a tile that is held whole: row maxima, then the sum of these"""
    x = load("x", columns * r + q)
    rowmax = Fold("rowmax", "max", (x,), (q,), F32)
    total = Fold("total", "sum", (rowmax.ref,), (r,), F32)
    params = (param("x", F32, rows, columns), param("top", F32, rows, written=True), param("out", F32, written=True))
    axes = {r: (rows, WHOLE), q: (columns, WHOLE)}
    stores = (Store("top", r, rowmax.ref), Store("out", ZERO, total.ref))
    return kernel("two_folds", params, axes, rowmax, total, *stores)


def norm_backward(rows: int, columns: int) -> Kernel:
    """A fold over a WHOLE axis of columns, inside a loop over rows with a second sum"""
    x, g = load("x", columns * r + q), load("g", columns * r + q)
    dot = Fold("inner", "sum", (op("mul", x, g),), (q,), F32)
    dw = Fold("dw", "sum", (op("mul", g, dot.ref),), (r,), F32)
    dx = Store("dx", columns * r + q, op("mul", x, dot.ref))
    params = (
        *(param("x", F32, rows, columns), param("g", F32, rows, columns)),
        *(param("dx", F32, rows, columns, written=True), param("dw", F32, columns, written=True)),
    )
    axes = {r: (rows, LOOP), q: (columns, WHOLE)}
    return kernel("norm_backward", params, axes, Loop((r,), (dot, dw, dx)), Store("dw", q, dw.ref))


def grouped_mean(batch: int, channels: int, size: int) -> Kernel:
    """Mean over channels and positions of [batch, channels, size] per half of the channels: several reduced axes"""
    whole = sums_of_half_the_channels(batch, channels, size)
    fold, store = whole.body
    assert isinstance(fold, Fold)
    assert isinstance(store, Store)
    value = op("mul", fold.ref, const(1 / (channels // 2 * size), F32))
    return replace(whole, name="grouped_mean", body=(fold, replace(store, value=value)))


def sums_of_half_the_channels(batch: int, channels: int, size: int) -> Kernel:
    """Sum over channels and positions of [batch, channels, size] per half of the channels: either axis may be empty"""
    half = channels // 2
    x = load("x", channels * size * i + half * size * j + size * r + q)
    total = Fold("total", "sum", (x,), (r, q), F32)
    params = (param("x", F32, batch, channels, size), param("out", F32, batch, 2, written=True))
    axes = {i: (batch, GRID), j: (2, GRID), r: (half, WHOLE), q: (size, WHOLE)}
    return kernel("sums_of_half_the_channels", params, axes, total, Store("out", 2 * i + j, total.ref))


def total(n: int, parts: int) -> Kernel:
    """A sum over everything: partial sums in the grid, then one program"""
    step = n // parts
    part = Fold("part", "sum", (load("x", step * i + r),), (r,), F32)
    params = (param("x", F32, n), param("parts", F32, parts, written=True), param("out", F32, written=True))
    first = kernel("partial", params, {i: (parts, GRID), r: (step, WHOLE)}, part, Store("parts", i, part.ref))
    whole = Fold("whole", "sum", (load("parts", r),), (r,), F32)
    last = kernel("last", params[1:], {r: (parts, WHOLE)}, whole, Store("out", ZERO, whole.ref))
    return replace(first, then=last)


def column_totals(rows: int, columns: int, parts: int) -> Kernel:
    """Column sums in three steps of one launch: partial ones in the grid, their sum, and the largest column"""
    step = rows // parts
    part = Fold("part", "sum", (load("x", columns * (step * i + r) + j),), (r,), F32)
    params = (
        *(param("x", F32, rows, columns), param("parts", F32, parts, columns, written=True)),
        *(param("sums", F32, columns, written=True), param("out", F32, written=True)),
    )
    axes = {i: (parts, GRID), j: (columns, GRID), r: (step, WHOLE)}
    first = kernel("column_totals", params, axes, part, Store("parts", columns * i + j, part.ref))
    whole = Fold("whole", "sum", (load("parts", columns * r + q),), (r,), F32)
    sums = kernel("sums", params[1:3], {r: (parts, WHOLE), q: (columns, WHOLE)}, whole, Store("sums", q, whole.ref))
    top = Fold("top", "max", (load("sums", q),), (q,), F32)
    largest = kernel("largest", params[2:], {q: (columns, WHOLE)}, top, Store("out", ZERO, top.ref))
    return replace(first, then=replace(sums, then=largest))


# Contractions ---------------------------------------------------------------------------------------------------------


def online_logsumexp(rows: int, columns: int) -> Kernel:
    """log Σ exp(x) of rows in one loop"""
    top, whole, _, _ = running_softmax(load("x", columns * i + r), r)
    params = (param("x", F32, rows, columns), param("out", F32, rows, written=True))
    store = Store("out", i, op("add", top.ref, op("log", whole.ref)))
    return kernel("online_logsumexp", params, {i: (rows, GRID), r: (columns, LOOP)}, Loop((r,), (top, whole)), store)


def online_softmax(rows: int, columns: int, apart: int = 0, dtype: torch.dtype = F32) -> Kernel:
    """exp(x) / Σ exp(x) of rows in two loops; rows have the stride `apart`, or are contiguous"""
    apart = apart or columns
    offset = apart * i + r
    x: Expr = load("x", offset, dtype)
    top, whole, power, _ = running_softmax(x if dtype is F32 else Cast(x, F32), r)
    params = (param("x", dtype, rows, apart), param("out", dtype, rows, apart, written=True))
    value = op("truediv", power, whole.ref)
    store = Store("out", offset, value if dtype is F32 else Cast(value, dtype))
    axes = {i: (rows, GRID), r: (columns, LOOP)}
    return kernel("online_softmax", params, axes, Loop((r,), (top, whole)), Loop((r,), (store,)))


def partial_sums(rows: int, columns: int, window: int) -> Kernel:
    """Sums of the last `window` elements up to the diagonal: a loop that skips, without a contraction"""
    where = visible_keys(i, r, shift=0, window=window)
    part = Fold("part", "sum", (op("where", where, load("x", columns * i + r), const(0.0, F32)),), (r,), F32)
    params = (param("x", F32, rows, columns), param("out", F32, rows, written=True))
    axes = {i: (rows, GRID), r: (columns, LOOP)}
    return kernel("partial_sums", params, axes, Loop((r,), (part,), where), Store("out", i, part.ref))


def running_folds(rows: int, columns: int) -> Kernel:
    """Folds of every kind in a loop that needs two running values: a count of elements, halved once one is not small"""
    x, n = load("x", columns * i + r, BF16), load("n", columns * i + r, I64)
    least, most = Fold("least", "min", (n,), (r,), I64), Fold("most", "max", (x,), (r,), BF16)
    negative = Fold("negative", "any", (op("lt", x, const(0.0, BF16)),), (r,), BOOL)
    small = Fold("small", "all", (op("lt", n, const(3, I64)),), (r,), BOOL)
    half = op("where", small.ref, const(1.0, F32), const(0.5, F32))
    count = Fold("count", "sum", (half,), (r,), F32)
    before = op("where", op("eq", small.before, small.ref), const(1.0, F32), const(0.5, F32))
    count = replace(count, carry=op("mul", count.before, before))
    product = Fold("product", "prod", (op("add", Cast(n, F32), const(1.0, F32)),), (r,), F32)
    folds = (least, most, negative, small, count, product)
    names = {"least": I64, "most": BF16, "negative": BOOL, "small": BOOL, "count": F32, "product": F32}
    params = (param("x", BF16, rows, columns), param("n", I64, rows, columns))
    params = (*params, *(param(f"{name}_out", dtype, rows, written=True) for name, dtype in names.items()))
    stores = (Store(f"{fold.name}_out", i, fold.ref) for fold in folds)
    return kernel("running_folds", params, {i: (rows, GRID), r: (columns, LOOP)}, Loop((r,), folds), *stores)


def total_of_rows(rows: sympy.Expr, columns: int) -> Kernel:
    """Row sums, then the sum of these: with symbolic `rows`, a size is passed on"""
    part = Fold("part", "sum", (load("x", columns * i + r),), (r,), F32)
    params = (param("x", F32, rows, columns), param("sums", F32, rows, written=True), param("out", F32, written=True))
    axes = {i: (rows, GRID), r: (columns, WHOLE)}
    first = kernel("row_sums", params, axes, part, Store("sums", i, part.ref))
    whole = Fold("whole", "sum", (load("sums", r),), (r,), F32)
    last = kernel("last", params[1:], {r: (rows, LOOP)}, Loop((r,), (whole,)), Store("out", ZERO, whole.ref))
    return replace(first, then=last)
