"""Indices out of range: each operation refuses them with eager's type of error and with eager's message."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.lowering.checks import checked
from fusion.lowering.errors import IndexOutOfRange
from fusion.lowering.ir.error_messages import DIMS, Wording, worded

Function = Callable[[Tensor, Tensor], Tensor]

X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))

OPERATIONS: dict[str, Function] = {
    # of x (5 × 7) and three positions
    "index": lambda x, i: x[i] * 2,
    "index of columns": lambda x, i: x[:, i].relu(),
    "index of both": lambda x, i: x[i * 0, i].exp(),
    "index of some": lambda x, i: x[None, :, i].exp(),
    "index of a number": lambda x, i: x[1, i].exp(),
    "index_put": lambda x, i: x.index_put((i,), x[0, 0]).sin(),
    "index_put, added": lambda x, i: x.index_put((i,), x[:3], accumulate=True).sin(),
    "index_put of points": lambda x, i: x.index_put((i * 0, i), x[0, 0]),
    "gather": lambda x, i: x.gather(1, i.expand(5, 3)) + 1,
    "gather of no dimension": lambda x, i: x[0, 0].gather(0, i[1]) * 2,
    "index_select of rows": lambda x, i: x.index_select(0, i).neg(),
    "index_select of columns": lambda x, i: x.index_select(-1, i).neg(),
    "index_select of a volume": lambda x, i: x[None].index_select(2, i).neg(),
    "index_select of a vector": lambda x, i: x[0].index_select(0, i).neg(),
    "embedding": lambda x, i: F.embedding(i, x, padding_idx=2).tanh(),
    "embedding_bag": lambda x, i: F.embedding_bag(i, x, torch.arange(2), mode="max"),
    "embedding_bag of doubles": lambda x, i: F.embedding_bag(i[None], x.double(), mode="sum"),
    "take": lambda x, i: x.take(i * 10).cos(),
    "put": lambda x, i: x.put(i * 10, torch.ones_like(x[0, :3])),
    "scatter": lambda x, i: x.scatter(1, i.expand(5, 3), x[:, :3]),
    "scatter of a number": lambda x, i: x.scatter(0, i[:, None].expand(3, 7), 2.0) * x,
    "scatter, added": lambda x, i: x.detach().scatter(1, i.expand(5, 3), x.detach(), reduce="add"),
    "scatter_add": lambda x, i: x.scatter_add(1, i.expand(5, 3), x[:, :3]),
    "scatter_reduce": lambda x, i: x.scatter_reduce(1, i.expand(5, 3), x[:, :3], "amax"),
    "index_add": lambda x, i: x.index_add(1, i, x[:, :3]),
    "index_add of multiples": lambda x, i: x.index_add(0, i, x[:3], alpha=2),
    "index_add of a vector": lambda x, i: x[0].index_add(0, i, x[0, :3]),
    "index_add between": lambda x, i: x[..., None].index_add(1, i, x[:, :3, None]),
    "index_copy": lambda x, i: x.index_copy(1, i, x[:, :3]),
    "index_fill": lambda x, i: x.index_fill(1, i, 3.0),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:3], "amin"),
    "nll_loss": lambda x, i: F.nll_loss(x[:3].log_softmax(1), i),
    "nll_loss of one": lambda x, i: F.nll_loss(x[0], i[1]),
    "nll_loss of pictures": lambda x, i: F.nll_loss(x[:3, :, None, None], i[:, None, None], x[0].detach()),
    "cross_entropy": lambda x, i: F.cross_entropy(x[:3], i, label_smoothing=0.1, ignore_index=1),
    "multi_margin_loss": lambda x, i: F.multi_margin_loss(x[:3], i),
    "multilabel_margin_loss": lambda x, i: torch.nn.MultiLabelMarginLoss()(x[:3, :3], i.expand(3, 3)),
    "max_unpool1d": lambda x, i: F.max_unpool1d(x[None, :3, :3], i.expand(1, 3, 3), 2),
    "max_unpool2d": lambda x, i: F.max_unpool2d(x[None, :3, :3], i.expand(1, 3, 3), 2),
    "at a maximum": lambda x, i: x[x.argmax(1)[:3] * 0 + i],
}

NARROW = {
    name
    for name in OPERATIONS
    if name.startswith(("index", "embedding")) and not name.startswith(("index_copy", "index_fill"))
}
"""Operations that take indices of 32 bits."""


def message(error: Exception) -> str:
    """Return the part of a message that is compared: without the place of the error, and the sizes of volumes."""
    return re.split(r" \(output volumes|  \(Could", str(error).split("\n", maxsplit=1)[0])[0]


def refused(function: Function, *args: Tensor) -> Exception:
    with pytest.raises((IndexError, RuntimeError)) as caught:
        function(*args)
    return caught.value


def check(function: Function, fused: Function, *args: Tensor) -> None:
    """Compare the errors of a program and of the compiled one, whose error is of no other type that is caught."""
    expected, error = refused(function, *args), refused(fused, *args)
    for kind in (IndexError, RuntimeError):
        assert isinstance(error, kind) == isinstance(expected, kind)
    assert message(error) == message(expected)
    if isinstance(error, IndexOutOfRange):  # else it is a library's call that raises it
        assert "\n  at: test_error_messages.py:" in str(error)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_the_error_is_eagers(name: str) -> None:
    function = OPERATIONS[name]
    fused = fusion.fuse(function)
    for beyond in (77, -77, 1 << 40):
        check(function, fused, X, torch.tensor([1, beyond, 0]))
    assert isinstance(refused(fused, X, torch.tensor([1, 77, 0])), IndexOutOfRange)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_the_error_is_eagers_for_other_layouts_and_dtypes_and_in_training(name: str) -> None:
    function = OPERATIONS[name]
    fused = fusion.fuse(function)
    places = torch.tensor([1, 9, -77, 9, 0, 9], dtype=torch.int32 if name in NARROW else torch.int64)[::2]
    check(function, fused, X.t().contiguous().t().requires_grad_(), places)


VARYING = ("index of columns", "index_select of rows", "take", "scatter_add", "index_copy", "nll_loss", "embedding")


def test_the_error_is_eagers_for_sizes_that_vary() -> None:
    def function(x: Tensor, i: Tensor, number: int) -> Tensor:
        return OPERATIONS[VARYING[number]](x, i)

    for number in range(len(VARYING)):
        fused = fusion.fuse(function, dynamic=True)
        for rows in (5, 8):
            check(lambda x, i: function(x, i, number), lambda x, i: fused(x, i, number), X.repeat(2, 1)[:rows], BAD)  # noqa: B023  # called at once


BAD = torch.tensor([1, 90, 0])


@pytest.mark.parametrize("dynamic", [False, True])
def test_classes_beyond_those_of_one_hot_are_refused(dynamic: bool) -> None:
    def classes(i: Tensor) -> Tensor:
        return F.one_hot(i, 5)[..., 1:].float().sum(0)

    fused = fusion.fuse(classes, dynamic=dynamic, options={"strict": True})
    for beyond in (5, -1):
        for i in (torch.tensor([1, beyond, 0]), torch.tensor([[0, 9, 4], [0, 9, beyond]])[:, ::2].t()):
            assert str(refused(fused, i)) == str(refused(classes, i))
    assert torch.equal(fused(torch.arange(5)), classes(torch.arange(5)))


def test_wordings_have_numbers_of_their_own() -> None:
    numbers = {int(wording.number(dim).value): (wording, dim) for wording in Wording for dim in (0, 1, 63)}
    assert len(numbers) == 3 * len(Wording)
    assert DIMS > 64  # the most dimensions that a tensor has
    assert all(worded(number) == meaning for number, meaning in numbers.items())


def test_the_error_of_a_large_kernel_names_what_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "MOST_EVALUATED", 0)

    def one(x: Tensor, i: Tensor) -> Tensor:
        return x[:, 0][x.exp().sum(1).long() + i] * 2

    def either(x: Tensor, i: Tensor) -> Tensor:
        places = x.exp().sum(1).long() + i
        return x[:, 0][places] + x[:, 0].gather(0, places)

    for function, kinds in ((one, (True, False)), (either, (True, True))):
        error = refused(fusion.fuse(function), X, torch.tensor(90))
        assert tuple(isinstance(error, kind) for kind in (IndexError, RuntimeError)) == kinds
        assert str(error).startswith("an index is out of bounds\n  at: test_error_messages.py:")
