"""Indices out of range: refused as in eager, by the same type of error, after which the program can continue."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.backend import Backend
from fusion.lowering.checks.checked import checked
from fusion.lowering.errors import IndexOutOfRange
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.sizes import may_be_empty, size_of
from fusion.options import Options
from tests.lowering.lowered import lowered

X = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))

Function = Callable[..., torch.Tensor]

OPERATIONS: dict[str, tuple[Function, int, bool]] = {
    # name: (program of x and three positions, the dimension they are along, do negative ones count from the end?)
    "index": (lambda x, i: x[i] * 2, 0, True),
    "index of columns": (lambda x, i: x[:, i].relu(), 1, True),
    "index of both": (lambda x, i: x[i, i].exp(), 0, True),
    "index_put": (lambda x, i: x.index_put((i,), x[0, 0]).sin(), 0, True),
    "index_put, added": (lambda x, i: x.index_put((i,), x[0, 0], accumulate=True), 0, True),
    "index_put of points": (lambda x, i: x.index_put((i, i), x[0, 0]), 0, True),
    "gather": (lambda x, i: x.gather(1, i.expand(5, 3)) + 1, 1, False),
    "index_select": (lambda x, i: x.index_select(1, i).neg(), 1, False),
    "embedding": (lambda x, i: F.embedding(i, x).tanh(), 0, False),
    "embedding_bag": (lambda x, i: F.embedding_bag(i, x, torch.arange(2, device=x.device), mode="sum"), 0, False),
    "take": (lambda x, i: x.flatten()[:7].contiguous().take(i).cos(), 1, True),
    "put": (lambda x, i: x[0].put(i, torch.ones_like(x[0, :3])), 1, True),
    "scatter": (lambda x, i: x.scatter(1, i.expand(5, 3), 2.0) * x, 1, False),
    "scatter of sources": (lambda x, i: x.scatter(1, i.expand(5, 3), x), 1, False),
    "scatter of one": (lambda x, i: x.scatter(1, i[1].expand(5, 1), 2.0), 1, False),
    "scatter_add": (lambda x, i: x.scatter_add(1, i.expand(5, 3), x), 1, False),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(1, i.expand(5, 3), x, "amax"), 1, False),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]), 0, False),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:3]), 0, False),
    "index_fill": (lambda x, i: x.index_fill(1, i, 3.0), 1, True),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, x[:3], "amin"), 0, False),
    "nll_loss": (lambda x, i: F.nll_loss(x[:3].log_softmax(1), i), 1, False),
    "cross_entropy": (lambda x, i: F.cross_entropy(x[:3], i), 1, False),
    "smoothed": (lambda x, i: F.cross_entropy(x[:3], i, label_smoothing=0.1), 1, False),
    "pictures": (lambda x, i: F.cross_entropy(x[:3, :, None].expand(3, 7, 2), i[:, None].expand(3, 2)), 1, False),
    "computed": (lambda x, i: x[i * 3 // 3] - 1, 0, True),
    "padded": (lambda x, i: F.pad(x[i], (1, 2, 1, 1), value=3.0), 0, True),
    "moved and padded": (lambda x, i: F.pad((i * 2 + 3), (2, 1)).add(x[(i * 2 + 6) // 2 - 3].sum()), 0, True),
    "joined": (lambda x, i: torch.cat([x[:2], x[i], F.embedding(i.clamp(0, 4), x)]) * 2, 0, True),
    "at the position of a maximum": (lambda x, i: x[x.argmax(1) * 0 + i[1]], 0, True),
    "of no dimension": (lambda x, i: x[0, 0].gather(0, i[1] // 5) * 2, 0, False),
    "of an expanded tensor": (lambda x, i: x[:, :1].expand(5, 7)[:, i] + torch.ones_like(x[0])[i], 1, True),
    "of a sum": (lambda x, i: x.sum(0, keepdim=True).index_select(0, i // 5) * 2, 0, False),
}


def refused(function: Function, *args: torch.Tensor) -> Exception:
    """Return the error that a call raises, of either kind that eager raises, depending on the operation."""
    with pytest.raises((IndexError, RuntimeError)) as caught:
        function(*args)
    return caught.value


@pytest.mark.parametrize("name", OPERATIONS)
def test_indices_that_eager_refuses_are_refused(name: str) -> None:
    function, dim, wraps = OPERATIONS[name]
    fused, first, last = fusion.fuse(function), -X.shape[dim] if wraps else 0, X.shape[dim] - 1
    for places in ([0, last, 1], [2, first, 1]):
        torch.testing.assert_close(fused(X, torch.tensor(places)), function(X, torch.tensor(places)))
    for beyond in (last + 1, 1 << 40, first - 1, -(1 << 40)):
        places = torch.tensor([1, beyond, 0])
        assert isinstance(refused(fused, X, places), type(refused(function, X, places)))
    torch.testing.assert_close(fused(X, torch.tensor([0, 1, 2])), function(X, torch.tensor([0, 1, 2])))


def test_the_error_has_eagers_message_and_the_line() -> None:
    fused = fusion.fuse(lambda x, i: x.exp()[:, i])
    for place in (7, -8, 123456789):
        error = refused(fused, X, torch.tensor([place]))
        assert isinstance(error, IndexOutOfRange)
        first, line = str(error).splitlines()
        assert first == str(refused(lambda x, i: x.exp()[:, i], X, torch.tensor([place])))
        assert line.startswith("  at: test_out_of_range.py:")


SHAPES: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    # name: (program, shape of x, shape of the positions along its last dimension); each takes its own kind of loop
    "lanes on all threads": (lambda x, i: x[i] * 2, (1000,), (300_001,)),
    "a row of lanes": (lambda x, i: x.gather(1, i).relu(), (300, 501), (300, 501)),
    "rows on all threads": (lambda x, i: F.embedding(i, x.t()).exp(), (65, 1000), (4000,)),
    "a block of columns": (lambda x, i: x[:, i].sum(0), (500, 1000), (600,)),
    "a sum of rows": (lambda x, i: x.gather(1, i).sum(1), (300, 400), (300, 999)),
    "columns turned": (lambda x, i: x.gather(1, i).t().contiguous(), (64, 100), (64, 128)),
    "a scan": (lambda x, i: x[i].cumsum(0), (100,), (3000,)),
    "a mean of losses": (lambda x, i: F.cross_entropy(x.t(), i[:100] % 120), (100, 100), (1000,)),
    "many sources": (lambda x, i: x.scatter_add(0, i, i * 0.5), (100,), (70_000,)),
    "a position for all": (lambda x, i: x.select(1, 0) * x.index_select(1, i[-1:]).squeeze(1), (300, 50), (9,)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_kind_of_loop_looks(name: str) -> None:
    function, shape, places = SHAPES[name]
    x, at = torch.randn(shape), torch.randint(0, shape[-1], places)
    fused = fusion.fuse(function)
    torch.testing.assert_close(fused(x, at), function(x, at), rtol=1e-4, atol=1e-4)
    for number, beyond in ((0, shape[-1]), (at.numel() // 2, -shape[-1] - 1), (at.numel() - 1, 1 << 33)):
        wrong = at.clone()
        wrong.view(-1)[number] = beyond
        try:
            function(x, wrong)
        except (IndexError, RuntimeError):
            assert isinstance(refused(fused, x, wrong), IndexOutOfRange)
        else:
            torch.testing.assert_close(fused(x, wrong), function(x, wrong), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused(x, at), function(x, at), rtol=1e-4, atol=1e-4)


UPDATES: dict[str, Callable[..., object]] = {
    "index_copy": lambda x, i, rows: x.index_copy_(0, i, rows),
    "index_add": lambda x, i, rows: x.index_add_(0, i, rows),
    "index_fill": lambda x, i, rows: x.index_fill_(0, i, 7.0),
    "index_reduce": lambda x, i, rows: x.index_reduce_(0, i, rows, "amax"),
    "index_put": lambda x, i, rows: x.index_put_((i,), rows),
    "index_put, added": lambda x, i, rows: x.index_put_((i,), rows, accumulate=True),
    "assigned": lambda x, i, rows: x.__setitem__(i, x[0] + 1),
    "scatter of one": lambda x, i, rows: x.scatter_(0, i[:, None].expand_as(rows), 7.0),
    "scatter": lambda x, i, rows: x.scatter_(0, i[:, None].expand_as(rows), rows),
    "scatter_add": lambda x, i, rows: x.scatter_add_(0, i[:, None].expand_as(rows), rows),
    "scatter_reduce": lambda x, i, rows: x.scatter_reduce_(0, i[:, None].expand_as(rows), rows, "prod"),
    "put": lambda x, i, rows: x.put_(i * rows.shape[1], rows[:, 0].contiguous()),
}


@pytest.mark.parametrize("size", [6, 400, 70_000])
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_a_refused_update_changes_only_elements_that_it_names(name: str, size: int) -> None:
    """Small tensors are updated by comparison, large ones by scatters; also the last element is not touched."""
    update = UPDATES[name]
    fused = fusion.fuse(lambda x, i, rows: update(x, i, rows))
    for beyond in (size, -size - 1, 1 << 40):
        x, rows = torch.zeros(size, 8), torch.ones(3, 8)
        assert isinstance(refused(fused, x, torch.tensor([3, beyond, 2]), rows), IndexOutOfRange)
        assert not x[[k for k in range(size) if k not in (2, 3)]].any(), beyond
    x = torch.zeros(size, 8)
    expected = x.clone()
    update(expected, torch.tensor([1, 2, 0]), rows)
    fused(x, torch.tensor([1, 2, 0]), rows)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_of_either_width(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i] + F.embedding(i.abs(), x) + x.gather(0, i.abs()[:, None].repeat(1, 7))

    fused = fusion.fuse(function)
    for places in ([0, -4, 3], [4]):
        at = torch.tensor(places, dtype=dtype)
        torch.testing.assert_close(fused(X, at), function(X, at))
    for places in ([5, 0, 0], [-6], [torch.iinfo(dtype).max], [torch.iinfo(dtype).min]):
        assert isinstance(refused(fused, X, torch.tensor(places, dtype=dtype)), IndexError)


def test_sizes_that_vary_are_the_ends_of_ranges() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return x[i].relu() + x[1:].index_select(0, i.abs()) + x.flatten().take(i)[:, None]

    fused = fusion.fuse(function, dynamic=True)
    for rows, count in ((5, 3), (9, 4), (30, 11)):
        x, at = torch.randn(rows, 3), torch.randint(0, rows - 1, (count,))
        at[:2] = torch.tensor([rows - 2, 2 - rows])
        torch.testing.assert_close(fused(x, at), function(x, at))
        for beyond in (rows - 1, rows, -rows - 1):
            at[1] = beyond
            assert isinstance(refused(fused, x, at), IndexOutOfRange)


def test_positions_that_a_range_gives() -> None:
    def function(table: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        return table[torch.arange(words.shape[0])] * words[:, None]

    fused, table = fusion.fuse(function, dynamic=True), torch.randn(8, 4)
    for count in (3, 8, 5):
        torch.testing.assert_close(fused(table, torch.ones(count)), function(table, torch.ones(count)))
    assert isinstance(refused(fused, table, torch.ones(9)), IndexError)
    assert isinstance(refused(fusion.fuse(function, dynamic=False), table, torch.ones(9)), IndexError)


def test_ignored_targets_are_no_positions() -> None:
    for ignored in (-100, 3, 1000):

        def loss(x: torch.Tensor, t: torch.Tensor, ignored: int = ignored) -> torch.Tensor:
            return F.cross_entropy(x, t, ignore_index=ignored)

        fused = fusion.fuse(loss)
        targets = torch.tensor([0, ignored, 6, ignored, 1])
        torch.testing.assert_close(fused(X, targets), loss(X, targets))
        for beyond in (7, -1, -99):
            assert isinstance(refused(fused, X, torch.tensor([0, ignored, beyond, 2, 1])), IndexError)


class Words(torch.nn.Module):
    """A table, a norm, and a loss of the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(11, 16), torch.nn.LayerNorm(16)

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.norm(self.table(words)) @ self.table.weight.t(), targets)


