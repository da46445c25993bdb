"""Data that eager refuses beside indices out of range: refused with its message; the program goes on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.lowering.errors import CheckFailed, DataRefused
from fusion.lowering.ir.requirements import Requirement, requirement_of

NAN, INF = math.nan, math.inf
TABLE = torch.arange(12.0).view(4, 3)
SIX = torch.arange(6.0)


def floats(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def integers(*values: int) -> Tensor:
    return torch.tensor(values)


def bag(mode: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda indices, offsets: F.embedding_bag(indices, TABLE, offsets, mode=mode)


Case = tuple[Callable[..., Tensor], tuple[Tensor, ...], list[tuple[Tensor, ...]], Requirement]

CASES: dict[str, Case] = {
    # name: (program, accepted arguments, refused ones, the requirement)
    "bernoulli": (
        lambda p: torch.bernoulli(p) * 2,
        (floats(0, 1, 1),),
        [(floats(0, bad, 1),) for bad in (1.5, -0.1, NAN)],
        Requirement.PROBABILITY,
    ),
    "bernoulli_": (
        lambda p: torch.zeros(3).bernoulli_(p),
        (floats(0, 1, 1),),
        [(floats(0, 1, 1.0001),)],
        Requirement.PROBABILITY,
    ),
    "normal": (
        lambda mean, std: torch.normal(mean, std) + 1,
        (floats(1, 2), floats(0, 0)),
        [(floats(1, 2), floats(0, bad)) for bad in (-1, NAN)],
        Requirement.DEVIATION,
    ),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(x, y),
        (floats(0.5, 1), floats(0, 1)),
        [(floats(0.5, bad), floats(0, 1)) for bad in (1.5, -0.1, NAN)],
        Requirement.UNIT_INTERVAL,
    ),
    "multinomial": (
        lambda w: torch.multinomial(w, 1),
        (floats(0, 1, 0),),
        [(floats(1, bad, 2),) for bad in (-1, NAN, INF)],
        Requirement.WEIGHT,
    ),
    "multinomial of rows": (
        lambda w: torch.multinomial(w, 1),
        (floats(0, 1, 0, 0, 0, 1).view(2, 3),),
        [(floats(0, 1, 0, 0, 0, 0).view(2, 3),)],
        Requirement.TOTAL_WEIGHT,
    ),
    "multinomial with replacement": (
        lambda w: torch.multinomial(w, 3, replacement=True),
        (floats(0, 1, 0),),
        [(torch.zeros(3),)],
        Requirement.TOTAL_WEIGHT,
    ),
    "masked_scatter": (
        lambda m, s: SIX.masked_scatter(m, s),
        (SIX > 3, floats(7, 8)),
        [(SIX > 2, floats(7, 8))],
        Requirement.ENOUGH_SOURCES,
    ),
    "assignment under a mask": (
        lambda m, s: SIX.index_put((m,), s),
        (SIX > 3, floats(7, 8)),
        [(SIX > 2, floats(7, 8)), (SIX > 4, floats(7, 8))],
        Requirement.MATCHING_SOURCES,
    ),
    "histc": (
        lambda x: torch.histc(x, 3),
        (floats(0, 1, 2),),
        [(floats(0, bad, 2),) for bad in (NAN, INF)],
        Requirement.HISTC_RANGE,
    ),
    "histogram": (
        lambda x: torch.histogram(x, 3)[0],
        (floats(0, 1, 2),),
        [(floats(0, -INF, 2),)],
        Requirement.HISTOGRAM_RANGE,
    ),
    "lengths of segments": (
        lambda n: torch.segment_reduce(SIX, "sum", lengths=n),
        (integers(2, 4),),
        [(integers(2, 3),), (integers(2, 7),)],
        Requirement.LENGTHS,
    ),
    "negative lengths": (
        lambda n: torch.segment_reduce(SIX, "max", lengths=n),
        (integers(2, 4),),
        [(integers(-2, 8),)],
        Requirement.LENGTH,
    ),
    **{
        f"offsets of bags, {mode}": (
            bag(mode),
            (integers(0, 1, 2), integers(0, 1, 2)),
            [(integers(0, 1, 2), integers(*offsets))],
            requirement,
        )
        for mode, offsets, requirement in (
            ("sum", (0, 2, 5), Requirement.LAST_OFFSET),
            ("mean", (1, 2, 3), Requirement.FIRST_OFFSET),
            ("max", (-1, 2, 3), Requirement.FIRST_OFFSET),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_data_that_eager_refuses_are_refused(name: str) -> None:
    function, accepted, refused, requirement = CASES[name]
    fused = fusion.fuse(lambda *args: function(*args), options={"strict": True})
    for bad in refused:
        torch.testing.assert_close(fused(*accepted), function(*accepted))
        with pytest.raises(RuntimeError):
            function(*bad)
        with pytest.raises(DataRefused) as raised:
            fused(*bad)
        message, place = str(raised.value).splitlines()
        assert message == requirement.value
        assert "test_refused_data.py" in place
    torch.testing.assert_close(fused(*accepted), function(*accepted))


@pytest.mark.parametrize("offsets", [(0, 2, 1), (0, -1, 2), (0, 1, 1 << 40)])
def test_offsets_of_bags_ascend(offsets: tuple[int, ...]) -> None:
    """Eager reads other memory, or raises an error of one kind or another."""
    fused = fusion.fuse(bag("max"), options={"strict": True})
    fused(integers(0, 1, 2), integers(0, 1, 2))
    with pytest.raises(DataRefused, match="offsets"):
        fused(integers(0, 1, 2), integers(*offsets))


def test_lengths_that_are_called_safe_are_not_checked() -> None:
    fused = fusion.fuse(lambda n: torch.segment_reduce(SIX, "sum", lengths=n, unsafe=True))
    assert fused(integers(2, 3)).tolist() == [1, 9]


def test_eagers_messages_have_the_words_of_ours() -> None:
    """Eager adds the numbers of the call, and the place in its source."""
    for function, _, refused, requirement in CASES.values():
        for arguments in refused:
            with pytest.raises(RuntimeError) as raised:
                function(*arguments)
            words = iter(str(raised.value).split())
            assert all(word in words for word in requirement.value.split()), (str(raised.value), requirement)


def test_requirements_have_numbers_of_their_own() -> None:
    numbers = [int(requirement.dim.value) for requirement in Requirement]
    assert [requirement_of(number) for number in numbers] == list(Requirement)
    assert requirement_of(0) is requirement_of(3) is None


# Results that nothing reads ----------------------------------------------------------------------------------------

UNUSED: dict[str, Callable[[Tensor, Tensor], object]] = {
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "index_select": lambda x, i: x.index_select(0, i).exp(),
    "embedding": lambda x, i: F.embedding(i, x).sum(0),
    "of a clone": lambda x, i: x.clone().scatter_(0, i[:, None], 1.0),
    "loss": lambda x, i: F.cross_entropy(x[:2], i),
    "remainder": lambda x, i: 5 % (4 - i),
    "elements": lambda x, i: x[i],
    "elements of elements": lambda x, i: x.exp()[:, i.flip(0)][0],
    "elements of each column": lambda x, i: torch.vmap(lambda column: (column.index_select(0, i), column)[1])(x.t()),
}


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", UNUSED)
def test_results_that_nothing_reads_are_checked(name: str, trains: bool) -> None:
    unused = UNUSED[name]

    def program(x: Tensor, i: Tensor) -> Tensor:
        unused(x, i)
        return x * 2

    fused, x = fusion.fuse(program), TABLE.clone().requires_grad_(trains)
    for _ in range(2):
        assert torch.equal(fused(x, integers(0, 2)), x * 2)
        with pytest.raises((RuntimeError, IndexError)):
            program(x, integers(0, 4))
        with pytest.raises(CheckFailed):
            fused(x, integers(0, 4))
    if trains:
        fused(x, integers(0, 2)).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2))


def assigned(x: Tensor, rows: Tensor, values: Tensor) -> None:
    changed = x.clone()
    changed[rows] = values


BY_THE_LIBRARY: dict[str, tuple[Callable[[Tensor], object], Tensor, Tensor]] = {
    # of a tensor that eager accepts, and one that it refuses
    "offsets": (lambda n: F.embedding_bag(integers(0, 1, 2), TABLE, n, mode="sum"), integers(0, 2), integers(1, 2)),
    "lengths": (lambda n: torch.segment_reduce(SIX, "sum", lengths=n), integers(2, 4), integers(2, 5)),
    "sorter": (lambda n: torch.searchsorted(SIX, SIX, sorter=n), torch.arange(6), torch.arange(6) + 1),
    "rates": (lambda n: torch.poisson(n) + 1, floats(1, 2), floats(1, -2)),
    "assignments": (lambda n: assigned(TABLE, TABLE > 2, n), torch.ones(9), torch.ones(8)),
    "assigned rows": (lambda n: assigned(TABLE, n, TABLE[:2] * 2), integers(0, 2), integers(0, 4)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BY_THE_LIBRARY)
def test_results_that_nothing_reads_are_checked_where_the_library_computes_them(name: str, dynamic: bool) -> None:
    unused, accepted, refused = BY_THE_LIBRARY[name]

    def program(x: Tensor, n: Tensor) -> Tensor:
        unused(n)
        return x * 2

    fused = fusion.fuse(program, dynamic=dynamic)
    for _ in range(2):
        assert torch.equal(fused(TABLE, accepted), TABLE * 2)
        for each in (program, fused):
            with pytest.raises((RuntimeError, IndexError)):
                each(TABLE, refused)


PARTLY_READ: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, i: (x[i] * 2)[:1],
    "one row": lambda x, i: x[i].unbind(0)[0] * 2,
    "columns": lambda x, i: x[:, i].exp()[:, :1],
    "rows of a view": lambda x, i: x.index_select(0, i).view(2, 3, 1)[0].sum(),
    "narrow padding": lambda x, i: F.pad(x[i], (0, 0, 0, -1)),
    "gathered rows": lambda x, i: x[i].exp()[torch.tensor([0])],
    "none": lambda x, i: x[i][:0].sum() + x,
    "parts that leave one out": lambda x, i: torch.cat([x[i][:1, :1], x[i][:1, 2:]], 1),
    "quotients": lambda x, i: (x.long()[:2] // (4 - i)[:, None])[:1].float(),
    "rows of a linear layer": lambda x, i: F.linear(x[i], x)[:1],
    "rows before others": lambda x, i: x[i].sum(1)[:1],
    "parts that overlap": lambda x, i: (lambda rows: rows[:3].sum() + rows[1:3].exp())(x[torch.cat([i * 0, i])]),
    "parts that begin later": lambda x, i: (lambda rows: rows[1:3].sum() + rows[:2].exp())(x[torch.cat([i * 0, i])]),
    "some rows often": lambda x, i: x[i][torch.zeros(9, dtype=torch.long)] * 2,
    "gathered columns": lambda x, i: x[i].gather(0, torch.zeros(7, 3, dtype=torch.long)),
    "bags of rows": lambda x, i: F.embedding_bag(torch.zeros(5, dtype=torch.long), x[i], torch.tensor([0])),
    "windows with gaps": lambda x, i: F.max_pool1d(x[i].t(), 1, 2),
    "shapes": lambda x, i: torch.ones_like(x[i]) * x[0],
    "no columns": lambda x, i: x[i] @ x.t()[:, :0],
    "rows that are dropped out": lambda x, i: F.dropout(x[i], 0.5)[:1] * 0,
    "lower triangle": lambda x, i: x[0].expand(2, 3).index_select(0, i.clamp(max=1)).sum() + x.t()[:, i].t().tril(-2),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PARTLY_READ)
def test_results_of_which_a_part_is_read_are_checked_whole(name: str, dynamic: bool) -> None:
    program = PARTLY_READ[name]
    fused, x = fusion.fuse(program, dynamic=dynamic), TABLE.clone().requires_grad_()
    for _ in range(2):
        torch.testing.assert_close(fused(x, integers(0, 2)), program(x, integers(0, 2)))
        with pytest.raises((RuntimeError, IndexError)):
            program(x, integers(0, 4))
        with pytest.raises(CheckFailed):
            fused(x, integers(0, 4))


READ_WHOLE: dict[str, Callable[[Tensor], object]] = {
    "split columns": lambda rows: torch.cat(rows.exp().split([1, 2], 1)[::-1], 1).cumsum(1)[:, :1],
    "chunks": lambda rows: [part.exp() for part in rows.chunk(3)],
    "unbound": lambda rows: [part.exp() for part in rows.unbind(1)],
    "rotated halves": lambda rows: torch.cat([-rows[:, 1:], rows[:, :1]], 1) * rows,
    "neighbours": lambda rows: rows[1:] - rows[:-1],
    "heads": lambda rows: rows.reshape(3, 2, 3).transpose(1, 2).exp(),
    "parts of parts": lambda rows: [part[:, :1] + part[:, 1:2] + part[:, 2:] for part in (rows[:2], rows[2:])],
    "concatenated": lambda rows: torch.cat([rows[:1] * 0, rows, rows]).exp(),
    "stacked and padded": lambda rows: F.pad(torch.stack([rows, rows]), (1, 1, 2, 0)).exp(),
    "flipped and rolled": lambda rows: rows.flip(0).roll(2, 0).exp(),
    "repeated": lambda rows: rows.repeat(2, 3).exp(),
    "repeated rows": lambda rows: rows.repeat_interleave(2, 0).exp(),
    "windows": lambda rows: F.avg_pool1d(rows.t(), 2, 1),
    "sums": lambda rows: rows.sum(1)[:1],
    "norms": lambda rows: F.layer_norm(rows, (3,))[:1],
    "where a condition holds": lambda rows: torch.where(rows > 1, rows, 0.0),
}


STORED = {"chunks", "windows"}
"""Programs whose rows of a symbolic number are stored anyway, for a call or by another kernel."""


@pytest.mark.parametrize(
    ("name", "dynamic"), [(n, d) for n in READ_WHOLE for d in (False, True) if not (d and n in STORED)]
)
def test_rows_that_are_read_whole_are_checked_once(name: str, dynamic: bool) -> None:
    function = READ_WHOLE[name]
    arguments = TABLE, integers(0, 1, 2, 3, 0, 1)
    report = fusion.explain(lambda x, i: function(x[i]), dynamic=dynamic)(*arguments)
    assert report.kernels
    assert not report.externs
    assert not [kernel.name for kernel in report.kernels if "index" in kernel.name]


def test_results_without_checks_are_not_computed() -> None:
    def program(x: Tensor, i: Tensor) -> Tensor:
        (i + 1).float().exp()
        (x.relu() @ x.t()).sum()
        x[1:, 0]
        return x * 2

    report = fusion.explain(program)(TABLE, integers(0, 1))
    assert [kernel.name for kernel in report.kernels] == ["mul"]
    assert not report.externs


def test_assertions_hold() -> None:
    fused = fusion.fuse(lambda x: (torch._assert_async((x > 0).all()), x * 2)[1])
    assert fused(floats(1, 2)).tolist() == [2, 4]
    with pytest.raises(RuntimeError, match="single nonzero value"):
        fused(floats(1, 0))


# Samples of images -------------------------------------------------------------------------------------------------

FAR = (0.3, NAN, INF, -INF, 1e5, 1e10, -1e10, 3e38, -1e20, 2.0**31, -1.5, 1.0, -1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("corners", [True, False])
def test_samples_at_far_positions_are_eagers(mode: str, padding: str, corners: bool, dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 5, 7, dtype=dtype, generator=torch.Generator().manual_seed(0))
    grid = torch.tensor(list(itertools.product(FAR, FAR)), dtype=dtype).view(1, len(FAR), len(FAR), 2)

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, mode, padding, align_corners=corners)

    fused = fusion.fuse(sample, options={"strict": True})
    torch.testing.assert_close(fused(x, grid), sample(x, grid), equal_nan=True, rtol=1e-4, atol=1e-4)
    assert fusion.report(fused).kernels and not fusion.report(fused).externs
    if mode == "bilinear" and padding != "zeros":
        return  # eager's backward writes outside of the gradient
    results = []
    for function in (fused, sample):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, grid)]
        function(*inputs).sum().backward()
        results.append([tensor.grad for tensor in inputs])
    torch.testing.assert_close(*results, equal_nan=True, rtol=1e-3, atol=1e-3)
