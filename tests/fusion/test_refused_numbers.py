"""Divisors of zero, numbers that a dtype cannot hold, rows without an extreme: refused as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError

import fusion
from tests.fusion.test_out_of_range import Function, refused

# Divisors -------------------------------------------------------------------------------------------------------------

DIVISIONS: dict[str, Function] = {
    "floor": lambda a, b: a // b * 2,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc") + 1,
    "remainder": lambda a, b: (a % b).float().softmax(1),
    "fmod": lambda a, b: torch.fmod(a, b).sum(1),
    "both": lambda a, b: (a // b, a % b),
    "where it is not chosen": lambda a, b: torch.where(b != 0, a // b, a),
    "padded": lambda a, b: F.pad(a // b, (1, 2, 3, 0), value=5),
    "of one number": lambda a, b: a // b.sum() + b.sum(),
}


@pytest.mark.parametrize("name", DIVISIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_divided_by_zero_are_refused(name: str, dtype: torch.dtype) -> None:
    divide = DIVISIONS[name]
    fused = fusion.fuse(divide, options={"strict": True})
    a, b = torch.arange(9 * 33).view(9, 33) - 40, torch.ones(9, 33, dtype=torch.int64)
    a, b = a.clamp(max=100).to(dtype), (b.cumsum(1) % 7 + 1).to(dtype)
    torch.testing.assert_close(fused(a, b), divide(a, b))
    b[7, 20] = 0
    if name == "of one number":
        b.zero_()
    error = refused(fused, a, b)
    assert str(refused(divide, a, b)) == "ZeroDivisionError" == str(error).split("\n")[0]
    assert "at: test_refused_numbers.py:" in str(error)


def test_floats_and_numbers_are_divided_as_they_are() -> None:
    x = torch.tensor([1.0, -2.0, 0.0])
    torch.testing.assert_close(fusion.fuse(lambda x: (x // 0, x % 0))(x), (x // 0, x % 0), equal_nan=True)
    fused = fusion.fuse(lambda a: a // 3 + a % -4)
    torch.testing.assert_close(fused(torch.arange(-9, 9)), torch.arange(-9, 9) // 3 + torch.arange(-9, 9) % -4)
    assert "ZeroDivisionError" in str(refused(fusion.fuse(lambda a: a // 0 + 1), torch.arange(3)))


def test_extremes_of_nothing_and_differences_of_bools_are_refused() -> None:
    for f, x in (
        (lambda x: x.min(1).values + 1, torch.ones(3, 0)),
        (lambda x: x.argmin(1) + 1, torch.ones(3, 0)),
        (lambda x: (x - 1) * 2, torch.tensor([True, False])),
        (lambda x: (1.5 - x) * 2, torch.tensor([True, False])),
    ):
        # In some releases Dynamo puts an exception of its own around that of a reduction.
        assert isinstance(refused(fusion.fuse(f), x), (type(refused(f, x)), TorchRuntimeError))


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "dtype"),
    [
        (lambda x: x.clamp(5, 300) + 1, torch.uint8),
        (lambda x: torch.where(x > 3, x, 300) + 1, torch.uint8),
        (lambda x: x.masked_fill(x > 3, -1e10) * 2, torch.float16),
        (lambda x: torch.full_like(x, 1 << 40) + x, torch.int32),
        (lambda x: F.pad(x, (1, 1), value=-300) + 1, torch.int8),
        (lambda x: x.index_fill(0, torch.tensor([1]), 1e300) + 1, torch.float32),
    ],
    ids=["clamp", "where", "masked_fill", "full", "pad", "index_fill"],
)
def test_numbers_that_do_not_fit_are_refused(f: Function, dtype: torch.dtype) -> None:
    x = torch.arange(7).to(dtype)
    assert "without overflow" in str(refused(f, x)) and "without overflow" in str(refused(fusion.fuse(f), x))


def test_numbers_that_fit_or_wrap_around_are_taken() -> None:
    def f(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wrapped = x + 300, x * -1, x == 300, x.clamp(-5, 30), x.masked_fill(x > 3, -1)
        return *wrapped, h.masked_fill(h > 3, -torch.inf), h.clamp(max=65504), h + 1e10, torch.where(h > 2, h, 60000)

    x = torch.arange(7, dtype=torch.uint8)
    h = x.half()
    fused = fusion.fuse(f, options={"strict": True})
    for got, expected in zip(fused(x, h), f(x, h), strict=True):
        assert torch.equal(got, expected) and got.dtype is expected.dtype
    assert not fusion.report(fused).externs


# Integers where eager has floats only ---------------------------------------------------------------------------------

OF_FLOATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1) * 2,
    "softmin": lambda x: F.softmin(x, 1),
    "cross_entropy": lambda x: F.cross_entropy(x, x[:, 0].long()),
    "nll_loss": lambda x: F.nll_loss(x, x[:, 0].long()),
    "nll_loss of pictures": lambda x: F.nll_loss(x[..., None], x[:, :1].long()),
    "glu": lambda x: F.glu(x, 1) + 1,
    "prelu": lambda x: F.prelu(x, x[0, :1]),
    "batch_norm": lambda x: F.batch_norm(x, x[0].float(), x[0].float().abs() + 1),
    "batch_norm in training": lambda x: F.batch_norm(x, None, None, training=True),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x + 1),
    "huber_loss": lambda x: F.huber_loss(x, x + 1),
    "mse_loss": lambda x: F.mse_loss(x, x + 1),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x, x),
    "logsigmoid": lambda x: F.logsigmoid(x),
    "frac": lambda x: x.frac(),
    "logaddexp2": lambda x: torch.logaddexp2(x, x),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x[None], 2),
    "max_unpool2d": lambda x: F.max_unpool2d(x[None], torch.zeros_like(x[None]).long(), 2),
    "cdist": lambda x: torch.cdist(x, x, 1.0),
    "pdist": lambda x: F.pdist(x),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", OF_FLOATS)
def test_integers_are_refused_where_eager_has_floats_only(name: str, trains: bool) -> None:
    f = OF_FLOATS[name]
    x = torch.ones(4, 4, dtype=torch.int64)

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return f(x) + weight.exp().sum()

    weight = torch.zeros(3, requires_grad=trains)
    with pytest.raises((RuntimeError, NotImplementedError)) as expected:
        f(x)
    with pytest.raises((RuntimeError, NotImplementedError)) as raised:
        fusion.fuse(program)(x, weight)
    if not isinstance(raised.value, TorchRuntimeError):  # Dynamo's, where PyTorch's trace refuses them, too
        assert str(raised.value) == str(expected.value)


NORMS: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    # of the input, of the weights, of the statistics
    "statistics too wide": (torch.float32, torch.float32, torch.float64),
    "weights too wide": (torch.bfloat16, torch.float64, torch.float32),
    "narrow parameters": (torch.float64, torch.float32, torch.float32),
    "complex": (torch.complex64, torch.complex64, torch.complex64),
}


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", NORMS)
def test_batch_norms_of_dtypes_that_eager_refuses_are_refused(name: str, training: bool) -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, mean + 1, weight, weight, training=training).relu()

    dtypes = NORMS[name]
    x, weight, mean = torch.ones(4, 3, dtype=dtypes[0]), torch.ones(3, dtype=dtypes[1]), torch.ones(3, dtype=dtypes[2])
    assert str(refused(fusion.fuse(norm), x, weight, mean)) == str(refused(norm, x, weight, mean))


def test_batch_norms_of_narrow_floats_and_wide_parameters_are_compiled() -> None:
    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, weight, weight, training=True).sin()

    fused = fusion.fuse(norm, options={"strict": True})
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight = torch.arange(12.0).view(4, 3).to(dtype), torch.ones(3)
        torch.testing.assert_close(fused(x, weight), norm(x, weight))
    assert not fusion.report(fused).externs


def test_the_reason_names_the_batch_norm_of_integers() -> None:
    statistics = torch.ones(4, dtype=torch.int64)
    fused = fusion.fuse(lambda x: F.batch_norm(x, statistics, statistics) * 2, options={"strict": True})
    with pytest.raises(BackendCompilerFailed, match=r"Unsupported: \w*batch_norm\w* of torch.int64"):
        fused(torch.ones(4, 4, dtype=torch.int64))


OF_ONE_DTYPE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addmm": lambda x, y: torch.addmm(y[0], x, x),
    "heaviside": lambda x, y: torch.heaviside(x, y),
    "index_add": lambda x, y: x.index_add(0, torch.arange(4), y),
    "index_add_": lambda x, y: x.clone().index_add_(0, torch.arange(4), y) * 2,
    "index_put": lambda x, y: x.index_put((torch.arange(4),), y),
    "index_reduce": lambda x, y: x.index_reduce(0, torch.arange(4), y, "amin"),
    "cross": lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
    "weights of a loss": lambda x, y: F.nll_loss(x, torch.arange(4), y[0]),
    "weights of a loss of pictures": lambda x, y: F.nll_loss(x[..., None], torch.arange(4)[:, None], y[0]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", OF_ONE_DTYPE)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_two_dtypes_are_refused_where_eager_has_one(name: str, dynamic: bool) -> None:
    function = OF_ONE_DTYPE[name]
    x = torch.arange(16.0).view(4, 4)
    fused = fusion.fuse(function, dynamic=dynamic)
    torch.testing.assert_close(fused(x, x + 1), function(x, x + 1))
    for other in (torch.int64, torch.float64, torch.bool):
        expected, error = refused(function, x, x.to(other)), refused(fused, x, x.to(other))
        if not isinstance(error, TorchRuntimeError):  # Dynamo's, where PyTorch's trace refuses them, too
            assert str(error) == str(expected)