@pytest.mark.parametrize("through", ["fuse", "compile"])
def test_training_goes_on_after_an_error(through: str) -> None:
    torch.manual_seed(0)
    ours, theirs = Words(), Words()
    theirs.load_state_dict(ours.state_dict())
    run = fusion.fuse(ours) if through == "fuse" else torch.compile(ours, backend="fusion")
    words, targets = torch.tensor([1, 2, 10, 0]), torch.tensor([3, 4, 10, 0])
    for wrong in (0, 1, None):
        given = [words.clone(), targets.clone()]
        if wrong is not None:
            given[wrong][2] = 11
            assert isinstance(refused(run, *given), type(refused(theirs, *given)))
            continue
        for step in (run, theirs):
            step(*given).backward()
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_gradients_of_gathers() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return (x[i].sin() * x.gather(1, i.abs()[:, None].expand(-1, 7)[:, :3].clamp(max=6)).sum(1, keepdim=True)).sum()

    fused = fusion.fuse(function)
    for _ in range(2):
        ours, theirs = (X.clone().requires_grad_() for _ in range(2))
        places = torch.tensor([0, -5, 4, -1, 2])
        fused(ours, places).backward()
        function(theirs, places).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        assert isinstance(refused(fused, ours, torch.tensor([0, 5, 4, 1, 2])), IndexOutOfRange)


