"""The pointwise rules against eager, on every kind of number."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion.lowering.ir.expr import Cast, postorder
from fusion.lowering.ir.program import Map
from fusion.lowering.registry import RULES, lowers
from tests.lowering.lowered import check, lowered

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)

NUMBERS = [
    *(float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 0.25, 2.0, -2.0, 2.5, -2.5, 3.0),
    *(-3.0, 3.5, 6.0, 7.25, 19.0, 21.0, -21.0, 87.0, -87.0, 1e-3, -1e-3, 1e-6, 1e4, -1e4, 1 / 3),
]


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All kinds of floats, [30]."""
    return torch.tensor(NUMBERS, dtype=dtype)


def finite(dtype: torch.dtype) -> torch.Tensor:
    """Return finite floats, without -0.0, [26]: on others eager's kernels disagree between vectors and remainders."""
    return torch.tensor([n for n in NUMBERS if math.isfinite(n) and str(n) != "-0.0"], dtype=dtype)


def integers(dtype: torch.dtype) -> torch.Tensor:
    """Small integers and the extremes of the dtype, [10]."""
    info = torch.iinfo(dtype)
    return torch.tensor([0, 1, 2, 3, 5, 7, info.max, info.max - 1, info.min, info.min + 1], dtype=dtype)


UNARY: dict[str, Callable[[torch.Tensor], object]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("neg", "abs", "sign", "sgn", "square", "sqrt", "rsqrt", "reciprocal", "exp", "exp2", "expm1", "log"),
            *("log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh"),
            *("asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "floor", "ceil", "trunc", "round", "frac", "sinc"),
            *("isnan", "isinf", "isfinite", "isposinf", "isneginf", "signbit", "nan_to_num", "logical_not"),
            *("relu", "sigmoid", "logit", "deg2rad", "rad2deg", "clone", "positive"),
        )
    },
    **{
        name: getattr(F, name)
        for name in (
            *("silu", "mish", "softplus", "elu", "celu", "selu", "relu6", "hardtanh", "hardswish", "hardsigmoid"),
            *("leaky_relu", "gelu", "hardshrink", "softshrink", "tanhshrink", "softsign", "logsigmoid"),
        )
    },
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus_beta": lambda x: F.softplus(x, beta=2.5, threshold=3),
    "elu_alpha": lambda x: F.elu(x, alpha=0.3),
    "celu_alpha": lambda x: F.celu(x, alpha=2.0),
    "leaky_relu_slope": lambda x: F.leaky_relu(x, 0.3),
    "hardtanh_bounds": lambda x: F.hardtanh(x, -0.25, 2.0),
    "threshold": lambda x: F.threshold(x, 0.5, -7.0),
    "glu": lambda x: F.glu(x.view(-1, 2)),
    "logit_eps": lambda x: torch.logit(x, 0.1),
    "round_decimals": lambda x: torch.round(x, decimals=1),
    "round_negative_decimals": lambda x: torch.round(x, decimals=-1),
    "nan_to_num_given": lambda x: torch.nan_to_num(x, nan=1.5, posinf=2.5, neginf=-3.5),
    "add_scalar": lambda x: x + 1.5,
    "add_alpha": lambda x: torch.add(x, 3, alpha=2),
    "rsub": lambda x: 1.5 - x,
    "rsub_alpha": lambda x: torch.rsub(x, 3.0, alpha=2),
    "mul_scalar": lambda x: x * 0.3,
    "div_scalar": lambda x: x / 3,
    "rdiv": lambda x: 3 / x,
    "floor_divide": lambda x: x // 0.75,
    "remainder": lambda x: x % 0.75,
    "fmod": lambda x: torch.fmod(x, -0.75),
    "clamp": lambda x: x.clamp(-1, 2.5),
    "clamp_min": lambda x: x.clamp(min=0.5),
    "clamp_max": lambda x: x.clamp(max=0.5),
    "clamp_crossed": lambda x: x.clamp(3, 1),
    "clamp_nan": lambda x: x.clamp(float("nan"), 2.5),
    **{f"pow_{p}": lambda x, p=p: x**p for p in (0, 1, 2, 3, 4, 7, -1, -2, 0.5, -0.5, 1.5, 0.0)},
    **{f"base_{b}": lambda x, b=b: b**x for b in (2, 0.5, 1, 10.0)},
    "where_scalars": lambda x: torch.where(x > 0, 1.0, -1.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, float("-inf")),
    "to_float": lambda x: x.float() * 2,
    "to_half": lambda x: x.half() * 2,
    "to_bfloat16": lambda x: x.to(torch.bfloat16) + 1,
    "to_bool": lambda x: x.bool(),
    "compare": lambda x: (x > 0.5, x >= 1, x < 0, x <= -1, x == 2, x != 0),
}


