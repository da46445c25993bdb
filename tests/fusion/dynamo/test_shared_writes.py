"""Writes to memory that is read, or written, several times: eager's own answer, whichever that is."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion

Program = Callable[[Tensor], Tensor]


def shifted(x: Tensor) -> Tensor:
    x = x.clone()
    x[1:] = x[:-1]
    return x


def summed(x: Tensor) -> Tensor:
    x = x * 1
    x[1:] += x[:-1]
    return x


def by_method(x: Tensor) -> Tensor:
    x = x + 0
    x[1:].addcmul_(x[:-1], x[1:])
    return x


def by_first(x: Tensor) -> Tensor:
    y = x.clone()
    return y.mul_(y[0])


def into_out(x: Tensor) -> Tensor:
    x = x.clone()
    torch.add(x[:-1], 1, out=x[1:])
    return x


def transposed(x: Tensor) -> Tensor:
    x = x[:4].clone().view(2, 2)
    return x.add_(x.t())


def indexed(x: Tensor) -> Tensor:
    x = x.clone()
    x[torch.tensor([0, 1])] = x[2:4]
    return x


def scattered(x: Tensor) -> Tensor:
    x = x.clone()
    return x.index_copy_(0, torch.tensor([0, 1, 2]), x[1:4])


def expanded(x: Tensor) -> Tensor:
    x = x.clone()
    return x.expand(3, -1).add_(1)


def given_expanded(x: Tensor) -> Tensor:
    return x.expand(3, -1).zero_()


def row_of_expanded(x: Tensor) -> Tensor:
    y = x.clone()
    y.expand(3, -1)[1].neg_()
    return y


def windows(x: Tensor) -> Tensor:
    y = x.clone()
    y.unfold(0, 3, 1)[1].fill_(7.0)
    return y


def together(x: Tensor) -> Tensor:
    y = x.clone()
    torch._foreach_add_([y, y[2:4]], 1.0)
    return y


def twice(x: Tensor) -> Tensor:
    y = x.clone()
    torch._foreach_mul_([y[:2], y[3:], y[3:]], 2.0)
    return y


REFUSED = [shifted, summed, by_method, by_first, into_out, transposed, indexed, scattered, expanded]
"""Programs that eager refuses, with these words:"""
SHARED = r"refers? to a single memory location"
LEFT_TO_EAGER = [given_expanded, row_of_expanded, windows, together, twice]
"""Programs that eager computes by writing through views whose elements overlap, or one after the other."""


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_eagers_error_is_raised(program: Program) -> None:
    x = torch.arange(6.0) - 2
    with pytest.raises(RuntimeError, match=SHARED) as expected:
        program(x.clone())
    fused = fusion.fuse(program, options={"strict": True})
    warnings.simplefilter("ignore", fusion.FusionWarning)
    with pytest.raises(RuntimeError, match=SHARED) as actual:
        fused(x.clone())
    assert str(actual.value).splitlines()[0] == str(expected.value).splitlines()[0]
    assert "share memory" in str(fusion.report(fused)) or "partly overlaps" in str(fusion.report(fused))


@pytest.mark.parametrize("program", LEFT_TO_EAGER, ids=lambda program: program.__name__)
def test_views_whose_elements_overlap_are_written_by_eager(program: Program) -> None:
    x, own = torch.arange(6.0) - 2, torch.arange(6.0) - 2
    fused = fusion.fuse(program)
    warnings.simplefilter("ignore", fusion.FusionWarning)
    result = fused(own)
    torch.testing.assert_close((result, own), (program(x), x))
    assert any(words in str(fusion.report(fused)) for words in ("share memory", "share elements"))


def disjoint(x: Tensor) -> Tensor:
    x = x.clone()
    x[:2] = x[2:4]
    x[4:] += x[:2]
    torch._foreach_mul_([x[3:], x[:3]], 2.0)
    return x


def itself(x: Tensor) -> Tensor:
    x = x.clone()
    x[:] = x
    x[1:].add_(x[1:])
    return x.copy_(x)


def copies(x: Tensor) -> Tensor:
    x = x.clone()
    x[1:] = x[:-1].clone()
    x[1:] += x[:-1] * 2
    return x


def rotated(x: Tensor) -> Tensor:
    """Exchange the halves of rows, as rotary embeddings do: parts with gaps, which eager does not compare."""
    x = x.clone().view(2, 3)
    x[:, :1] = x[:, 1:2]
    x[:, 1:] = x[:, :1]
    return x


def read_expanded(x: Tensor) -> Tensor:
    y = x.clone()
    wide = y.expand(3, -1)
    y.add_(1)
    return wide * y


def pairs(x: Tensor) -> Tensor:
    """Operators whose names end like those of functions that write."""
    first = x > 0
    return (first[:, None] & first[1:]) | (first[None, 1:] ^ ~first[:, None])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("program", [disjoint, itself, copies, rotated, read_expanded, pairs], ids=lambda p: p.__name__)
def test_writes_to_other_memory_are_compiled(program: Program, dynamic: bool) -> None:
    fused = fusion.fuse(program, dynamic=dynamic, options={"strict": True})
    x = torch.arange(6.0) - 2
    torch.testing.assert_close(fused(x), program(x), rtol=0, atol=0)
    assert fusion.report(fused).kernels


def test_inputs_that_share_memory_and_are_no_views() -> None:
    """AOTAutograd would take all of the memory for their base, of which the traced one is a part."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        b.mul_(2)
        return a + b

    def lying(offset: int, memory: Tensor) -> Tensor:
        return torch.empty(0).set_(memory.untyped_storage(), offset, (6,), (1,))

    def called(function: Callable[[Tensor, Tensor], Tensor], size: int) -> tuple[Tensor, Tensor]:
        memory = torch.arange(float(size))
        return function(lying(0, memory), lying(3, memory)), memory

    fused = fusion.fuse(program)
    for size in (10, 9, 12):
        if size == 10:
            with pytest.warns(fusion.FusionWarning, match="views of no common tensor"):
                result = called(fused, size)
        else:
            result = called(fused, size)
        torch.testing.assert_close(result, called(program, size), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_another_base(dynamic: bool) -> None:
    """The same views of a larger tensor, from which AOTAutograd creates the views."""

    def program(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        b.mul_(2)
        return a + b

    fused = fusion.fuse(program, dynamic=dynamic)
    for size in (10, 9, 20, 10):
        mine, own = torch.arange(float(size)), torch.arange(float(size))
        warnings.simplefilter("ignore", fusion.FusionWarning)
        result = fused(own[:6], own[3:9])
        torch.testing.assert_close((result, own), (program(mine[:6], mine[3:9]), mine), rtol=0, atol=0)
    assert fusion.report(fused).kernels


@pytest.mark.parametrize(
    "part", [lambda x: x[:, :5], lambda x: x.flatten()[3:-3].view(2, -1).t()], ids=["gaps", "offset"]
)
def test_results_that_are_symbolic_views_of_a_part_that_is_changed(part: Callable[[Tensor], Tensor]) -> None:
    """AOTAutograd creates them at the offsets of the new value's views, which are wrong within a larger tensor."""

    def program(x: Tensor) -> tuple[Tensor, ...]:
        halves = torch.split(x, x.shape[0] // 2)
        x.add_(5)
        return halves

    fused = fusion.fuse(program, dynamic=True)
    for rows in (6, 11):
        whole, own = torch.arange(8.0 * rows).view(rows, 8), torch.arange(8.0 * rows).view(rows, 8)
        torch.testing.assert_close(fused(own), program(whole), rtol=0, atol=0)
        expected = program(part(whole))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fusion.FusionWarning)
            actual = fused(part(own))
        torch.testing.assert_close((actual, own), (expected, whole), rtol=0, atol=0)
    report = fusion.report(fused)
    assert report.kernels and any("a result is a view of it" in str(graph.failure) for graph in report.graphs)