def test_losses_in_chunks_look_at_their_targets() -> None:
    def loss(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ weight.t(), targets)

    backend = Backend(Options(workspace=1 << 20))
    fused = torch.compile(loss, backend=backend)
    x, weight, targets = torch.randn(1024, 16), torch.randn(1003, 16), torch.randint(0, 1003, (1024,))
    torch.testing.assert_close(fused(x, weight, targets), loss(x, weight, targets))
    targets[1001] = 1003
    assert isinstance(refused(fused, x, weight, targets), IndexError)


def test_bags_begin_with_the_first_index_and_may_leave_out_the_last() -> None:
    def bags(table: torch.Tensor, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(words, table, offsets, mode="sum", include_last_offset=True) * 2

    fused, words = fusion.fuse(bags), torch.tensor([1, 0, 2, 3])
    table = X.clone().requires_grad_()
    torch.testing.assert_close(fused(table, words, torch.tensor([0, 1, 2])), bags(X, words, torch.tensor([0, 1, 2])))
    fused(table, words, torch.tensor([0, 1, 2])).sum().backward()
    assert table.grad is not None
    torch.testing.assert_close(table.grad[:, 0], torch.tensor([2.0, 2.0, 0.0, 0.0, 0.0]))  # eager does not set the last
    offsets = torch.tensor([1, 2, 4])
    assert isinstance(refused(fused, table, words, offsets), type(refused(bags, X, words, offsets)))


def test_an_order_to_search_in_is_refused_whatever_the_search_reads() -> None:
    def search(x: torch.Tensor, order: torch.Tensor, sought: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(x, sought, sorter=order) + 1

    fused, x, sought = fusion.fuse(search), torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.5, 1.5, 2.5, 9.0])
    torch.testing.assert_close(fused(x, torch.tensor([1, 2, 0]), sought), search(x, torch.tensor([1, 2, 0]), sought))
    for order in ([1, 3, 0], [1, 2, -1], [1 << 40, 2, 0]):
        for values in (sought, sought[:1]):  # of which the first needs two elements
            error = refused(fused, x, torch.tensor(order), values)
            assert isinstance(error, RuntimeError) and "sorter index out of range" in str(error)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("count", [0, 2])
