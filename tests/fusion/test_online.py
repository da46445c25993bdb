"""The online rule: its accumulators and values in form, and in meaning against folding one after the other.

Each body is a list of folds over one axis, of which later ones name earlier ones.  Two kernels are made of it: one
walks the axis once for each fold, the other walks it once, in blocks, with what the rule gives.  Both are run by the
reference evaluator in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import sympy
import torch

from fusion.schedule.online import Online, online
from lowering.expr import Cast, Expr, IndexValue, Load, Op, TileRef, const, rewrite
from lowering.indexing import axis_symbol, over_symbol
from lowering.interpret import run_kernel
from lowering.kernel import Fold, Kernel, KernelAxis, Loop, Param, Role, Stmt, Store, running
from lowering.printer import format_expr
from lowering.scalar_ops import result_dtype
from lowering.verify import verify_kernel

ROWS, COLUMNS, LENGTH = 6, 4, 12
ROW, COLUMN, S = axis_symbol(0), axis_symbol(1), over_symbol(0)
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
INF = float("inf")


class Body:
    """Operands in one dtype, and the folds made of them."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        self.dtype = dtype
        self.x, self.y, self.g = (self.load(name, LENGTH * ROW + S) for name in "xyg")
        self.v = self.load("v", COLUMNS * S + COLUMN)
        self.w = self.load("w", S)  # positive

    def load(self, name: str, offset: sympy.Expr) -> Load:
        return Load(name, (offset,), self.dtype)

    def c(self, value: float) -> Expr:
        return const(value, self.dtype)

    def fold(self, name: str, op: str, *args: Expr) -> Fold:
        sides = ((ROW,), (COLUMN,)) if op == "dot" else ((), ())
        dtype = F32 if op == "dot" and args[0].dtype.itemsize < 4 else args[0].dtype
        return Fold(name, op, args, (S,), dtype, *sides)

    # What many bodies have in common

    def top(self, x: Expr | None = None) -> Fold:
        return self.fold("m", "max", self.x if x is None else x)

    def softmax(self, x: Expr | None = None) -> tuple[Fold, Fold, Expr]:
        """The maximum, the sum of exponentials, the exponential."""
        x = self.x if x is None else x
        top = self.top(x)
        power = exp(sub(x, top.ref))
        return top, self.fold("l", "sum", power), power

    def squares(self) -> tuple[Fold, Expr]:
        """A sum of squares, and the reciprocal root of their mean."""
        total = self.fold("q", "sum", mul(self.x, self.x))
        return total, op("rsqrt", add(div(total.ref, self.c(LENGTH)), self.c(1e-6)))

    def mean(self) -> tuple[Fold, Expr]:
        total = self.fold("t", "sum", self.x)
        return total, div(total.ref, self.c(LENGTH))


def op(name: str, *args: Expr) -> Expr:
    return Op(name, args, result_dtype(name, args[-1].dtype))


def add(a: Expr, b: Expr) -> Expr:
    return op("add", a, b)


def sub(a: Expr, b: Expr) -> Expr:
    return op("sub", a, b)


def mul(a: Expr, b: Expr) -> Expr:
    return op("mul", a, b)


def div(a: Expr, b: Expr) -> Expr:
    return op("truediv", a, b)


def exp(a: Expr) -> Expr:
    return op("exp", a)


def where(mask: Expr, a: Expr, b: Expr) -> Expr:
    return op("where", mask, a, b)


Folds = tuple[Fold, ...]


# Bodies with an online form -------------------------------------------------------------------------------------------


def denominator(b: Body) -> Folds:
    top, total, _ = b.softmax()
    return top, total


def attention(b: Body) -> Folds:
    top, total, power = b.softmax()
    return top, total, b.fold("o", "dot", power, b.v)


def normalised_attention(b: Body) -> Folds:
    top, total, power = b.softmax()
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def dropout(b: Body) -> Folds:
    top, total, power = b.softmax()
    kept = where(op("lt", b.w, b.c(0.9)), mul(div(power, total.ref), b.c(1.25)), b.c(0))
    return top, total, b.fold("o", "dot", kept, b.v)


