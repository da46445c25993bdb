"""Kernels of every kind the Triton target knows, written by hand in the IR, and what they should give.

The reference evaluator gives the expected values.  The same builders make small kernels for Triton's interpreter and
larger ones for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import sympy
import torch

from lowering.expr import Cast, Expr, IndexValue, Load, Op, Random, const
from lowering.indexing import ZERO, FloorDiv, axis_symbol, over_symbol
from lowering.interpret import run_kernel
from lowering.kernel import Fold, Kernel, KernelAxis, Loop, Param, Prefix, Role, Stmt, Store, rename
from lowering.scalar_ops import SCALAR_OPS, result_dtype

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
I8, I32, I64, BOOL = torch.int8, torch.int32, torch.int64, torch.bool
GRID, LOOP, WHOLE = Role.GRID, Role.LOOP, Role.WHOLE


def param(
    name: str, dtype: torch.dtype, *shape: int | sympy.Expr, written: bool = False, aligned: bool = True
) -> Param:
    """A contiguous tensor parameter."""
    sizes = tuple(sympy.sympify(size) for size in shape)
    strides = tuple(sympy.Mul(*sizes[k + 1 :]) for k in range(len(sizes)))
    return Param(name, dtype, sizes, strides, written, aligned)


def load(name: str, offset: sympy.Expr | Expr | int, dtype: torch.dtype = F32, mask: Expr | None = None) -> Load:
    return Load(name, (offset if isinstance(offset, Expr) else sympy.sympify(offset),), dtype, mask)


def op(name: str, *args: Expr) -> Expr:
    return Op(name, args, result_dtype(name, args[-1].dtype))


def narrowed(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` in `dtype`."""
    return value if value.dtype is dtype else Cast(value, dtype)


def kernel(name: str, params: Sequence[Param], axes: dict[sympy.Symbol, tuple[object, Role]], *body: Stmt) -> Kernel:
    """A kernel; sizes are the free symbols of its axes."""
    listed = tuple(KernelAxis(symbol, sympy.sympify(size), role) for symbol, (size, role) in axes.items())
    sizes = sorted({s for axis in listed for s in axis.size.free_symbols}, key=str)
    return Kernel(name, tuple(params), tuple(sizes), listed, body)


