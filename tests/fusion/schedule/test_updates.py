"""Mutated tensors of the caller: written in place if that is correct, and correct in any case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion import fuse, report
from fusion.inspect.report import Report

Function = Callable[..., object]
TARGETS = pytest.mark.parametrize("target", ["c", "reference"])


def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2).add_(y)
    return y + 1


def momentum(x: torch.Tensor, y: torch.Tensor) -> None:
    """Each update reads both tensors before the change."""
    x.mul_(0.9).add_(y)
    y.sub_(x * 0.1)


def averaged(x: torch.Tensor, y: torch.Tensor) -> None:
    """The second update reads the first tensor, which has to wait for it."""
    x.lerp_(torch.ones(5), 0.1)
    y.sub_(x * 0.1)


def overwritten(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(torch.tanh(y) * 2)


def crossed(x: torch.Tensor, y: torch.Tensor) -> None:
    old = x.clone()
    x.add_(y)
    y.sub_(old)


def turned(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_(x.flip(0) + y)


def centred(x: torch.Tensor, y: torch.Tensor) -> None:
    x.sub_(x.mean(1, keepdim=True))
    y.copy_(torch.softmax(y, -1))


def returned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x * 1


def read_later(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The extern reads the tensor before the change, through a view."""
    old = x.t().clone()
    x.mul_(y)
    return torch.kthvalue(old, 2, 0)[0] + x.t()


def partly(x: torch.Tensor, y: torch.Tensor) -> None:
    x[1:].mul_(y[1:])