COARSE_IN_EAGER = {
    ("trunc", torch.bfloat16),  # eager rounds the quotient before it cuts it
    ("ldexp", torch.float16),  # eager rounds the power of two to float16 first
    ("hardsigmoid_backward", torch.float64),  # eager's sixth is a float32
    ("gelu", torch.float32),  # oneDNN gives NaN at infinity
    ("gelu", torch.bfloat16),
    ("gelu", torch.float16),
    ("pow_0.5", torch.float16),  # no square root here, unlike for all other dtypes
    ("pow_-0.5", torch.float16),
}
"""Where eager is further from the truth than the rule; compared on tamer numbers, or not at all."""


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary_on_floats(name: str, dtype: torch.dtype):
    check(UNARY[name], finite(dtype) if (name, dtype) in COARSE_IN_EAGER else numbers(dtype))


def _rounded_down(x: torch.Tensor, y: torch.Tensor) -> object:
    return torch.div(x, y, rounding_mode="floor")


def _rounded_to_zero(x: torch.Tensor, y: torch.Tensor) -> object:
    return torch.div(x, y, rounding_mode="trunc")


BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, name) for name in ("maximum", "minimum", "fmax", "fmin")},
}
FLOAT_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    **BINARY,
    **{
        name: getattr(torch, name)
        for name in (
            *("true_divide", "atan2", "pow", "fmod", "remainder", "copysign", "hypot", "logaddexp", "logaddexp2"),
            *("xlogy", "heaviside", "ldexp", "logical_and", "logical_or", "logical_xor"),
        )
    },
    "floor": _rounded_down,
    "trunc": _rounded_to_zero,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=0.5),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=3),
    "lerp": lambda x, y: torch.lerp(x, y, 0.25),
    "lerp_far": lambda x, y: torch.lerp(x, y, 0.75),
    "lerp_tensor": lambda x, y: torch.lerp(x, y, x.abs()),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "clamp": lambda x, y: torch.clamp(x, min=y, max=x * 2),
    "clamp_min": lambda x, y: torch.clamp(x, min=y),
    "where": lambda x, y: torch.where(x > y, x, y),
    "where_other": lambda x, y: torch.where(x > y, x, 2),
    "masked_fill": lambda x, y: x.masked_fill(x > y, 0.5),
    "prelu": lambda x, w: aten._prelu_kernel(x, w),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", FLOAT_BINARY)
def test_binary_on_floats(name: str, dtype: torch.dtype):
    if (name, dtype) not in COARSE_IN_EAGER:
        check(FLOAT_BINARY[name], numbers(dtype)[:, None], numbers(dtype))


GRADIENTS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "threshold": lambda g, x: aten.threshold_backward(g, x, 0.5),
    "leaky_relu": lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False),
    "hardtanh": lambda g, x: aten.hardtanh_backward(g, x, -1, 2),
    "hardsigmoid": lambda g, x: aten.hardsigmoid_backward(g, x),
    "hardswish": lambda g, x: aten.hardswish_backward(g, x),
    "sigmoid": lambda g, y: aten.sigmoid_backward(g, y),
    "tanh": lambda g, y: aten.tanh_backward(g, y),
    "silu": lambda g, x: aten.silu_backward(g, x),
    "mish": lambda g, x: aten.mish_backward(g, x),
    "softplus": lambda g, x: aten.softplus_backward(g, x, 2, 10),
    "elu": lambda g, x: aten.elu_backward(g, 0.5, 1.5, 2, False, x),
    "elu_of_result": lambda g, y: aten.elu_backward(g, 0.5, 1.5, 2, True, y),
    "gelu": lambda g, x: aten.gelu_backward(g, x),
    "gelu_tanh": lambda g, x: aten.gelu_backward(g, x, approximate="tanh"),
    "logit": lambda g, x: aten.logit_backward(g, x),
    "logit_eps": lambda g, x: aten.logit_backward(g, x, 0.1),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, dtype: torch.dtype):
    if (f"{name}_backward", dtype) not in COARSE_IN_EAGER:
        x = finite(dtype)
        check(GRADIENTS[name], x[:, None].expand(26, 26).contiguous(), x.expand(26, 26).contiguous())


