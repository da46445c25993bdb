"""Mutation of inputs, views of them, buffers and globals is as in eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import fusion
from tests.fusion.agreement import STRICT, agree, compare

Function = Callable[..., object]


def whole(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2).add_(1)
    return x.sum()


def returned(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def row(x: torch.Tensor) -> torch.Tensor:
    x[1].zero_()
    return x * 2


def column(x: torch.Tensor) -> torch.Tensor:
    x[:, 1] = x[:, 0] + 1
    return x


def diagonal(x: torch.Tensor) -> torch.Tensor:
    x.diagonal().fill_(7)
    return x.sum(0)


def transposed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.t()
    y[0].add_(1)
    return x, y


def flattened(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[::2].mul_(-1)
    return x.exp()


def twice(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    x.add_(y)
    x.mul_(y)
    return y


def read_before_and_after(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    before = x.sum(1)
    x.exp_()
    return before, x.sum(1)


def copied(x: torch.Tensor) -> torch.Tensor:
    x.copy_(x.flip(0).clone())
    return x + 1


def shifted(x: torch.Tensor) -> torch.Tensor:
    x[1:] += x[:-1].clone()
    return x


def shifted_views(x: torch.Tensor) -> torch.Tensor:
    x[1:] = x[:-1] * 2
    return x


def exchanged(x: torch.Tensor) -> None:
    half = x[0].clone()
    x[0] = x[1]
    x[1] = half


def masked(x: torch.Tensor) -> torch.Tensor:
    x[x > 0] = -1.0
    x.masked_fill_(x < -1, 3.0)
    return x


def indexed(x: torch.Tensor) -> torch.Tensor:
    at = torch.tensor([0, 2])
    x[at] = 5.0
    x.index_add_(0, at, torch.ones(2, x.shape[1], dtype=x.dtype))
    return x


def out_argument(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    torch.exp(x, out=y)
    return y


def into_integers(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.int32)
    y.copy_(x * 10)
    return y


def detached(x: torch.Tensor) -> torch.Tensor:
    y = x.detach()
    y.add_(1)
    return x * y


def cumulative(x: torch.Tensor) -> torch.Tensor:
    for k in range(1, x.shape[0]):
        x[k] += x[k - 1]
    return x


def after_dropout_in_evaluation(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.nn.functional.dropout(x, 0.5, training=False)
    y += 1
    return x * y, y


def after_dropout_of_nothing(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = torch.nn.functional.dropout(y, 0.0)
    z[0] = y[1]
    return y


FUNCTIONS: tuple[Function, ...] = (
    *(whole, returned, row, column, diagonal, transposed, flattened, twice, read_before_and_after, copied, shifted),
    *(shifted_views, exchanged, masked, indexed, out_argument, into_integers, detached, cumulative),
    *(after_dropout_in_evaluation, after_dropout_of_nothing),
)


@pytest.mark.parametrize("f", FUNCTIONS)
def test_an_input_changes_as_in_eager(f: Function) -> None:
    agree(f, torch.randn(5, 5), calls=2)


@pytest.mark.parametrize("f", [whole, row, column, masked, transposed, cumulative])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int64])
def test_in_other_dtypes(f: Function, dtype: torch.dtype) -> None:
    agree(f, torch.randint(-3, 4, (4, 4)).to(dtype))


@pytest.mark.parametrize("f", [whole, row, diagonal, twice, shifted, masked])
def test_a_view_of_a_larger_tensor_is_changed_in_place(f: Function) -> None:
    base = torch.randn(7, 11)
    fused = fusion.fuse(f, options=STRICT)
    for layout in (lambda t: t[1:6, 2:7], lambda t: t[::3, ::4], lambda t: t.t()[1:4, 1:5], lambda t: t[2:, 3:]):
        mine, yours = base.clone(), base.clone()
        compare(f(layout(mine)), fused(layout(yours)))
        compare(mine, yours)


def counted(total: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    total.add_(x.sum())
    return torch.nn.functional.elu(x, alpha=scale) * total


def emptied(total: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    result = torch.lerp(total, x[0], scale)
    total.zero_()
    return result


def refilled(total: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    torch.sum(x * scale, 0, out=total)
    return x


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("f", [counted, emptied, refilled])
def test_a_tensor_of_one_number_changes(f: Function, dtype: torch.dtype, dynamic: bool) -> None:
    """PyTorch treats such a float64 number as a float of the program, and traces again without it."""
    fused = fusion.fuse(f, dynamic=dynamic, options=STRICT)
    mine, yours = torch.tensor(2.0, dtype=dtype), torch.tensor(2.0, dtype=dtype)
    for scale in (3.0, 5.0, 7.0):
        x = torch.randn(4, dtype=dtype)
        compare((f(mine, x, scale), mine), (fused(yours, x, scale), yours))


def test_two_inputs_share_memory() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    base = torch.randn(6, 4)
    for pair in ((base[:4], base[2:]), (base, base), (base, base.t().t()), (base[0], base[1])):
        agree(f, *pair)
        torch._dynamo.reset()


def test_an_input_is_given_a_view_of_another() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        b.view(-1).mul_(3)
        return a.sum() + b.sum()

    base = torch.randn(12)
    agree(f, base, base.view(3, 4))


def test_same_code_with_and_without_shared_memory() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.mul_(2)
        return b + 1

    fused = fusion.fuse(f)  # not strict: for each order, some of these calls lie otherwise, and run in eager
    pairs = [
        (slice(0, 2), slice(2, 4)),
        (slice(0, 2), slice(1, 3)),
        (slice(0, 2), slice(0, 2)),
        (slice(1, 3), slice(2, 4)),
    ]
    for order in (pairs, pairs[::-1], pairs[1:]):
        torch._dynamo.reset()
        for left, right in order:
            mine, yours = torch.ones(4, 3), torch.ones(4, 3)
            compare(f(mine[left], mine[right]), fused(yours[left], yours[right]))
            compare(mine, yours)
    assert {bool(graph.failure) for graph in fusion.report(fused).graphs} == {False, True}
    columns = torch.ones(3, 6)
    compare(f(columns[:, :2].clone(), columns[:, 2:]), fused(columns[:, :2], columns[:, 2:]))


def test_many_inputs_that_were_disjoint() -> None:
    def f(*given: torch.Tensor) -> list[torch.Tensor]:
        given[3].add_(1)
        return [x * 2 for x in given]

    def rows(starts: Sequence[int]) -> list[torch.Tensor]:
        memory = torch.arange(200.0)
        return [memory[start : start + 4] for start in starts]

    fused = fusion.fuse(f)
    apart, unchanged_meet = range(0, 160, 8), [*range(0, 152, 8), 0]
    within, before, same = ([*range(0, 152, 8), start] for start in (25, 23, 24))
    for starts, eager in ((apart, 0), (unchanged_meet, 0), (within, 1), (before, 1), (same, 1)):
        mine, yours = rows(starts), rows(starts)
        compare((f(*mine), mine), (fused(*yours), yours))
        assert sum(bool(graph.failure) for graph in fusion.report(fused).graphs) == eager


def test_an_input_that_requires_grad_is_changed_through_an_intermediate() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[0] = 0
        y.add_(x)
        y[:, 1].mul_(x[:, 0])
        return y

    agree(f, torch.randn(3, 4, requires_grad=True), backward=True)


def test_an_input_gains_a_gradient_by_being_written() -> None:
    def f(out: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out.mul_(w)
        return out.exp()

    out, w = torch.randn(3, 4), torch.randn(4, requires_grad=True)
    before, expected = out.clone(), out * w
    result = fusion.fuse(f, options=STRICT)(out, w)
    assert out.requires_grad and not out.is_leaf and result.requires_grad
    torch.testing.assert_close((out, result), (expected, expected.exp()))
    (gradient,) = torch.autograd.grad(out.sum(), w)
    torch.testing.assert_close(gradient, before.sum(0))


def test_a_tensor_of_the_module_and_of_the_world() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x.sum(0)
            self.steps.add_(1)
            return self.total / self.steps

    plain, twin = Counter(), Counter()
    fused = fusion.fuse(twin, options=STRICT)
    for _ in range(3):
        x = torch.randn(4, 3)
        compare(plain(x), fused(x))
    compare(dict(plain.named_buffers()), dict(fused.named_buffers()))
    assert fused.total is twin.total and int(twin.steps) == 3


def test_a_global_tensor() -> None:
    seen = torch.zeros(4)

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.add_(x)
        return seen * 2

    fused = fusion.fuse(f, options=STRICT)
    for k in range(1, 4):
        torch.testing.assert_close(fused(torch.ones(4)), torch.full((4,), 2.0 * k))
    torch.testing.assert_close(seen, torch.full((4,), 3.0))


def test_the_version_counter_moves() -> None:
    x = torch.randn(4)
    version = x._version
    fusion.fuse(whole, options=STRICT)(x)
    assert x._version > version


def test_a_saved_tensor_may_not_be_changed_before_backward() -> None:
    fused = fusion.fuse(lambda x: x.sin().sum(), options=STRICT)
    x = torch.randn(4, requires_grad=True)
    loss = fused(x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_mutations_that_aotautograd_cannot_trace_run_eagerly() -> None:
    """PyTorch cannot create a base of symbolic size for inputs that share memory and were created without one."""

    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a * b

    def pair(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        memory = torch.arange(40.0).untyped_storage()
        empty = torch.empty(0)
        return empty.new().set_(memory, 0, (rows, 3)), empty.new().set_(memory, 3, (rows, 3))

    fused = fusion.fuse(f, dynamic=True)
    with pytest.warns(fusion.FusionWarning, match="running eagerly"):
        got = fused(*pair(4))
    torch.testing.assert_close(got, f(*pair(4)))
    assert fusion.report(fused).graphs[0].failure


def codebook(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Directions that are moved once they have been compared with."""
    scores = x @ (y / y.norm(dim=1, keepdim=True)).t()
    with torch.no_grad():
        y.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return scores


