"""The context of a call: modes of autograd and of precision, settings of PyTorch, hooks on saved tensors; errors that
the user's code raises in places that the compiler calls; callables that are no functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fusion
from tests.fusion.agreement import STRICT


def mixed(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).softmax(-1)


def gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    result = f(leaf)
    result.square().sum().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


# Modes --------------------------------------------------------------------------------------------------------------


def test_saved_tensors_go_through_hooks() -> None:
    fused, x = fusion.fuse(mixed, options=STRICT), torch.randn(4, 5)
    expected = gradient(mixed, x)
    packed: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.testing.assert_close(gradient(fused, x), expected)
    assert packed
    with torch.autograd.graph.save_on_cpu():
        torch.testing.assert_close(gradient(fused, x), expected)
    torch.testing.assert_close(gradient(fused, x), expected)


@pytest.mark.filterwarnings("ignore:Anomaly")
def test_anomaly_mode_detects_nan() -> None:
    fused = fusion.fuse(lambda x: x.sqrt() * 2 + 1, options=STRICT)
    with torch.autograd.detect_anomaly():
        torch.testing.assert_close(gradient(fused, torch.ones(3))[1], torch.full((3,), 6.0))
        with pytest.raises(RuntimeError, match="nan"):
            gradient(fused, -torch.ones(3))


def test_forward_mode_derivatives() -> None:
    """Kernels know no tangents, so none are launched."""
    fused, x, direction = fusion.fuse(mixed, options=STRICT), torch.randn(4, 5), torch.randn(4, 5)
    plain = fused(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, direction)
        expected, got = forward_ad.unpack_dual(mixed(dual)), forward_ad.unpack_dual(fused(dual))
    torch.testing.assert_close((got.primal, got.tangent), (expected.primal, expected.tangent))
    torch.testing.assert_close(fused(x), plain)
    compiled, *_, called = fusion.report(fused).graphs
    assert compiled.kernels and "forward-mode" in called.failure
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), direction)
        expected, got = forward_ad.unpack_dual(mixed(dual)), forward_ad.unpack_dual(fused(dual))
    torch.testing.assert_close((got.primal, got.tangent), (expected.primal, expected.tangent))
    torch.testing.assert_close(torch.func.jvp(fused, (x,), (direction,)), torch.func.jvp(mixed, (x,), (direction,)))


def test_backward_twice() -> None:
    fused = fusion.fuse(lambda x: (x.sin(), x.cos()), options=STRICT)
    x = torch.randn(3, 4, requires_grad=True)
    sine, cosine = fused(x)
    sine.sum().backward(retain_graph=True)
    sine.sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().cos())
    with pytest.raises(RuntimeError, match="second time"):
        cosine.sum().backward()
    x.grad = None
    fused(x)[1].backward(torch.ones(1, 1).expand(3, 4))
    torch.testing.assert_close(x.grad, -x.detach().sin())


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_autocast_around_and_within(dtype: torch.dtype | None) -> None:
    layer = nn.Linear(5, 3)

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = layer(x)
        with torch.autocast("cpu", enabled=False):
            second = torch.softmax(layer(x.float()), -1)
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16):
            third = torch.softmax(layer(x) * 2, -1)
        return first, second, third

    fused, x = fusion.fuse(f, options=STRICT), torch.randn(4, 5)
    around: AbstractContextManager[object] = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with around:
        expected, got = f(x), fused(x)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    if dtype is not None:  # and outside again
        assert [result.dtype for result in fused(x)] == [result.dtype for result in f(x)]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "setting",
    [lambda: default(torch.float64), lambda: default(torch.float16), lambda: threads(3), deterministic],
    ids=["double by default", "half by default", "threads", "deterministic"],
)
def test_settings_change_between_calls(setting: Callable[[], AbstractContextManager[None]]) -> None:
    def f(x: Tensor) -> Tensor:
        return (x + torch.ones(5) * (torch.arange(5) / 4)).exp().sum(0)

    fused, x = fusion.fuse(f, options=STRICT), torch.randn(300, 5)
    for surrounding in (nullcontext, setting, nullcontext):
        with surrounding():
            expected, got = f(x), fused(x)
        assert expected.dtype is got.dtype
        torch.testing.assert_close(got, expected)


# Errors -------------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


class Halt(BaseException):
    pass


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise OwnError("in backward", 7)


def test_an_error_in_the_users_backward() -> None:
    x = torch.randn(4, requires_grad=True)
    with pytest.raises(OwnError) as caught:
        fusion.fuse(lambda x: (Failing.apply(x * 3) + 1).sum())(x).backward()
    assert caught.value.args == ("in backward", 7)


def test_an_error_in_a_hook() -> None:
    def refuse(grad: Tensor) -> None:
        raise OwnError("in a hook")

    x = torch.randn(4, requires_grad=True)
    x.register_hook(refuse)
    with pytest.raises(OwnError, match="in a hook"):
        fusion.fuse(lambda x: x.sin().sum(), options=STRICT)(x).backward()


def test_an_error_in_the_users_operation() -> None:
    @torch.library.custom_op("fusion_tests::refused", mutates_args=())
    def refused(x: Tensor) -> Tensor:
        raise OwnError("in an operation", 3)

    @refused.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    with pytest.raises(OwnError) as caught:
        fusion.fuse(lambda x: refused(x * 2) + 1, options=STRICT)(torch.ones(3))
    assert caught.value.args == ("in an operation", 3)


@pytest.mark.parametrize("f", [torch.bitwise_and, lambda x, y: (x * y) ^ y], ids=["and", "xor"])
def test_bits_of_floats_are_refused_as_by_eager(f: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.ones(3)
    for program in (f, fusion.fuse(f, options=STRICT)):
        with pytest.raises(NotImplementedError, match="not implemented for 'Float'"):
            program(x, x)


def test_base_exceptions_propagate() -> None:
    def halts(x: Tensor) -> Tensor:
        raise Halt(x.shape[0])

    with pytest.raises(Halt) as caught:
        fusion.fuse(halts)(torch.ones(3))
    assert caught.value.args == (3,)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo does not trace `raise … from …` in this release")
def test_exceptions_keep_their_cause() -> None:
    def chained(x: Tensor, table: dict[str, float]) -> Tensor:
        try:
            return x * table["scale"]
        except KeyError as missing:
            raise OwnError("no scale") from missing

    with pytest.raises(OwnError, match="no scale") as failed:
        fusion.fuse(chained)(torch.ones(3), {})
    assert isinstance(failed.value.__cause__, KeyError)


# Callables ----------------------------------------------------------------------------------------------------------


class Scale:
    """An object that is called."""

    by = 4

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by


def test_callables_that_are_no_functions() -> None:
    x = torch.randn(3, 4)
    for f in (functools.partial(torch.mul, other=3), Scale(), torch.relu, Tensor.relu, Scale().__call__):
        fused = fusion.fuse(f, options=STRICT)
        torch.testing.assert_close(fused(x), f(x))
        assert fusion.report(fused).kernels


def test_a_size_that_is_marked_as_dynamic() -> None:
    fused = fusion.fuse(lambda x: x.softmax(-1), options=STRICT)
    x = torch.randn(4, 7)
    torch._dynamo.mark_dynamic(x, 1)
    for given in (x, torch.randn(4, 9), torch.randn(4, 300)):
        torch.testing.assert_close(fused(given), given.softmax(-1))
    assert len(fusion.report(fused).graphs) == 1


# Assertions -----------------------------------------------------------------------------------------------------------


def positive(x: Tensor) -> Tensor:
    torch._assert_async((x > 0).all(), "all are to be positive")  # Dynamo makes this of `assert`, pytest something else
    return x.log() * 2


def bounded(x: Tensor) -> Tensor:
    y = x.exp()
    torch._assert_async((y < 100).all(), "all are to be small")
    return y.sum()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("f", "message"), [(positive, "to be positive"), (bounded, "to be small")])
def test_violated_assertions_of_a_program_are_raised(f: Callable[[Tensor], Tensor], message: str, grad: bool) -> None:
    fused, right = fusion.fuse(f, options=STRICT), torch.rand(6) + 0.5
    for _ in range(2):
        torch.testing.assert_close(fused(right.clone().requires_grad_(grad)), f(right))
        wrong = right.clone()
        wrong[2] = -1 if f is positive else 9
        with pytest.raises(RuntimeError, match=message):
            fused(wrong.requires_grad_(grad))
    assert len(fusion.report(fused).kernels) > 0