def test_dimensions_without_elements(rows: int, count: int) -> None:
    x, at = torch.randn(rows, 3), torch.zeros(count, dtype=torch.int64)
    for function in (
        lambda x, i: x[i] + 1,
        lambda x, i: x.index_select(0, i) * 2,
        lambda x, i: F.embedding(i, x).exp(),
        lambda x, i: x.gather(0, i[:, None].expand(-1, 3)) * 2,
        lambda x, i: x.flatten().take(i) * 2,
        lambda x, i: x.index_fill(0, i, 2.0) + 1,
        lambda x, i: x.index_put((i,), torch.tensor(2.0)) + 1,
        lambda x, i: x.scatter(0, i[:, None].expand(-1, 3), 2.0) + 1,
    ):
        fused = fusion.fuse(function)
        try:
            expected = function(x, at)
        except (IndexError, RuntimeError):
            refused(fused, x, at)
        else:
            torch.testing.assert_close(fused(x, at), expected)


def test_no_position_is_looked_at_where_nothing_is_written() -> None:
    x, at, nothing = torch.randn(4, 0), torch.tensor([0, 9]), torch.randn(2, 0)
    for function in (
        lambda x, i: x.index_put((i,), nothing) + 1,
        lambda x, i: x.index_put((i,), nothing, accumulate=True) + 1,
        lambda x, i: x.index_copy(0, i, nothing) + 1,
        lambda x, i: x.index_fill(0, i, 2.0) + 1,
    ):
        fused = fusion.fuse(function, options={"strict": True})
        torch.testing.assert_close(fused(x, at), function(x, at))


def test_masks_of_another_shape_are_refused() -> None:
    for function in (
        lambda x, m: x[m] * 2,
        lambda x, m: x.index_put((m,), torch.tensor(1.0)) * 2,
        lambda x, m: x.masked_fill(m, 1.0) * 2,
    ):
        fused = fusion.fuse(function)
        for mask in (X[:, 0] > 0, torch.ones(4, dtype=torch.bool), torch.ones(5, 6, dtype=torch.bool)):
            try:
                expected = function(X, mask)
            except (IndexError, RuntimeError) as error:
                with pytest.raises(type(error)):
                    fused(X, mask)
            else:
                torch.testing.assert_close(fused(X, mask), expected)