def tensors(
    kernel: Kernel, device: str = "cpu", seed: int = 0, sizes: dict[sympy.Symbol, int] | None = None
) -> list[torch.Tensor]:
    """Random tensors for the params, integers in [0, 4) so that any of them is an index; written ones are empty."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for p in kernel.params:
        shape = [int(size.subs(sizes or {})) for size in p.shape]
        if p.dtype is BOOL:
            value = torch.rand(shape, generator=generator) > 0.5
        elif p.dtype.is_floating_point:
            value = torch.randn(shape, generator=generator, dtype=F64).to(p.dtype)
        else:
            value = torch.randint(0, 4, shape, generator=generator, dtype=p.dtype)
        made.append(value.to(device))
    return made


def special(name: str, dtype: torch.dtype, n: int) -> list[torch.Tensor] | None:
    """Operands for scalar operation `name` with all the values that are easy to get wrong; None where eager has none.

    What eager leaves undefined is left out: integer division by zero, and of the least integer by -1.
    """
    generator = torch.Generator().manual_seed(0)
    operands = []
    for k in range(SCALAR_OPS[name].arity):
        if dtype is BOOL or (name == "where" and k == 0):
            operands.append(torch.rand(n, generator=generator) > 0.5)
        elif dtype.is_floating_point:
            x = torch.randn(n, generator=generator, dtype=F64) * 3
            picks = torch.randint(0, len(_FLOATS), (n,), generator=generator)
            operands.append(torch.where(torch.arange(n) % 2 == 0, torch.tensor(_FLOATS)[picks].double(), x).to(dtype))
        else:
            info = torch.iinfo(dtype)
            x = torch.randint(-20 if info.min < 0 else 0, 20, (n,), generator=generator).to(dtype)
            x[k::7], x[3 + k :: 11] = info.max, info.min
            operands.append(x)
    if name in ("floordiv", "truncdiv", "remainder", "fmod") and not dtype.is_floating_point:
        if dtype is BOOL:
            return None
        bad = (operands[1] == 0) | ((operands[1] == -1) if torch.iinfo(dtype).min < 0 else False)
        operands[1] = torch.where(bad, 1, operands[1])
    if dtype is BOOL and name in ("pow", "shl", "shr"):
        return None
    try:
        result = SCALAR_OPS[name].meaning(*operands)
    except (RuntimeError, NotImplementedError):
        return None
    kept = BOOL if SCALAR_OPS[name].result == "bool" else dtype
    return operands if result.dtype is kept else None


_FLOATS = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 0.5, 2.5, -2.5, 80.0, -80.0, 3.0, -3.0, 1.5]


def expected(kernel: Kernel, given: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> list[torch.Tensor]:
    """What `given` should be after a launch."""
    found = [tensor.clone() for tensor in given]
    known = dict(zip(kernel.sizes, sizes, strict=True))
    at = {p.name: tensor for p, tensor in zip(kernel.params, found, strict=True)}
    step: Kernel | None = kernel
    while step is not None:
        of = [at[p.name] for p in step.params]
        run_kernel(replace(step, then=None), of, [known[size] for size in step.sizes])
        step = step.then
    return found


TOLERANCE = {F16: 2e-3, BF16: 1.6e-2, F32: 2e-6, F64: 1e-13}


def assert_same(kernel: Kernel, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], factor: float = 1.0) -> None:
    """Tensors agree to the last few bits of their dtype, sums to those of the numbers that were added.

    A sum of n numbers of size 1 is of size √n.  Results beyond that are products of sums: one that is near 0, because a
    factor is, still has the error of that factor times the other one.
    """
    reduced = [int(axis.size) for axis in kernel.axes if axis.role is not GRID and axis.size.is_Integer]
    sums = math.sqrt(math.prod(reduced))
    for p, a, b in zip(kernel.params, got, want, strict=True):
        rtol = atol = TOLERANCE.get(p.dtype, 0.0) * factor * (1 + sums)
        if p.written and b.is_floating_point() and b.isfinite().any():
            size = float(b[b.isfinite()].double().square().mean().sqrt())
            atol *= max(1.0, size / max(1.0, sums))
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m, p=p: f"{p.name}: {m}")


# Pointwise ------------------------------------------------------------------------------------------------------------

i, j, b = axis_symbol(0), axis_symbol(1), axis_symbol(2)
r, q = over_symbol(0), over_symbol(1)


def add(n: int | sympy.Expr, dtype: torch.dtype = F32) -> Kernel:
    """out = x + y"""
    value = op("add", load("x", i, dtype), load("y", i, dtype))
    params = (param("x", dtype, n), param("y", dtype, n), param("out", dtype, n, written=True))
    return kernel("add", params, {i: (n, GRID)}, Store("out", i, value))


def scalar(name: str, dtype: torch.dtype, n: int) -> Kernel:
    """out = op(x, y, …) with scalar operation `name`"""
    arity = SCALAR_OPS[name].arity
    dtypes = [BOOL, dtype, dtype] if name == "where" else [dtype] * arity
    args = [load(f"x{k}", i, d) for k, d in enumerate(dtypes)]
    value = op(name, *args)
    params = [param(f"x{k}", d, n) for k, d in enumerate(dtypes)]
    return kernel(
        f"op_{name}", [*params, param("out", value.dtype, n, written=True)], {i: (n, GRID)}, Store("out", i, value)
    )


def convert(source: torch.dtype, target: torch.dtype, n: int) -> Kernel:
    """out = x converted"""
    params = (param("x", source, n), param("out", target, n, written=True))
    return kernel("convert", params, {i: (n, GRID)}, Store("out", i, Cast(load("x", i, source), target)))


def bias_gelu(rows: int, columns: int, dtype: torch.dtype) -> Kernel:
    """A row is added to each row, then a tanh GELU: one row broadcast, shared sub-expressions, 16-bit storage"""
    x = op("add", Cast(load("x", columns * i + j, dtype), F32), Cast(load("bias", j, dtype), F32))
    cube = op("mul", op("mul", x, x), x)
    inner = op("mul", op("add", x, op("mul", cube, const(0.044715, F32))), const(0.7978845608, F32))
    value = op("mul", op("mul", x, const(0.5, F32)), op("add", op("tanh", inner), const(1.0, F32)))
    params = (param("x", dtype, rows, columns), param("bias", dtype, columns))
    params = (*params, param("out", dtype, rows, columns, written=True))
    axes = {i: (rows, GRID), j: (columns, GRID)}
    return kernel("bias_gelu", params, axes, Store("out", columns * i + j, Cast(value, dtype)))


def transposed_add(rows: int, columns: int) -> Kernel:
    """out = x + yᵀ"""
    value = op("add", load("x", columns * i + j), load("y", rows * j + i))
    params = (
        param("x", F32, rows, columns),
        param("y", F32, columns, rows),
        param("out", F32, rows, columns, written=True),
    )
    axes = {i: (rows, GRID), j: (columns, GRID)}
    return kernel("transposed_add", params, axes, Store("out", columns * i + j, value))


def permuted(heads: int, length: int, width: int) -> Kernel:
    """[length, heads, width] → [heads, length, width]: digits of a linear index"""
    value = load("x", heads * width * j + width * i + b)
    params = (param("x", F32, length, heads, width), param("out", F32, heads, length, width, written=True))
    axes = {i: (heads, GRID), j: (length, GRID), b: (width, GRID)}
    return kernel("permuted", params, axes, Store("out", length * width * i + width * j + b, value))


def padded(n: int, before: int, after: int) -> Kernel:
    """x with zeros before and after: a masked load"""
    position = IndexValue(i - before)
    inside = op("and", op("ge", position, const(0, I64)), op("lt", position, const(n, I64)))
    value = op("add", load("x", i - before, F32, inside), const(1.0, F32))
    total = n + before + after
    return kernel(
        "padded",
        (param("x", F32, n), param("out", F32, total, written=True)),
        {i: (total, GRID)},
        Store("out", i, value),
    )


def gather(rows: int, width: int) -> Kernel:
    """out[i] = table[ids[i]]"""
    row = op("mul", load("ids", i, I64), const(width, I64))
    value = load("table", op("add", row, IndexValue(j)))
    params = (param("ids", I64, rows), param("table", F32, 4, width), param("out", F32, rows, width, written=True))
    axes = {i: (rows, GRID), j: (width, GRID)}
    return kernel("gather", params, axes, Store("out", width * i + j, value))


def flipped(n: int) -> Kernel:
    """out[n - 1 - i] = x[i]: a store at computed positions"""
    position = op("sub", const(n - 1, I64), IndexValue(i))
    return kernel(
        "flipped",
        (param("x", F32, n), param("out", F32, n, written=True)),
        {i: (n, GRID)},
        Store("out", position, load("x", i)),
    )


def causal(n: int) -> Kernel:
    """x where the column is not after the row, else -inf: positions are compared in int32"""
    visible = op("le", IndexValue(j), IndexValue(i))
    value = op("where", visible, load("x", n * i + j), const(float("-inf"), F32))
    params = (param("x", F32, n, n), param("out", F32, n, n, written=True))
    return kernel("causal", params, {i: (n, GRID), j: (n, GRID)}, Store("out", n * i + j, value))


def drawn(n: int, kind: str) -> Kernel:
    """Random numbers from a seed in memory"""
    value = Random(kind, load("seed", 0, I64), i + 5)
    return kernel(
        "drawn", (param("seed", I64), param("out", F32, n, written=True)), {i: (n, GRID)}, Store("out", i, value)
    )


def in_place(n: int) -> Kernel:
    """x = x + y, then out = x as it is now"""
    params = (param("x", F32, n, written=True), param("y", F32, n), param("out", F32, n, written=True))
    first = Store("x", i, op("add", load("x", i), load("y", i)))
    return kernel("in_place", params, {i: (n, GRID)}, first, Store("out", i, op("mul", load("x", i), const(2.0, F32))))


# Reductions -----------------------------------------------------------------------------------------------------------


def scattered(name: str, sources: int, rows: int, columns: int, dtype: torch.dtype = F32, role: Role = GRID) -> Kernel:
    """out[at[i], j] op= x[i, j] where at[i] < 3; the sources are spread over programs or walked."""
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
    """Three walks over each row, or the row held whole"""
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


def column_softmax(rows: int, columns: int) -> Kernel:
    """Softmax down the columns of [rows, columns], which are said to be held whole"""
    offset = columns * r + i
    top = Fold("top", "max", (load("x", offset),), (r,), F32)
    power = op("exp", op("sub", load("x", offset), top.ref))
    total = Fold("total", "sum", (power,), (r,), F32)
    params = (param("x", F32, rows, columns), param("top", F32, columns, written=True))
    params = (*params, param("out", F32, rows, columns, written=True))
    stores = (Store("top", i, top.ref), Store("out", offset, op("truediv", power, total.ref)))
    return kernel("column_softmax", params, {i: (columns, GRID), r: (rows, WHOLE)}, top, total, *stores)


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
    kept, walked = (rows, columns) if along == 1 else (columns, rows)
    offset = columns * i + r if along == 1 else columns * r + i
    x = load("x", offset, dtype)
    found = [Prefix("p", name, (x,), r, dtype)]
    if name in ("max", "min"):
        place = Prefix("q", f"arg{name}", (x, IndexValue(r)), r, I64)
        found = [place, *found] if along == 0 else [*found, place, replace(found[0], name="again")]
    params = [param(f"out{k}", f.dtype, rows, columns, written=True) for k, f in enumerate(found)]
    stores = [Store(f"out{k}", offset, f.ref) for k, f in enumerate(found)]
    body: tuple[Stmt, ...] = (*found, *stores)
    body = (Loop((r,), body),) if role is LOOP else body
    axes = {i: (kept, GRID), r: (walked, role)}
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
    """A fold over the columns, held whole, inside a loop over rows that sums another one"""
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
    whole = sums_of_halves(batch, channels, size)
    fold, store = whole.body
    assert isinstance(fold, Fold)
    assert isinstance(store, Store)
    value = op("mul", fold.ref, const(1 / (channels // 2 * size), F32))
    return replace(whole, name="grouped_mean", body=(fold, replace(store, value=value)))


def sums_of_halves(batch: int, channels: int, size: int) -> Kernel:
    """Sum over channels and positions of [batch, channels, size] per half of the channels: either axis may be empty"""
    half = channels // 2
    x = load("x", channels * size * i + half * size * j + size * r + q)
    total = Fold("total", "sum", (x,), (r, q), F32)
    params = (param("x", F32, batch, channels, size), param("out", F32, batch, 2, written=True))
    axes = {i: (batch, GRID), j: (2, GRID), r: (half, WHOLE), q: (size, WHOLE)}
    return kernel("sums_of_halves", params, axes, total, Store("out", 2 * i + j, total.ref))


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


def matmul(
    m: int | sympy.Expr,
    n: int,
    k: int | sympy.Expr,
    dtype: torch.dtype = F16,
    *,
    batch: int | sympy.Expr = 1,
    turned: tuple[bool, bool] = (False, False),
    out: torch.dtype | None = None,
) -> Kernel:
    """relu(a · b), any of the operands transposed in memory"""
    sums = I32 if dtype is I8 else F64 if dtype is F64 else F32
    a = load("a", m * k * b + (m * r + i if turned[0] else k * i + r), dtype)
    c = load("b", n * k * b + (k * j + r if turned[1] else n * r + j), dtype)
    dot = Fold("acc", "dot", (a, c), (r,), sums, (i,), (j,))
    value = op("maximum", dot.ref, const(0, sums))
    result = out or (I32 if dtype is I8 else dtype)
    params = (
        param("a", dtype, batch, *((k, m) if turned[0] else (m, k))),
        param("b", dtype, batch, *((n, k) if turned[1] else (k, n))),
        param("out", result, batch, m, n, written=True),
    )
    axes: dict[sympy.Symbol, tuple[object, Role]] = {b: (batch, GRID), i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", m * n * b + n * i + j, value if result is sums else Cast(value, result))
    return kernel("matmul", params, axes, Loop((r,), (dot,)), store)


def linear(m: int, n: int, k: int, dtype: torch.dtype) -> Kernel:
    """silu(x · wᵀ + bias) + residual, x scaled by a norm, rows over two axes: prologue, epilogue, merged axes"""
    half = m // 2
    row = half * i + b
    scaled = op("mul", Cast(load("x", k * row + r, dtype), F32), load("scale", row))
    lhs, rhs = Cast(scaled, dtype), load("w", k * j + r, dtype)
    dot = Fold("acc", "dot", (lhs, rhs), (r,), F32, (i, b), (j,))
    y = op("add", dot.ref, Cast(load("bias", j, dtype), F32))
    gate = op("truediv", y, op("add", const(1.0, F32), op("exp", op("neg", y))))
    value = op("add", gate, Cast(load("residual", n * row + j, dtype), F32))
    params = (
        *(param("x", dtype, m, k), param("scale", F32, m), param("w", dtype, n, k), param("bias", dtype, n)),
        *(param("residual", dtype, m, n), param("out", dtype, m, n, written=True)),
    )
    axes = {i: (2, GRID), b: (half, GRID), j: (n, GRID), r: (k, LOOP)}
    return kernel("linear", params, axes, Loop((r,), (dot,)), Store("out", n * row + j, Cast(value, dtype)))


def residual(m: int | sympy.Expr, n: int, k: int, dtype: torch.dtype = F16, *, over: bool = False) -> Kernel:
    """a · bᵀ + bias + c, perhaps in the memory of c"""
    dot = Fold("acc", "dot", (load("a", k * i + r, dtype), load("b", k * j + r, dtype)), (r,), F32, (i,), (j,))
    terms = (Cast(load("bias", j, dtype), F32), Cast(load("c", n * i + j, dtype), F32))
    total = op("add", op("add", dot.ref, terms[0]), terms[1])
    params = [param("a", dtype, m, k), param("b", dtype, n, k), param("bias", dtype, n)]
    params += [param("c", dtype, m, n, written=over), *([] if over else [param("out", dtype, m, n, written=True)])]
    axes: dict[sympy.Symbol, tuple[object, Role]] = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("c" if over else "out", n * i + j, Cast(total, dtype))
    return kernel("residual", params, axes, Loop((r,), (dot,)), store)


def gathered_rows(m: int, n: int, k: int) -> Kernel:
    """table[ids] · b with exp as prologue: masked lanes would not be 0 by themselves"""
    row = op("mul", load("ids", i, I64), const(k, I64))
    lhs = op("exp", load("table", op("add", row, IndexValue(r))))
    dot = Fold("acc", "dot", (lhs, load("b", n * r + j)), (r,), F32, (i,), (j,))
    params = (
        *(param("ids", I64, m), param("table", F32, 4, k), param("b", F32, k, n)),
        param("out", F32, m, n, written=True),
    )
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    return kernel("gathered_rows", params, axes, Loop((r,), (dot,)), Store("out", n * i + j, dot.ref))


def rms_linear(m: int, n: int, k: int) -> Kernel:
    """(x · w) · rsqrt(mean x²): a sum of squares beside the product, in the same loop"""
    x = load("x", k * i + r, F16)
    wide = Cast(x, F32)
    dot = Fold("acc", "dot", (x, load("w", n * r + j, F16)), (r,), F32, (i,), (j,))
    squares = Fold("squares", "sum", (op("mul", wide, wide),), (r,), F32)
    scale = op("rsqrt", op("add", op("mul", squares.ref, const(1 / k, F32)), const(1e-6, F32)))
    params = (param("x", F16, m, k), param("w", F16, k, n), param("out", F32, m, n, written=True))
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", n * i + j, op("mul", dot.ref, scale))
    return kernel("rms_linear", params, axes, Loop((r,), (dot, squares)), store)


def gated(m: int, n: int, k: int, *, turned: bool = False) -> Kernel:
    """(x · u) ∗ (x · v): two products share an operand; the others may be transposed in memory"""
    x, place = load("x", k * i + r, F16), k * j + r if turned else n * r + j
    first = Fold("up", "dot", (x, load("u", place, F16)), (r,), F32, (i,), (j,))
    second = Fold("gate", "dot", (x, load("v", place, F16)), (r,), F32, (i,), (j,))
    shape = (n, k) if turned else (k, n)
    params = (
        *(param("x", F16, m, k), param("u", F16, *shape), param("v", F16, *shape)),
        param("out", F32, m, n, written=True),
    )
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", n * i + j, op("mul", first.ref, second.ref))
    return kernel("gated", params, axes, Loop((r,), (first, second)), store)


def matmul_softmax(m: int, n: int, k: int) -> Kernel:
    """softmax(a · b) along the columns, which are held whole"""
    a, c = load("a", k * i + r, F16), load("b", n * r + q, F16)
    dot = Fold("acc", "dot", (a, c), (r,), F32, (i,), (q,))
    top = Fold("top", "max", (dot.ref,), (q,), F32)
    power = op("exp", op("sub", dot.ref, top.ref))
    whole = Fold("whole", "sum", (power,), (q,), F32)
    params = (param("a", F16, m, k), param("b", F16, k, n), param("out", F32, m, n, written=True))
    axes = {i: (m, GRID), q: (n, WHOLE), r: (k, LOOP)}
    store = Store("out", n * i + q, op("truediv", power, whole.ref))
    return kernel("matmul_softmax", params, axes, Loop((r,), (dot,)), top, whole, store)


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
    """Which keys a query sees: none after it, of these only the last `window`, and the first `prefix` in any case.

    `shift` keys come before the first query.
    """
    where = op("le", IndexValue(key), IndexValue(query + shift))
    if window:
        where = op("and", where, op("gt", IndexValue(key + window), IndexValue(query + shift)))
    if prefix:
        where = op("or", where, op("lt", IndexValue(key), const(prefix, I64)))
    return where


def running_softmax(scaled: Expr, over: sympy.Symbol) -> tuple[Fold, Fold, Expr, Expr]:
    """The largest so far, the sum of exponentials so far, the exponentials, and what a sum so far is multiplied with"""
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
) -> Kernel:
    """softmax(q · kᵀ · scale) · v in one walk over the keys: running values that are brought up to date block by block.

    `step`: the width is walked too, inside the walk over keys, instead of held whole for the scores.  `group`: so many
    heads of q share one of k and v.
    """
    d, e, s = over_symbol(0), over_symbol(1), over_symbol(2)
    head = FloorDiv(b, group) if group > 1 else b
    query, key = load("q", width * (queries * b + i) + d, dtype), load("k", width * (keys * head + s) + d, dtype)
    scores = Fold("scores", "dot", (query, key), (d,), F32, (i,), (s,))
    scaled, where = op("mul", scores.ref, const(scale, F32)), None
    if causal or window or prefix:
        where = visible_keys(i, s, shift=keys - queries, window=window, prefix=prefix)
        scaled = op("where", where, scaled, LOW)
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
    """What both backward kernels compute for a query and a key: params, (scores, dp), (p, ds) in `dtype`, visibility"""
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
    """Gradients of k and v: a walk over the queries, four products, the last two of a product of the first two"""
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
    """The gradient of q: a walk over the keys, three products"""
    d, e, s = over_symbol(0), over_symbol(1), over_symbol(2)
    params, folds, (_, slope), where = _attention_gradients(heads, queries, keys, width, dtype, causal, (d, e, i, s))
    dq = Fold("dq", "dot", (slope, load("k", width * (keys * b + s) + d, dtype)), (s,), F32, (i,), (d,))
    params = (*params, param("dq_out", dtype, heads, queries, width, written=True))
    store = Store("dq_out", width * (queries * b + i) + d, narrowed(dq.ref, dtype))
    axes = {b: (heads, GRID), i: (queries, GRID), d: (width, WHOLE), e: (width, WHOLE), s: (keys, LOOP)}
    return kernel("attention_dq", params, axes, Loop((s,), (*folds, dq), where), store)


def linear_logsumexp(rows: int, vocabulary: int, features: int, dtype: torch.dtype = BF16) -> Kernel:
    """log Σ exp(x · wᵀ) and the logit of a label, in one walk over the vocabulary with the product walked inside it"""
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


def online_logsumexp(rows: int, columns: int) -> Kernel:
    """log Σ exp(x) of rows in one walk"""
    top, whole, _, _ = running_softmax(load("x", columns * i + r), r)
    params = (param("x", F32, rows, columns), param("out", F32, rows, written=True))
    store = Store("out", i, op("add", top.ref, op("log", whole.ref)))
    return kernel("online_logsumexp", params, {i: (rows, GRID), r: (columns, LOOP)}, Loop((r,), (top, whole)), store)


def partial_sums(rows: int, columns: int, window: int) -> Kernel:
    """Sums of the last `window` elements up to the diagonal: a walk that skips, without a contraction"""
    where = visible_keys(i, r, shift=0, window=window)
    part = Fold("part", "sum", (op("where", where, load("x", columns * i + r), const(0.0, F32)),), (r,), F32)
    params = (param("x", F32, rows, columns), param("out", F32, rows, written=True))
    axes = {i: (rows, GRID), r: (columns, LOOP)}
    return kernel("partial_sums", params, axes, Loop((r,), (part,), where), Store("out", i, part.ref))


def running_folds(rows: int, columns: int) -> Kernel:
    """Folds of every kind in a loop that follows two of them: a count of elements, halved once one is not small"""
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


def matmul_top(m: int, n: int, k: int) -> Kernel:
    """relu(a · b), then the largest of its elements"""
    first = matmul(m, n, k, F16)
    out, top = first.params[-1], param("top", F16, written=True)
    largest = Fold("largest", "max", (load("out", r, F16),), (r,), F16)
    last = kernel("last", (out, top), {r: (m * n, WHOLE)}, largest, Store("top", ZERO, largest.ref))
    return replace(first, name="matmul_top", params=(*first.params, top), then=last)


def packed(name: str, *kernels: Kernel) -> Kernel:
    """Independent kernels in one launch; the parameters of each get its number."""
    parts = []
    for number, one in enumerate(kernels):
        names = {p.name: f"{p.name}_{number}" for p in one.params}
        params = tuple(replace(p, name=names[p.name]) for p in one.params)
        parts.append(replace(one, params=params, body=rename(one.body, names)))
    params = tuple(p for part in parts for p in part.params)
    sizes = tuple(sorted({size for part in parts for size in part.sizes}, key=str))
    return replace(parts[0], name=name, params=params, sizes=sizes, beside=tuple(parts[1:]))


# Tables ---------------------------------------------------------------------------------------------------------------

SMALL: dict[str, Kernel] = {
    "add 7": add(7),
    "add 98432": add(98432),
    "add bf16": add(1000, BF16),
    "bias_gelu f32": bias_gelu(5, 24, F32),
    "bias_gelu bf16": bias_gelu(5, 24, BF16),
    "transposed_add": transposed_add(40, 50),
    "permuted": permuted(3, 5, 8),
    "padded": padded(20, 3, 6),
    "gather": gather(9, 12),
    "flipped": flipped(21),
    "causal": causal(13),
    "uniform": drawn(300, "uniform"),
    "normal": drawn(300, "normal"),
    "in_place": in_place(100),
    "softmax whole": softmax(6, 30, WHOLE),
    "softmax one warp": softmax(3, 200, WHOLE),
    "softmax f16": softmax(6, 32, WHOLE, F16),
    "softmax loop": softmax(2, 3000, LOOP),
    "layernorm f32": layernorm(6, 40, F32),
    "layernorm bf16": layernorm(6, 300, BF16),
    "column sum": fold("sum", 300, 40, LOOP, along=0),
    "column max": fold("max", 10, 40, WHOLE, along=0),
    "column softmax": column_softmax(12, 20),
    "column softmax, tall": column_softmax(1030, 3),
    "count": count(5, 12),
    "scan of columns": scan("sum", 37, 12, WHOLE, along=0),
    "scan of columns, tall": scan("max", 1030, 2, WHOLE, along=0),
    "scan of columns, walked": scan("logsumexp", 90, 5, LOOP, along=0),
    "scan of one": scan("max", 5, 1, WHOLE),
    "scan, normalised": scan_normalised(5, 70, WHOLE),
    "scan, normalised, walked": scan_normalised(3, 70, LOOP),
    **{
        f"scan {name} {str(dtype)[6:]} {role.value}": scan(name, 5, 70, role, dtype)
        for role in (WHOLE, LOOP)
        for name, dtype in (
            *(("sum", F32), ("sum", F64), ("sum", I32), ("sum", I64), ("prod", F32), ("prod", I64)),
            *(("max", F32), ("min", F64), ("max", I32), ("min", I64), ("logsumexp", F32), ("logsumexp", F64)),
        )
    },
    "two_folds": two_folds(6, 10),
    "norm_backward": norm_backward(20, 12),
    "grouped_mean": grouped_mean(3, 4, 10),
    "total": total(4096, 8),
    "column_totals": column_totals(96, 20, 8),
    "matmul ragged": matmul(20, 35, 45),
    "matmul batch": matmul(20, 35, 45, batch=3, turned=(False, True)),
    "matmul row": matmul(1, 35, 45, F32),
    "matmul one k": matmul(20, 35, 1, F32),
    "linear": linear(20, 35, 45, BF16),
    "gathered_rows": gathered_rows(9, 20, 21),
    "rms_linear": rms_linear(20, 35, 45),
    "gated": gated(20, 35, 45),
    "gated turned": gated(20, 35, 45, turned=True),
    "packed pointwise": packed("packed", add(1000), bias_gelu(7, 40, F16), add(3), transposed_add(40, 50)),
    "packed rows": packed("packed", softmax(5, 300, WHOLE), layernorm(3, 700, BF16), fold("sum", 7, 21, WHOLE)),
    "packed walks": packed("packed", softmax(5, 300, LOOP), fold("max", 7, 2100, LOOP)),
    "packed products": packed("packed", matmul(20, 35, 45), matmul(40, 17, 33, batch=2), gated(20, 35, 45)),
    "matmul_softmax": matmul_softmax(20, 35, 45),
    "attention": attention(2, 20, 21, 12),
    "online attention": online_attention(2, 20, 150, 12),
    "online attention bf16": online_attention(2, 33, 70, 40, dtype=BF16),
    "online attention f32": online_attention(2, 20, 41, 24, dtype=F32, causal=True),
    "online attention causal": online_attention(2, 90, 150, 12, causal=True),
    "online attention, more queries": online_attention(1, 150, 70, 12, causal=True),
    "online attention window": online_attention(2, 150, 150, 12, window=20, prefix=5),
    "online attention groups": online_attention(4, 20, 70, 12, group=2),
    "online attention step": online_attention(2, 20, 70, 40, step=1),
    "online attention one query": online_attention(2, 1, 70, 12),
    "online attention one key": online_attention(2, 20, 1, 12),
    "attention_dkv": attention_dkv(2, 70, 37, 12),
    "attention_dkv causal": attention_dkv(2, 150, 90, 12, dtype=BF16, causal=True),
    "attention_dq": attention_dq(2, 37, 70, 12),
    "attention_dq causal": attention_dq(2, 90, 150, 12, dtype=BF16, causal=True),
    "linear_logsumexp": linear_logsumexp(20, 150, 45),
    "online_logsumexp": online_logsumexp(5, 3000),
    "partial_sums": partial_sums(40, 60, 7),
    "running_folds": running_folds(6, 10),
    **{
        f"matmul {str(dtype)[6:]} {left:d}{right:d}": matmul(18, 33, 40, dtype, turned=(left, right))
        for dtype in (F16, BF16, F32, F64, I8)
        for left in (False, True)
        for right in (False, True)
    },
    **{
        f"{name} {str(dtype)[6:]} {role.value}": fold(name, 7, 21, role, dtype)
        for role in (WHOLE, LOOP)
        for name, dtype in (
            *(("sum", F32), ("sum", F64), ("sum", I64), ("sum", I32), ("prod", F32), ("prod", I64)),
            *(("max", F32), ("min", F32), ("max", BF16), ("min", I64), ("max", I8), ("max", torch.uint8)),
            *(("any", BOOL), ("all", BOOL), ("argmax", F32), ("argmin", F32), ("argmax", I64), ("argmin", F16)),
        )
    },
}
"""Kernels that Triton's interpreter runs in well under a second each."""