def using_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = x * y.t()[1:].sin().sum()
    y.neg_()
    return result


def of_a_part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, _ = y.split([2, 1], 1)
    result = x[:, :2] * first.exp()
    y.add_(1)
    return result


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("f", [codebook, using_a_view, of_a_part], ids=lambda f: f.__name__)
def test_gradients_use_the_value_of_an_input_before_its_change(
    f: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], strict: bool
) -> None:
    """PyTorch's own partition may let backward recompute from the changed input."""
    fused = fusion.fuse(f, options={**STRICT, "numerics": "strict"} if strict else STRICT)

    def training(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, y = torch.linspace(-1, 1, 9).view(3, 3).requires_grad_(), torch.linspace(1, 2, 9).view(3, 3)
        (function(x, y) * torch.linspace(0, 1, 9).view(3, 3)[:, -1:]).sum().backward()
        assert x.grad is not None
        return x.grad, y

    torch.testing.assert_close(training(fused), training(f))


def test_gradients_of_an_input_that_has_one_and_is_changed() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(y)
        return y.exp()

    def training(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, y = (torch.linspace(low, 1, 6).requires_grad_() for low in (-1, -2))
        result = x * 2
        return torch.autograd.grad((function(result, y) + result * 3).sum(), [x, y])

    torch.testing.assert_close(training(fusion.fuse(f, options=STRICT)), training(f))