def masked(b: Body) -> Folds:
    causal = op("le", IndexValue(S), IndexValue(2 * ROW))
    top, total, power = b.softmax(where(causal, b.x, b.c(-INF)))
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def added_mask(b: Body) -> Folds:
    top, total, power = b.softmax(add(mul(b.x, b.c(0.5)), b.y))
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def scaled_exponent(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("l", "sum", exp(mul(sub(b.x, top.ref), b.c(0.125))))


def temperature(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("l", "sum", exp(div(sub(b.x, top.ref), b.load("w", ROW))))


def powers_of_two(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("l", "sum", op("exp2", mul(sub(b.x, top.ref), b.c(1.4426950408889634))))


def log_sum_exp(b: Body) -> Folds:
    top = b.top()
    shift = where(op("isinf", top.ref), b.c(0), top.ref)
    return top, b.fold("l", "sum", exp(sub(b.x, shift)))


def log_softmax_products(b: Body) -> Folds:
    """Σ exp(x - m - log l) · v"""
    top, total, _ = b.softmax()
    return top, total, b.fold("o", "dot", exp(sub(sub(b.x, top.ref), op("log", total.ref))), b.v)


def softcap(b: Body) -> Folds:
    top, total, power = b.softmax(mul(op("tanh", div(b.x, b.c(30))), b.c(30)))
    return top, total, b.fold("o", "dot", div(power, total.ref), b.v)


def soft_minimum(b: Body) -> Folds:
    least = b.fold("n", "min", b.x)
    return least, b.fold("l", "sum", exp(sub(least.ref, b.x)))


def safe_attention(b: Body) -> Folds:
    """0 where a whole row is masked"""
    top, total, power = b.softmax()
    empty = op("eq", top.ref, b.c(-INF))
    return top, total, b.fold("o", "dot", where(empty, b.c(0), div(power, total.ref)), b.v)


def rms_linear(b: Body) -> Folds:
    total, scale = b.squares()
    return total, b.fold("o", "dot", mul(mul(b.x, scale), b.w), b.v)


def gated_by_relu(b: Body) -> Folds:
    """relu(x / max |y|)"""
    top = b.fold("a", "max", op("abs", b.y))
    scale = op("maximum", top.ref, b.c(1e-5))
    return top, b.fold("o", "dot", op("maximum", div(b.x, scale), b.c(0)), b.v)


def log_sum_of_running(b: Body) -> Folds:
    """The shift and the logarithm of the sum were added up before."""
    top, total, _ = b.softmax()
    return top, total, b.fold("o", "dot", exp(sub(b.x, add(top.ref, op("log", total.ref)))), b.v)


def cubes(b: Body) -> Folds:
    total, scale = b.squares()
    return total, b.fold("o", "sum", op("pow", op("abs", mul(b.x, scale)), b.c(3)))


def quantised(b: Body) -> Folds:
    top = b.fold("a", "max", op("abs", b.x))
    return top, b.fold("o", "dot", div(b.x, op("maximum", div(top.ref, b.c(127)), b.c(1e-5))), b.v)


def cosine(b: Body) -> Folds:
    """Both operands of a product have a factor that waits."""
    total, other = b.squares()[0], b.fold("p", "sum", mul(b.y, b.y))
    left, right = div(b.x, op("sqrt", total.ref)), div(b.y, op("sqrt", other.ref))
    return total, other, b.fold("o", "sum", mul(left, right))


def centred_linear(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "dot", sub(b.x, mean), b.v)


def shifted_maximum(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "max", sub(b.x, mean))


def masked_maximum(b: Body) -> Folds:
    """The largest standardised value of some"""
    (total, mean), (squares, scale) = b.mean(), b.squares()
    some = op("le", IndexValue(S), IndexValue(2 * ROW))
    return total, squares, b.fold("o", "max", where(some, mul(sub(b.x, mean), scale), b.c(-INF)))


def largest_power(b: Body) -> Folds:
    top, _, power = b.softmax()
    return top, b.fold("o", "max", power)


def entropy(b: Body) -> Folds:
    top, total, power = b.softmax()
    logarithm = sub(sub(b.x, top.ref), op("log", total.ref))
    return top, total, b.fold("o", "sum", mul(div(power, total.ref), logarithm))


def _two_logarithms(b: Body) -> tuple[Folds, Expr, Expr, Expr]:
    """Folds, p, log p, log q of two softmaxes."""
    top, total, power = b.softmax()
    other = b.fold("m2", "max", b.y)
    sums = b.fold("l2", "sum", exp(sub(b.y, other.ref)))
    log_p = sub(sub(b.x, top.ref), op("log", total.ref))
    log_q = sub(sub(b.y, other.ref), op("log", sums.ref))
    return (top, other, total, sums), div(power, total.ref), log_p, log_q


def divergence(b: Body) -> Folds:
    folds, p, log_p, log_q = _two_logarithms(b)
    return *folds, b.fold("o", "sum", mul(p, sub(log_p, log_q)))


def divergence_from_given(b: Body) -> Folds:
    """Σ w · (log w - log p)"""
    top, total, _ = b.softmax()
    log_p = sub(sub(b.x, top.ref), op("log", total.ref))
    return top, total, b.fold("o", "sum", mul(b.w, sub(op("log", b.w), log_p)))


def attention_backward(b: Body) -> Folds:
    """Σ p · (g - δ) · v with δ = Σ p · g"""
    top, total, power = b.softmax()
    p = div(power, total.ref)
    inner = b.fold("d", "sum", mul(p, b.g))
    return top, total, inner, b.fold("o", "dot", mul(p, sub(b.g, inner.ref)), b.v)


SAFE = "exp(x[12*i0 + r0] - where(m == -inf, 0.0, m))"
MOVED = "where(m' == m, 1.0, exp(m' - m))"

# body → (operation, arguments, carry) of each accumulator of its last fold, and its value
FORMS: dict[Callable[[Body], Folds], tuple[list[tuple[str, str, str]], str]] = {
    denominator: ([("sum", SAFE, f"l' * {MOVED}")], "where(m == -inf, nan, l)"),
    attention: ([("dot", f"{SAFE}, v[4*r0 + i1]", f"o' * {MOVED}")], "where(m == -inf, nan, o)"),
    normalised_attention: (
        [("dot", f"{SAFE}, v[4*r0 + i1]", f"o' * {MOVED}")],
        "o / where(m == -inf, nan, l)",
    ),
    softcap: (
        [
            (
                "dot",
                "exp(tanh(x[12*i0 + r0] / 30.0) * 30.0 - where(m == -inf, 0.0, m)), v[4*r0 + i1]",
                f"o' * {MOVED}",
            )
        ],
        "o / l",
    ),
    scaled_exponent: (
        [
            (
                "sum",
                "exp((x[12*i0 + r0] - where(m == -inf, 0.0, m)) * 0.125)",
                "l' * where(m' == m, 1.0, exp((m' - m) * 0.125))",
            )
        ],
        "where(m == -inf, nan, l)",
    ),
    soft_minimum: (
        [("sum", "exp(where(n == inf, 0.0, n) - x[12*i0 + r0])", "l' * where(n' == n, 1.0, exp(n - n'))")],
        "where(n == inf, nan, l)",
    ),
    rms_linear: (
        [("dot", "x[12*i0 + r0] * w[r0], v[4*r0 + i1]", "")],
        "o * rsqrt(q / 12.0 + 1e-06)",
    ),
    gated_by_relu: ([("dot", "maximum(x[12*i0 + r0], 0.0), v[4*r0 + i1]", "")], "o / maximum(a, 1e-05)"),
    quantised: ([("dot", "x[12*i0 + r0], v[4*r0 + i1]", "")], "o / maximum(a / 127.0, 1e-05)"),
    cosine: ([("sum", "x[12*i0 + r0] * y[12*i0 + r0]", "")], "o / sqrt(q) / sqrt(p)"),
    centred_linear: (
        [("dot", "x[12*i0 + r0], v[4*r0 + i1]", ""), ("sum", "v[4*r0 + i1]", "")],
        "o_0 - o_1 * (t / 12.0)",
    ),
    shifted_maximum: ([("max", "x[12*i0 + r0]", "")], "o - t / 12.0"),
    masked_maximum: (
        [("max", "where(index(r0) <= index(2*i0), x[12*i0 + r0], -inf)", "")],
        "(o - t / 12.0) * rsqrt(q / 12.0 + 1e-06)",
    ),
    attention_backward: (
        [
            ("dot", f"{SAFE} * g[12*i0 + r0], v[4*r0 + i1]", f"o_0' * {MOVED}"),
            ("dot", f"{SAFE}, v[4*r0 + i1]", f"o_1' * {MOVED}"),
        ],
        "%1 = where(m == -inf, nan, l)\n(o_0 - o_1 * (d / %1)) / %1",
    ),
}

ACCUMULATORS: dict[Callable[[Body], Folds], int] = {
    **{body: len(accumulators) for body, (accumulators, _) in FORMS.items()},
    # Where a sum is needed that another fold has, there is one less.
    **dict.fromkeys((dropout, masked, added_mask, temperature, powers_of_two, log_sum_exp), 1),
    **dict.fromkeys(
        (log_softmax_products, log_sum_of_running, safe_attention, cubes, largest_power, entropy, divergence), 1
    ),
    divergence_from_given: 2,
}

DIFFERENCES = (centred_linear, shifted_maximum, masked_maximum)
"""What is left of these is a difference of a sum or maximum and a mean."""


# Kernels --------------------------------------------------------------------------------------------------------------


def streamed(folds: Sequence[Fold]) -> tuple[Folds, Expr, Online]:
    """One walk: its accumulators, the value of the last fold, and what the rule said of that one."""
    values: dict[str, Expr] = {}
    walked: dict[str, Fold] = {}
    found = Online((), folds[-1].ref)
    for fold in folds:
        args = rewrite(fold.args, lambda node: values.get(node.name) if isinstance(node, TileRef) else None)
        result = online(replace(fold, args=tuple(args)), walked)
        assert isinstance(result, Online), result
        walked.update({each.name: each for each in result.folds})
        values[fold.name] = result.value
        found = result
    return tuple(walked.values()), found.value, found


def kernel_of(body: Sequence[Stmt], value: Expr, dtype: torch.dtype, products: torch.dtype) -> Kernel:
    shapes = {**dict.fromkeys("xyg", (ROWS, LENGTH)), "v": (LENGTH, COLUMNS), "w": (LENGTH,)}
    params = [_param(name, products if name == "v" else dtype, shape, False) for name, shape in shapes.items()]
    params.append(_param("out", value.dtype, (ROWS, COLUMNS), True))
    axes = ((ROW, ROWS, Role.GRID), (COLUMN, COLUMNS, Role.GRID), (S, LENGTH, Role.LOOP))
    listed = tuple(KernelAxis(symbol, sympy.Integer(size), role) for symbol, size, role in axes)
    return Kernel("k", tuple(params), (), listed, (*body, Store("out", COLUMNS * ROW + COLUMN, value)))


def _param(name: str, dtype: torch.dtype, shape: tuple[int, ...], written: bool) -> Param:
    sizes = tuple(sympy.Integer(size) for size in shape)
    strides = tuple(sympy.Mul(*sizes[k + 1 :]) for k in range(len(sizes)))
    return Param(name, dtype, sizes, strides, written)


def inputs(special: str = "") -> dict[str, torch.Tensor]:
    """Operands in float64.  Blocks are of 4: what comes first has a block of its own."""
    generator = torch.Generator().manual_seed(1)
    shapes = {**dict.fromkeys("xyg", (ROWS, LENGTH)), "v": (LENGTH, COLUMNS), "w": (LENGTH,)}
    found = {name: torch.randn(shape, generator=generator, dtype=F64) for name, shape in shapes.items()}
    found["w"] = found["w"].abs() + 0.1
    x = found["x"]
    if special == "rising":
        x += torch.arange(LENGTH) * 40.0
    elif special == "low":
        x -= 1000.0
    elif special == "masked":
        x[0], x[1, :5], x[2, 5:], x[3, 3] = -INF, -INF, -INF, -INF
    elif special == "infinite":
        x[0, 5], x[1, 11], x[2, 0] = INF, INF, INF
        x[3, :4], x[3, 6] = -INF, INF
    elif special == "nan":
        x[0, 5], x[1, 11], x[2, 0] = (float("nan"),) * 3
        x[3, :4], x[3, 6] = -INF, float("nan")
    return found


def run(
    body: Sequence[Stmt], value: Expr, given: dict[str, torch.Tensor], dtype: torch.dtype, products: torch.dtype
) -> torch.Tensor:
    made = kernel_of(body, value, dtype, products)
    verify_kernel(made)
    out = torch.full((ROWS, COLUMNS), 7.0, dtype=value.dtype)
    run_kernel(made, [*(t.to(products if name == "v" else dtype) for name, t in given.items()), out])
    return out


def one_walk(folds: Folds, given: dict[str, torch.Tensor], dtype: torch.dtype = F64, products: torch.dtype = F64):
    accumulators, value, _ = streamed(folds)
    loop = Loop((S,), accumulators)
    assert running(loop) or all(fold.carry is None for fold in accumulators)
    return run((loop,), value, given, dtype, products)


def walk_by_walk(folds: Folds, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return run([Loop((S,), (fold,)) for fold in folds], folds[-1].ref, given, F64, F64)


# Form -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", FORMS, ids=lambda body: body.__name__)
def test_the_form_is_the_one_a_person_would_write(body: Callable[[Body], Folds]) -> None:
    _, _, found = streamed(body(Body(F32)))
    accumulators, value = FORMS[body]
    got = [
        (fold.op, ", ".join(map(format_expr, fold.args)), format_expr(fold.carry) if fold.carry else "")
        for fold in found.folds
    ]
    assert (got, format_expr(found.value)) == (accumulators, value)


def test_entropy_shares_the_sum_and_keeps_its_shift() -> None:
    """x - m is small where x and m are not, so m stays; Σ exp(x - m) is there already."""
    _, _, found = streamed(entropy(Body(F32)))
    (fold,) = found.folds
    assert format_expr(fold.args[0]).splitlines()[-1] == "exp(%1) * %1"
    assert fold.carry is not None
    assert "l' * where(m' == -inf, 0.0, where(m' == m, 0.0, m' - m))" in format_expr(fold.carry)
    assert "log(" in format_expr(found.value)
    assert "log(" not in format_expr(fold.args[0])


def test_factors_and_stand_ins_are_one_object() -> None:
    accumulators, _, _ = streamed(attention(Body()))
    total, mixed = accumulators[1:]
    assert total.args[0] is mixed.args[0]
    assert total.carry is not None
    assert mixed.carry is not None
    assert total.carry.children()[1] is mixed.carry.children()[1]


def test_independent_folds_stay_what_they_are() -> None:
    b = Body()
    top, fold = b.top(), b.fold("t", "sum", b.x)
    assert online(fold, {"m": top}) == Online((fold,), fold.ref)


@pytest.mark.parametrize("narrow", [BF16, F16])
def test_a_rounding_stays_on_the_operand(narrow: torch.dtype) -> None:
    """1/l leaves the rounded operand, which is rounded as before."""
    b = Body(F32)
    top, total, power = b.softmax()
    value = Load("v", b.v.index, narrow)
    mixed = b.fold("o", "dot", Cast(div(power, total.ref), narrow, implicit=True), value)
    accumulators, result, _ = streamed((top, total, mixed))
    assert isinstance(accumulators[2].args[0], Cast)
    assert accumulators[2].args[0].arg is accumulators[1].args[0]
    assert accumulators[2].dtype is F32
    assert format_expr(result) == "o / where(m == -inf, nan, l)"
    want = walk_by_walk(normalised_attention(Body()), inputs())
    got = one_walk((top, total, mixed), inputs(), F32, narrow)
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


def test_what_was_widened_is_not_rounded_again() -> None:
    b = Body(F32)
    total, scale = b.squares()
    half = Load("h", (S,), F16)
    mixed = b.fold("o", "dot", Cast(mul(Cast(half, F32), scale), F16), Load("v", b.v.index, F16))
    found = online(mixed, {"q": total})
    assert isinstance(found, Online)
    assert found.folds[0].args[0] is half


def test_integers_that_divide_are_no_trouble() -> None:
    """Numbers are drawn for what is loaded; where they give a divisor of 0, it is not what is tried."""
    b = Body(F32)
    number = Load("i", (S,), torch.int64)
    group = op("floordiv", number, sub(number, number))
    top, total, power = b.softmax(add(b.x, Cast(group, F32)))
    assert [fold.name for fold in streamed((top, total))[0]] == ["m", "l"]
    assert power is total.args[0]


# Meaning --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", ["", "rising", "low", "masked", "infinite", "nan"])
@pytest.mark.parametrize("body", ACCUMULATORS, ids=lambda body: body.__name__)
def test_one_walk_gives_what_one_after_the_other_gives(body: Callable[[Body], Folds], special: str) -> None:
    folds, given = body(Body()), inputs(special)
    want = walk_by_walk(folds, given)
    got = one_walk(folds, given)
    if not special:
        assert want.isfinite().all()
    size = max(1.0, float(want[want.isfinite()].abs().max())) if want.isfinite().any() else 1.0
    if body in DIFFERENCES:  # of infinite sums, where the sum of differences is NaN
        assert torch.equal(got.isfinite(), want.isfinite())
        got, want = got[want.isfinite()], want[want.isfinite()]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9 * size, equal_nan=True)


@pytest.mark.parametrize("body", ACCUMULATORS, ids=lambda body: body.__name__)
def test_as_many_accumulators_as_the_rank(body: Callable[[Body], Folds]) -> None:
    assert len(streamed(body(Body()))[2].folds) == ACCUMULATORS[body]


@pytest.mark.parametrize("special", ["", "rising", "low"])
@pytest.mark.parametrize("body", ACCUMULATORS, ids=lambda body: body.__name__)
def test_float32_is_as_exact_as_one_after_the_other(body: Callable[[Body], Folds], special: str) -> None:
    """Twice the error of folding one after the other, and that of rounding what is added up."""
    given = {name: tensor.float().double() for name, tensor in inputs(special).items()}
    folds = body(Body(F32))
    want = walk_by_walk(body(Body()), given)
    direct = run([Loop((S,), (fold,)) for fold in folds], folds[-1].ref, given, F32, F32).double()
    got = one_walk(folds, given, F32, F32).double()
    finite = want.isfinite() & direct.isfinite()
    assert finite.any()
    size = float(want[finite].abs().max())
    if body is attention_backward:  # g - Σ p·g is rounded as g is
        size = max(size, float(given["g"].abs().max() * given["v"].abs().max()))
    if body is centred_linear:  # x - mean is as exact as x in one form, its product with v in the other
        size = max(size, float(given["x"].abs().max() * given["v"].abs().sum(0).max()))
    allowed = 2 * float((direct - want)[finite].abs().max()) + 1e-6 * size
    assert float((got - want)[finite].abs().max()) <= allowed


def test_a_fully_masked_row_is_nan_and_zero_where_that_is_asked_for() -> None:
    for body, expected in ((attention, float("nan")), (normalised_attention, float("nan")), (safe_attention, 0.0)):
        got = one_walk(body(Body()), inputs("masked"))
        torch.testing.assert_close(got[0], torch.full((COLUMNS,), expected, dtype=F64), equal_nan=True)
        assert got[4].isfinite().all()


# Refusals -------------------------------------------------------------------------------------------------------------


def variance(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", mul(sub(b.x, mean), sub(b.x, mean)))


def variance_by_power(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", op("pow", sub(b.x, mean), b.c(2)))


def half_variance(b: Body) -> Folds:
    """Σ (x - mean) · x is n times the variance."""
    total, mean = b.mean()
    return total, b.fold("o", "sum", mul(sub(b.x, mean), b.x))


def covariance(b: Body) -> Folds:
    total, mean = b.mean()
    other = b.fold("u", "sum", b.y)
    return total, other, b.fold("o", "dot", sub(b.x, mean), sub(b.y, div(other.ref, b.c(LENGTH))))


def relu_of_a_norm(b: Body) -> Folds:
    """x = -inf makes the norm's factor 0 and the product NaN, which relu(x) does not show."""
    total, scale = b.squares()
    return total, b.fold("o", "dot", op("maximum", mul(b.x, scale), b.c(0)), b.v)


def relu_of_a_signed_product(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", op("maximum", mul(b.y, mean), b.c(0)))


def rounded(b: Body) -> Folds:
    top = b.fold("a", "max", op("abs", b.x))
    return top, b.fold("o", "dot", op("round", div(b.x, div(top.ref, b.c(127)))), b.v)


def integers(b: Body) -> Folds:
    top = b.fold("a", "max", op("abs", b.x))
    return top, b.fold("o", "dot", Cast(div(b.x, div(top.ref, b.c(127))), torch.int8), Load("i", (S,), torch.int8))


def sigmoid_gate(b: Body) -> Folds:
    total, scale = b.squares()
    normed = mul(b.x, scale)
    return total, b.fold("o", "dot", div(normed, add(b.c(1), exp(op("neg", normed)))), b.v)


def count_of_largest(b: Body) -> Folds:
    top = b.top()
    return top, b.fold("o", "sum", where(op("eq", b.x, top.ref), b.c(1), b.c(0)))


def shifted_by_a_mean(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "sum", exp(sub(b.x, mean)))


def shifted_by_another(b: Body) -> Folds:
    """Where x has only seen -inf, y has seen something."""
    top = b.top()
    return top, b.fold("o", "sum", exp(sub(b.y, top.ref)))


def masked_late(b: Body) -> Folds:
    """Σ exp(x - m) over some: NaN or 0, as the mask says, where all of them are -inf."""
    some = op("le", IndexValue(S), IndexValue(2 * ROW))
    top = b.top(where(some, b.x, b.c(-INF)))
    return top, b.fold("o", "sum", where(some, exp(sub(b.x, top.ref)), b.c(0)))


def largest_product(b: Body) -> Folds:
    total, mean = b.mean()
    return total, b.fold("o", "max", mul(b.x, mean))


def product_of_all(b: Body) -> Folds:
    total, scale = b.squares()
    return total, b.fold("o", "prod", mul(b.x, scale))


def rounded_sum(b: Body) -> Folds:
    b = Body(F32)
    total, mean = b.mean()
    return total, b.fold("o", "dot", Cast(sub(b.x, mean), BF16), Load("v", b.v.index, BF16))


def half_overflow(b: Body) -> Folds:
    """1000 · 100 is no float16, 1000 · 100 / 1000 is one."""
    b = Body(F32)
    total, scale = b.squares()
    return total, b.fold("o", "dot", Cast(mul(mul(b.x, scale), b.w), F16), Load("v", b.v.index, F16))


def narrow_sum(b: Body) -> Folds:
    b = Body(BF16)
    total, scale = b.squares()
    return total, b.fold("o", "sum", mul(b.x, scale))


REFUSED: dict[Callable[[Body], Folds], str] = {
    variance: "cancels",
    variance_by_power: "cancels",
    half_variance: "cancels",
    covariance: "cancels",
    rounded_sum: "cancels: a sum of walked and running values is rounded",
    rounded: "no factor: full rank",
    integers: "no factor: full rank",
    sigmoid_gate: "no factor: full rank",
    count_of_largest: "eq compares a running value with what is walked",
    shifted_by_a_mean: "out of range",
    half_overflow: "out of range",
    relu_of_a_norm: "infinity",
    relu_of_a_signed_product: "maximum of a product with a factor of unknown sign",
    shifted_by_another: "start: while m has seen nothing",
    masked_late: "start: what is left if m has seen nothing",
    largest_product: "unknown sign",
    product_of_all: "a prod of running values",
    narrow_sum: "too narrow",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_refused_with_the_reason(body: Callable[[Body], Folds]) -> None:
    *earlier, last = body(Body())
    found = online(last, {fold.name: fold for fold in earlier})
    assert isinstance(found, str)
    assert REFUSED[body] in found


def test_a_running_value_is_not_the_final_one() -> None:
    """What the carry is for: without it, a sum keeps what it added with older running values."""
    *earlier, last = denominator(Body())
    given = inputs("rising")
    with_running = replace(last, carry=last.before)
    got = run((Loop((S,), (*earlier, with_running)),), last.ref, given, F64, F64)
    want = walk_by_walk((*earlier, last), given)
    assert (got > 1.5 * want).any()