def test_the_evaluator_and_the_reference_target_look_too() -> None:
    program = lowered(lambda x, i: x[i].relu(), X, torch.tensor([0, 1]))
    with pytest.raises(IndexOutOfRange, match="index -6 is out of bounds for dimension 0 with size 5"):
        run_program(program, [X, torch.tensor([4, -6])])
    fused = fusion.fuse(lambda x, i: x[i].relu(), options={"target": "reference"})
    torch.testing.assert_close(fused(X, torch.tensor([-5])), X[:1].relu())
    assert isinstance(refused(fused, X, torch.tensor([5])), IndexOutOfRange)


def test_lanes_look_without_branches() -> None:
    """In a loop of lanes, a check is a running maximum per lane; elsewhere a branch, once for each position."""
    export = fusion.export_kernels(
        lambda x, i: x[i] * 2, torch.empty(100), torch.zeros(1 << 20, dtype=torch.int64), target="c"
    )
    (kernel,) = export.kernels
    loop = next(line for line in kernel.source.splitlines() if "#pragma" in line)
    assert "simd" in loop and "reduction(max:" in loop
    body = kernel.source[kernel.source.index(loop) :]
    assert body.index("if (") > body.index("}")
    export = fusion.export_kernels(
        lambda x, i: F.embedding(i, x).relu(), X, torch.zeros(64, dtype=torch.int64), target="c"
    )
    (kernel,) = export.kernels
    before, _, rows = kernel.source.partition("#pragma omp simd")
    assert "wrong = 1;" in before and "wrong" not in rows.partition("}")[0]


def test_indices_known_to_be_inside_are_not_checked() -> None:
    program = lowered(lambda x: x[torch.arange(5)] + x.index_select(1, torch.arange(7)), X)
    text = str(program.nodes)
    assert "checked" not in text
    assert "checked" in str(lowered(lambda x, i: x[i], X, torch.tensor([0])).nodes)


def test_all_positions_of_a_length_that_is_a_symbol_are_inside() -> None:
    def text(more: int) -> str:
        return str(lowered(lambda x: x[torch.arange(x.shape[0] + more)], X, mode="symbolic").nodes)

    assert "checked" not in text(0)
    assert "checked" in text(1)


def test_sizes_that_only_data_tell_may_be_none() -> None:
    shape = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    assert may_be_empty(size_of(shape.create_unbacked_symint()))
    place = Load("places", (), torch.int64)
    assert checked(place, size_of(3), 0, wrap=False).dtype is torch.int64


def test_a_position_is_looked_at_where_its_row_counts_as_nothing() -> None:
    """Lanes that contribute nothing to a sum are skipped, except where eager checks their position."""

    def first_four(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(8)[:, None] < 4, table.gather(0, rows), 0.0).sum(0)

    fused = fusion.fuse(first_four, options={"strict": True})
    table, rows = torch.randn(10, 32), torch.randint(10, (8, 32))
    torch.testing.assert_close(fused(table, rows), first_four(table, rows))
    rows[6, 3] = 99
    for call in (first_four, fused):
        with pytest.raises(RuntimeError, match="out of bounds"):
            call(table, rows)


def test_loads_shared_by_all_lanes_are_masked():
    """There are fewer rows of positions than rows of the result; the other rows read none."""

    def added(x: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.scatter_add(1, places, rows)

    fused = fusion.fuse(added, options={"strict": True})
    behind = torch.cat([torch.stack([torch.randperm(5) for _ in range(5)]), torch.full((5, 5), 99)])
    x, rows = torch.randint(9, (10, 5)), torch.randint(9, (5, 5))
    assert torch.equal(fused(x, behind[:5], rows), added(x, behind[:5], rows))


def test_checks_shared_by_all_lanes_are_masked():
    """Positions of rows that the sum excludes are not checked, and may have any value."""

    def summed(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        counts = torch.arange(30) >= 1
        return torch.where(counts[:, None], table[torch.where(counts, rows, 0)], 0.0).sum(0)

    rows = torch.randint(50, (30,))
    rows[0] = 10**6
    table = torch.randn(50, 40)
    fused = fusion.fuse(summed, options={"strict": True})
    torch.testing.assert_close(fused(table, rows), summed(table, rows))