def other_layout(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_((y.t() + 1).t())


def lower_precision(x: torch.Tensor, y: torch.Tensor) -> None:
    x.copy_((x.double() + y).bfloat16())


def normalised(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Running means: results of reductions, each mixed with the value that it overwrites."""
    x[0].mul_(0.9).add_(y.mean(0), alpha=0.1)
    return y - y.mean(0)


def rows(x: torch.Tensor, y: torch.Tensor) -> None:
    """A whole row is read before its points are written."""
    x.copy_(torch.softmax(x * y, -1))


def given_back(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mul_(y)


def shared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The copied tensor is also returned, as a tensor of its own."""
    product = y * 2
    x.copy_(product)
    return product


def exchanged(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The source is an input itself."""
    x.copy_(y)
    return y + 1


OTHERS = {
    function.__name__: function
    for function in (
        momentum,
        crossed,
        turned,
        centred,
        returned,
        read_later,
        partly,
        other_layout,
        lower_precision,
        normalised,
    )
}


def run(function: Function, target: str, *, turned: bool = False) -> Report:
    """Compare all results and effects of a call with eager; return the report of the last compilation."""
    given = [torch.randn(7, 5) for _ in range(2)]
    if turned:
        given = [tensor.t().contiguous().t() for tensor in given]
    ours, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    places = [tensor.data_ptr() for tensor in ours]
    fused = fuse(function, options={"target": target, "strict": True})
    with torch.no_grad():
        for _ in range(2):
            got, want = fused(*ours), function(*theirs)
            torch.testing.assert_close(ours, theirs)
            assert (got is None) == (want is None)
            if isinstance(got, torch.Tensor):
                torch.testing.assert_close(got, want)
    assert places == [tensor.data_ptr() for tensor in ours]
    return report(fused).graphs[-1]


IN_PLACE = {
    function.__name__: function for function in (scaled, averaged, overwritten, rows, given_back, shared, exchanged)
}


def test_unchanged_statistics_are_not_written() -> None:
    """A norm in evaluation returns its statistics as they are."""

    def f(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return torch._native_batch_norm_legit(x, None, None, mean, variance, False, 0.1, 1e-5)[0]

    compiled, given = fuse(f), (torch.randn(4, 5), torch.randn(5), torch.rand(5))
    torch.testing.assert_close(compiled(*given), f(*given))
    assert not report(compiled).externs


@TARGETS
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_updates_are_written_in_place(name: str, turned: bool, target: str) -> None:
    result = run(IN_PLACE[name], target, turned=turned)
    assert len(result.kernels) == 1 and not result.externs
    assert not result.refusals  # there is no copy that could have been fused


@TARGETS
@pytest.mark.parametrize("turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", OTHERS)
def test_is_right_in_any_case(name: str, turned: bool, target: str) -> None:
    assert run(OTHERS[name], target, turned=turned).kernels


@TARGETS
def test_copies_that_stay_are_one_call(target: str) -> None:
    result = run(crossed, target)
    assert [extern.name for extern in result.externs] in (["aten.copy_.default"], ["aten._foreach_copy_.default"])
    assert all("changed in place" in extern.reason for extern in result.externs)


@TARGETS
def test_the_step_of_an_optimizer_is_a_few_launches(target: str) -> None:
    sizes = [(64,), (1000,), (33, 77), (5,), (128, 129), (3, 3, 3), (1,), (20, 10), (300,), (7, 9)] * 2

    def stepped() -> tuple[list[torch.nn.Parameter], torch.optim.AdamW]:
        torch.manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-2, foreach=True)
        optimizer.step()
        return parameters, optimizer

    (ours, optimizer), (theirs, eager) = stepped(), stepped()
    fused = fuse(optimizer.step, options={"target": target, "strict": True})
    for _ in range(2):
        fused()
        eager.step()
    torch.testing.assert_close(ours, theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert optimizer.state[one].keys() == eager.state[other].keys()
        for key, value in optimizer.state[one].items():
            torch.testing.assert_close(value, eager.state[other][key])
    result = report(fused)
    assert len(result.kernels) <= 4
    assert [extern.name for extern in result.externs] == ["aten._foreach_copy_.default"]  # the counts of steps


@TARGETS
def test_autograd_notices_the_overwrite(target: str) -> None:
    x, y, weight = torch.randn(5), torch.randn(5), torch.randn(5, requires_grad=True)
    product = weight * x
    fuse(scaled, options={"target": target, "strict": True})(x, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


PUT = {
    "once": lambda x, at: x.index_put_((at,), torch.tensor(2.0)),
    "twice": lambda x, at: x.index_put_((at,), torch.tensor(2.0)).index_add_(0, at + 1, x[:2] * 3),
    "with a result": lambda x, at: x.index_put_((at,), torch.tensor(2.0)).sum() + x[0],
}


@TARGETS
@pytest.mark.parametrize("name", PUT)
def test_scatters_into_rows_with_gaps(name: str, target: str) -> None:
    """The initial value of a scatter has the layout of the tensor that it is copied to."""
    function, at = PUT[name], torch.tensor([5, 1])
    whole = torch.randn(7, 9)
    ours, theirs = whole.clone(), whole.clone()
    got = fuse(function, options={"target": target, "strict": True})(ours[:, :5], at)
    torch.testing.assert_close(got, function(theirs[:, :5], at))
    torch.testing.assert_close(ours, theirs)


@TARGETS
def test_tensors_that_overlap(target: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return y + 1

    ours = torch.randn(10)
    theirs = ours.clone()
    got = fuse(f, options={"target": target, "strict": True})(ours[:6], ours[2:8])
    torch.testing.assert_close(got, f(theirs[:6], theirs[2:8]))
    torch.testing.assert_close(ours, theirs)


@TARGETS
@pytest.mark.parametrize("strides", [(1, 1), (33, 1), (1, 2)])
def test_a_source_that_a_library_call_reads_keeps_its_layout(strides: tuple[int, int], target: str) -> None:
    """The call was made for it, whether the product is left to the library in the end or not."""
    weight = torch.randn(33, 3).half()

    def program(x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.25)
        return torch.relu(x @ weight)

    inputs = [torch.linspace(-1, 1, 66).half().as_strided((1, 33), strides) for _ in range(2)]
    fused = fuse(program, options={"target": target, "strict": True})
    torch.testing.assert_close(fused(inputs[0]), program(inputs[1]))
    torch.testing.assert_close(inputs[0], inputs[1])
    assert report(fused).kernels
