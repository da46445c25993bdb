"""Means with variances as parts in one pass, and images with channels last, whose reduced axes are one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import fusion
from fusion.codegen.reference import ReferenceTarget
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.schedule.kernels import KernelCall
from tests.fusion.agreement import assert_as_eager


def kernels(function: Callable[..., object], *args: Tensor) -> list[str]:
    """The kernels of one graph, where many programs run side by side."""
    explanation = fusion.explain(function, options={"target": "reference", "strict": True})(*args)
    return [kernel.source for kernel in explanation.kernels]


def check(function: Callable[..., object], *args: Tensor, target: str = "reference") -> None:
    fused = fusion.fuse(function, options={"target": target, "strict": True})
    exact = function(*(x.double() if x.is_floating_point() else x for x in args))
    assert_as_eager(fused(*args), function(*args), exact)


def noise(*shape: int, about: float = 0.0, channels_last: bool = False) -> Tensor:
    result = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + about
    return result.to(memory_format=torch.channels_last) if channels_last else result


def third_moment(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)).pow(3).mean(-1)


@pytest.mark.parametrize("about", [0.0, 30.0, -1e4])
@pytest.mark.parametrize("length", [1 << 18, 131_101])
def test_a_variance_is_that_of_parts_about_their_own_means(length: int, about: float) -> None:
    x = noise(2, length, about=about)
    x[1, 5:] *= 1 + torch.arange(length - 5) / length  # whose parts differ in mean and variance
    for function in (lambda x: x.var(-1), lambda x: torch.var_mean(x, -1), lambda x: x.std(-1, correction=0)):
        assert len(kernels(function, x)) == 2
        result = fusion.fuse(function, options={"target": "reference", "strict": True})(x)
        torch.testing.assert_close(result, function(x.double()), rtol=2e-7, atol=1e-6, check_dtype=False)


def test_a_norm_reads_long_rows_twice() -> None:
    x = noise(4, 6, 200, 210, about=3.0)
    result = kernels(lambda x: F.group_norm(x, 3), x)
    assert [text.count("in0[") > 0 and "40000" in text for text in result].count(True) <= 2 and len(result) == 3
    check(lambda x: F.group_norm(x, 3), x)


def test_moments_other_than_the_second_are_split_separately() -> None:
    x = noise(2, 1 << 18, about=2.0)
    assert len(kernels(third_moment, x)) == 4
    check(third_moment, x)


@pytest.mark.parametrize("special", [float("inf"), -float("inf"), float("nan"), 1e25])
def test_numbers_that_are_not_finite_propagate(special: float) -> None:
    x = noise(3, 1 << 17)
    x[1, 70_000] = special
    fused = fusion.fuse(lambda x: x.var(-1), options={"target": "reference", "strict": True})
    torch.testing.assert_close(fused(x), x.var(-1), equal_nan=True)


def test_parts_behind_the_end_count_for_nothing() -> None:
    """The number of parts was chosen for the traced length."""
    fused = fusion.fuse(torch.var_mean, options={"target": "reference", "strict": True})
    for length in (131_101, 300, 70, 2):
        x = noise(3, length, about=5.0)
        torch._dynamo.mark_dynamic(x, 1)
        assert_as_eager(fused(x, -1), torch.var_mean(x, -1), torch.var_mean(x.double(), -1))


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, weight, bias, training=True).relu()


IMAGES = [(5, 48, 57, 53), (9, 40, 64, 60), (130, 64, 15, 9)]


@pytest.mark.parametrize("target", ["reference", "c"])
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("shape", IMAGES)
def test_batch_norm(shape: tuple[int, ...], channels_last: bool, target: str) -> None:
    x = noise(*shape, about=1.0, channels_last=channels_last)
    weight, bias = noise(shape[1], about=1.0), noise(shape[1])
    fused = fusion.fuse(batch_norm, options={"target": target, "strict": True})

    def gradients(run: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [each.to(dtype).requires_grad_() for each in (x, weight, bias)]
        result = run(*given)
        return (result, *torch.autograd.grad((result * result.detach().cos()).sum(), given))

    assert_as_eager(
        *(gradients(*each) for each in ((fused, x.dtype), (batch_norm, x.dtype), (batch_norm, torch.float64)))
    )


@pytest.mark.parametrize("shape", IMAGES)
def test_images_are_cut_along_all_that_is_summed(shape: tuple[int, ...]) -> None:
    """Batch, height and width are one axis, in parts that one program holds."""
    x = noise(*shape, channels_last=True)
    part, _, _ = kernels(batch_norm, x, *(noise(shape[1]) for _ in range(2)))
    assert "//" not in part and "Mod" not in part and " % " not in part and "loop" not in part
    axes = [line.split(": ") for line in part.splitlines() if line.startswith(("  grid", "  whole"))]
    assert len(axes) == 3 and int(axes[0][1]) >= max(shape) and int(axes[-1][1]) <= 1024


def both_sums(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return y.sum((0, 2, 3)), (y * (x - 1) * (x + 2)).sum((0, 2, 3))


def test_sums_of_the_same_image_share_a_pass() -> None:
    x, y = (noise(4, 48, 64, 56, channels_last=True) for _ in range(2))
    assert len(kernels(both_sums, x, y)) == 2
    check(both_sums, x, y)


@pytest.mark.parametrize("dims", [(0,), (0, 2, 3)])
def test_images_of_symbolic_size(dims: tuple[int, ...]) -> None:
    fused = fusion.fuse(batch_norm, options={"target": "reference", "strict": True})
    weight, bias = noise(64, about=1.0), noise(64)
    for size in ((9, 64, 64, 60), (3, 64, 64, 60), (2, 64, 9, 11))[: 3 if len(dims) > 1 else 2]:
        x = noise(*size, about=2.0, channels_last=True)
        for dim in dims:
            torch._dynamo.mark_dynamic(x, dim)
        given = (x, weight, bias)
        assert_as_eager(fused(*given), batch_norm(*given), batch_norm(*(each.double() for each in given)))


def test_a_norm_behind_another_is_cut_as_well() -> None:
    def twice(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return batch_norm(F.max_pool2d(batch_norm(x, weight, bias), 3, 2, 1), weight, bias)

    x, weight, bias = noise(6, 64, 120, 96, about=2.0, channels_last=True), noise(64, about=1.0), noise(64)
    result = kernels(twice, x, weight, bias)
    assert sum(text.count(" = sum over ") for text in result) == 12, result  # two norms, in parts and merged
    check(twice, x, weight, bias)


@pytest.mark.parametrize("shape", [(64, 64, 56, 56), (64, 32, 28, 28)])
def test_the_summed_operand_is_stored_in_the_same_pass(shape: tuple[int, ...]) -> None:
    """Parts are rows of the image, so the operand is stored in the kernel that sums it."""

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = torch.where(x > 0, x * y + y, 0)
        return result, result.sum((0, 2, 3))

    with FakeTensorMode():
        given = [torch.empty(shape, dtype=torch.bfloat16).to(memory_format=torch.channels_last) for _ in range(2)]
        graph = make_fx(both)(*given)
    target = ReferenceTarget()
    _, schedule = schedule_graph(graph, target, Trace(None, "test"))
    assert [len(step.written) for step in schedule.steps if isinstance(step, KernelCall)] == [2, 1]