INTEGER_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    **BINARY,
    **{
        name: getattr(torch, name)
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "logical_and", "logical_xor", "true_divide", "atan2")
    },
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "shift_left": lambda x, y: x << (y & 7),
    "shift_right": lambda x, y: x >> (y & 7),
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: torch.clamp(x, max=y),
    "lerp_of_floats": lambda x, y: torch.lerp(x.float(), y.float(), 0.5),
}
INTEGER_UNARY: dict[str, Callable[[torch.Tensor], object]] = {
    **{
        name: getattr(torch, name)
        for name in (
            *("neg", "sign", "sgn", "square", "floor", "ceil", "trunc", "round", "isnan", "isinf", "isfinite"),
            *("bitwise_not", "logical_not", "sqrt", "exp", "sigmoid", "reciprocal", "relu", "nan_to_num", "positive"),
        )
    },
    "signbit": lambda x: torch.signbit(x),
    "add_scalar": lambda x: x + 300,
    "rsub": lambda x: 5 - x,
    "add_float": lambda x: x + 0.5,
    "floor": lambda x: torch.div(x, 3, rounding_mode="floor"),
    "trunc": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "floor_divide": lambda x: x // 7,
    "remainder": lambda x: x % 7,
    "fmod": lambda x: torch.fmod(x, 7),
    "square_power": lambda x: x**2,
    "cube": lambda x: x**3,
    "power_11": lambda x: x**11,
    "power_0": lambda x: x**0,
    "root": lambda x: x**0.5,
    "compare": lambda x: (x == -1, x > 100, x <= 0, x < 2.5),
    "to_bool": lambda x: x.bool(),
    "to_float": lambda x: x.float(),
    "to_int8": lambda x: x.to(torch.int8),
    "masked_fill": lambda x: x.masked_fill(x > 2, -3),
}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", INTEGER_UNARY)
def test_unary_on_integers(name: str, dtype: torch.dtype):
    check(INTEGER_UNARY[name], integers(dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", INTEGER_BINARY)
def test_binary_on_integers(name: str, dtype: torch.dtype):
    check(INTEGER_BINARY[name], integers(dtype)[:, None], integers(dtype))


@pytest.mark.parametrize("name", ["floor", "trunc", "remainder", "fmod", "floor_divide"])
def test_divisions_of_integers_by_either_sign(name: str):
    functions = {"floor": _rounded_down, "trunc": _rounded_to_zero}
    divisor = torch.tensor([-7, -2, -1, 1, 2, 7])
    check(functions.get(name) or getattr(torch, name), integers(torch.int64)[:8, None], divisor)


def test_bools():
    x, y = torch.tensor([[True], [False]]), torch.tensor([True, False])
    for function in (
        *(operator.and_, operator.or_, operator.xor, operator.add, operator.mul, operator.eq, operator.ne),
        *(operator.lt, operator.le, operator.gt, operator.ge, torch.maximum, torch.minimum, torch.true_divide),
    ):
        check(function, x, y)
    for single in (torch.logical_not, torch.sign, torch.bitwise_not, torch.isnan, torch.square):
        check(single, y)
    check(lambda a: (a * 2, a + 1.5, a.float(), a.sum()), y)


PROMOTIONS = {
    "half and 0-d float": (torch.ones(3, dtype=torch.float16), torch.tensor(1e-3)),
    "half and bfloat16": (torch.ones(3, dtype=torch.float16), torch.full((3,), 1e-3, dtype=torch.bfloat16)),
    "int and 0-d double": (torch.arange(3), torch.tensor(0.5, dtype=torch.float64)),
    "int and half": (torch.arange(3), torch.full((3,), 0.5, dtype=torch.float16)),
    "bool and uint8": (torch.tensor([True, False, True]), torch.tensor([1, 2, 255], dtype=torch.uint8)),
    "uint8 and int8": (torch.tensor([1, 255], dtype=torch.uint8), torch.tensor([-1, 1], dtype=torch.int8)),
    "float and double": (torch.ones(3) / 3, torch.ones(3, dtype=torch.float64) / 3),
}


@pytest.mark.parametrize("name", PROMOTIONS)
def test_promotion(name: str):
    check(lambda x, y: (x + y, y - 3 * x, torch.maximum(x, y), x < y, torch.where(x > 0, x, y)), *PROMOTIONS[name])


def test_odd_layouts_and_sizes():
    x = torch.randn(6, 10)[1:, ::2].t()  # neither contiguous nor at offset 0
    check(lambda a, b: (a + b, a * b.t().t(), torch.relu(a)), x, torch.randn(5, 5))
    check(lambda a: torch.relu(a) * 2, torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    check(lambda a: a.exp() + 1, torch.randn(0, 3))
    check(lambda a: a.exp() + 1, torch.randn(()))
    check(lambda a, b: a.expand(3, 4) * b, torch.randn(1, 1), torch.randn(3, 1))


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": lambda x, y: F.huber_loss(x, y, delta=0.3),
    "bce_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="none"),
    "kl": lambda x, y: F.kl_div(x, y.sigmoid(), reduction="batchmean"),
    "soft_margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str):
    check(LOSSES[name], torch.randn(4, 7), torch.randn(4, 7))


# What the nodes look like ---------------------------------------------------------------------------------------------


def _casts(function: Callable[[torch.Tensor], object], x: torch.Tensor) -> list[tuple[torch.dtype, bool]]:
    program = lowered(function, x)
    nodes = [node for node in program.nodes if isinstance(node, Map)]
    return [(e.dtype, e.implicit) for node in nodes for e in postorder(node.expr) if isinstance(e, Cast)]


def test_only_the_users_own_roundings_are_explicit():
    x = torch.randn(3)
    assert _casts(torch.relu, x.bfloat16()) == [(torch.float32, False), (torch.bfloat16, True)]
    assert _casts(lambda a: a.bfloat16(), x) == [(torch.bfloat16, False)]


def test_an_activation_is_one_node():
    program = lowered(lambda x: F.gelu(x, approximate="tanh"), torch.randn(3))
    assert len(program.nodes) == 1


def test_a_second_rule_is_refused():
    before = RULES[aten.relu.default]
    with pytest.raises(ValueError, match="already has a rule"):
        lowers(aten.relu.default)(lambda ctx, x: x)
    assert RULES[aten.relu.default] is before


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_to_the_power_of_integers(dtype: torch.dtype):
    """Powers wrap around; negative powers of all integers but 1 and -1 are 0."""
    bases = torch.tensor([0, 1, -1, 2, -2, 3, -3, 7, 11, 127]).to(dtype)
    powers = torch.tensor([0, 1, 2, 3, 5, 63, -1, -2]).to(dtype)
    check(torch.pow, bases[:, None].contiguous(), powers)
    check(lambda p: torch.pow(3, p), powers)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor, str]] = {
    "mm.default": (lambda x: x @ x, torch.ones(2, 2, dtype=torch.int64), "int64"),
    "mul.Tensor": (lambda x: x * x, torch.ones(2, dtype=torch.complex64), "complex64"),
    "mode.default": (lambda x: x.mode()[0], torch.ones(65), "long rows"),
    "linalg_qr.default": (lambda x: torch.linalg.qr(x)[0], torch.eye(2), "no rule"),
    "view.dtype": (lambda x: x.view(torch.int32), torch.ones(2), "no rule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_still_work_and_say_why(name: str):
    function, x, reason = REFUSED[name]
    program = check(function, x, leaves=[name])
    assert any(reason in getattr(node, "reason", "") for node in program.nodes)
