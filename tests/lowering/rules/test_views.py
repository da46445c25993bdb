"""Views, parts, assemblies and gathers against eager: all of them are only indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Extern, Map
from tests.lowering.lowered import calls, check, lowered, traced

aten = torch.ops.aten

# Each function is applied to x [4, 6, 5] twice: as it is, where eager returns a view, and to x * 2, so that the index
# change is read through by the node that adds 1.
VIEWS: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda x: x.view(24, 5),
    "view_merged_and_split": lambda x: x.view(2, 2, 3, 10),
    "view_flat": lambda x: x.view(-1),
    "permute": lambda x: x.permute(2, 0, 1),
    "permute_negative": lambda x: x.permute(-1, -3, -2),
    "transpose": lambda x: x.transpose(0, -1),
    "t": lambda x: x[0].t(),
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, 2),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)),
    "squeeze": lambda x: (x[:1].squeeze(), x[:1].squeeze(0), x.squeeze(1), x[:1, :, :1].squeeze((0, 2))),
    "expand": lambda x: (x[:1].expand(3, -1, 5), x[0].expand(2, 6, 5)),
    "slice": lambda x: (x[1:3], x[:, 2:], x[..., :2], x[-3:-1], x[:100], x[3:1]),
    "slice_steps": lambda x: (x[::2], x[:, 1::3], x[1:4:2, ::4]),
    "select": lambda x: (x[2], x[:, -1], x[..., 0]),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "split": lambda x: x.split(4, 1),
    "split_with_sizes": lambda x: x.split((1, 2, 3), 1),
    "chunk": lambda x: x.chunk(4, 1),
    "unbind": lambda x: x.unbind(2),
    "diagonal": lambda x: (x.diagonal(), x.diagonal(1, 0, 2), x.diagonal(-2, 1, 2)),
    "unfold": lambda x: (x.unfold(1, 3, 2), x.unfold(0, 4, 1)),
    "as_strided": lambda x: (x.as_strided((3, 2), (1, 6)), x.as_strided((2, 3, 2), (30, 2, 5), 7)),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "view_as": lambda x: x.view_as(x.new_zeros(24, 5)),
    "alias": lambda x: aten.alias(x),
    "detach": lambda x: x.detach(),
    "real": lambda x: x.real,
}
COPIES: dict[str, Callable[[torch.Tensor], object]] = {
    "reshape_of_transposed": lambda x: x.transpose(0, 1).reshape(24, 5),
    "reshape_of_permuted": lambda x: x.permute(2, 0, 1).reshape(10, 12),
    "flip": lambda x: (x.flip(0), x.flip((1, -1))),
    "roll": lambda x: (x.roll(1, 0), x.roll((-2, 3), (1, 2)), x.roll(7), x.roll((1, 1), (0, 0))),
    "rot90": lambda x: x.rot90(1, (0, 2)),
    "repeat": lambda x: (x.repeat(1, 2, 1), x.repeat(2, 1, 3, 1)),
    "tile": lambda x: x.tile(2),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "channels_last": lambda x: x[None].to(memory_format=torch.channels_last),
    "cat": lambda x: (torch.cat([x, x[:2]]), torch.cat([x, x[:, 1:2], x[:, :3]], 1)),
    "cat_of_one": lambda x: torch.cat([x], -1),
    "cat_with_nothing": lambda x: (torch.cat([x, x.new_zeros(0)]), torch.cat([x[:, :0], x], 1)),
    "cat_promoted": lambda x: torch.cat([x, x.half(), x.long()], 1),
    "cat_of_views": lambda x: torch.cat([x.flip(0), torch.ones_like(x), x.transpose(0, 1)[:4].expand(4, 4, 5)], 1),
    "chunks_side_by_side": lambda x: torch._chunk_cat([x, x[:3, :2], x[:1]], 0, 3),
    "stack": lambda x: (torch.stack([x, x + 1], 0), torch.stack([x, x], -1)),
    "hstack": lambda x: torch.hstack([x, x]),
    "pad": lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 1, 2, 0), value=3.0), F.pad(x, (-1, 2, 1, -2))),
    "pad_nothing": lambda x: F.pad(x, (0, 0)),
    "pad_reflect": lambda x: F.pad(x, (2, 1), mode="reflect"),
    "pad_replicate": lambda x: F.pad(x, (2, 1), mode="replicate"),
    "tril": lambda x: (x.tril(), x.tril(2), x.tril(-1)),
    "triu": lambda x: (x.triu(), x.triu(2), x.triu(-1)),
    "slice_scatter": lambda x: (x.slice_scatter(x[:2] + 9, 0, 1, 3), x.slice_scatter(x[:, :2] + 9, 1, 1, 6, 3)),
    "slice_scatter_all": lambda x: x.slice_scatter(x + 9, 1),
    "select_scatter": lambda x: x.select_scatter(x[:, 0] + 9, 1, -2),
    "diagonal_scatter": lambda x: (
        x.diagonal_scatter(x[0, 0, :4].expand(5, 4) + 9),
        x.diagonal_scatter(x[0, :4].t() + 9, -2, 1, 0),
    ),
    "as_strided_scatter": lambda x: x.as_strided_scatter(x.view(5, 24).t() + 9, (24, 5), (1, 24)),
    "slice_backward": lambda x: aten.slice_backward(x, [4, 14, 5], 1, 2, 14, 2),
    "select_backward": lambda x: aten.select_backward(x, [4, 3, 6, 5], 1, 2),
    "diagonal_backward": lambda x: aten.diagonal_backward(x, [4, 6, 5, 7], 2, 2, 3),
    "diag_embed": lambda x: torch.diag_embed(x, 1),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.reshape(1, 4, 6, 5), 2),
    "im2col": lambda x: F.unfold(x[None], 2),
    "nearest": lambda x: F.interpolate(x[None], scale_factor=2),
    "bilinear": lambda x: F.interpolate(x[None], size=(9, 7), mode="bilinear"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_returned_view_is_a_view(name: str):
    x = torch.randn(4, 6, 5)
    program = check(VIEWS[name], x)
    assert all(isinstance(node, Extern) and node.is_view for node in program.nodes)
    memory = x.untyped_storage().data_ptr()
    for out in run_program(program, [x]):
        assert isinstance(out, torch.Tensor)
        assert out.untyped_storage().data_ptr() == memory or out.numel() == 0


def between(name: str) -> Callable[[torch.Tensor], object]:
    """A view or a copy of a computed tensor, with a reader."""

    def around(x: torch.Tensor) -> object:
        result = {**VIEWS, **COPIES}[name](x * 2)
        return [part + 1 for part in result] if isinstance(result, (tuple, list)) else result + 1

    return around


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
def test_a_view_is_read_through(name: str):
    program = check(between(name), torch.randn(4, 6, 5))
    assert all(isinstance(node, Map) for node in program.nodes)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_has_memory_of_its_own(name: str):
    x = torch.randn(4, 6, 5)
    for out in run_program(check(COPIES[name], x), [x]):
        assert isinstance(out, torch.Tensor)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", [*VIEWS, *COPIES])
def test_on_non_contiguous_tensors(name: str):
    function = {**VIEWS, **COPIES}[name]
    # The rule reads x through a transposition; eager gets the copy that it needs.
    check(lambda x: function(x.transpose(0, 2).contiguous()), torch.randn(5, 6, 4)[:, ::1].flip(1))


def test_a_view_of_a_copy_is_not_a_view_of_the_input():
    x = torch.randn(4, 6)
    for function in (lambda a: a.clone().view(24), lambda a: a.clone()[:2], lambda a: a.to(torch.float32, copy=True)):
        (out,) = run_program(lowered(function, x), [x])
        assert isinstance(out, torch.Tensor)
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_empty_tensors():
    x = torch.randn(0, 6)
    check(lambda a: (a.view(3, 0) + 1, a.reshape(0) * 2, a.t() + 1, a.repeat(2, 2), torch.cat([a, a], 1)), x)
    check(lambda a: (F.pad(a, (1, 1)), a.flip(0), a.roll(1, 0), a.unfold(1, 2, 2) + 1, a[:, 2:4] + 1), x)


def test_many_parts_are_left_to_the_library():
    check(lambda x: torch.cat([x] * 40), torch.randn(2, 3), leaves=["cat.default"])


# Gathers --------------------------------------------------------------------------------------------------------------

INDEXING: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]] = {
    "first": lambda x, i, j: x[i],
    "middle": lambda x, i, j: x[:, j],
    "last": lambda x, i, j: x[..., j % 5],
    "adjacent": lambda x, i, j: x[:, j, j % 5],
    "apart": lambda x, i, j: x[j % 4, :, j % 5],
    "apart_broadcast": lambda x, i, j: x[i % 4, :, j % 5],
    "all": lambda x, i, j: x[i, j, j % 5],
    "broadcast": lambda x, i, j: x[i[:, :1], j],
    "with_slices": lambda x, i, j: x[1:3, j, None, ::2],
    "of_int32": lambda x, i, j: x[j.int() % 4],
    "affine": lambda x, i, j: x[torch.arange(3), torch.arange(3) + 1],
    "none_read": lambda x, i, j: x[j[:0]],
    "index_select": lambda x, i, j: x.index_select(1, j.abs() % 6),
    "gather": lambda x, i, j: x.gather(1, (i % 4)[:, :, None]),
    "take": lambda x, i, j: x.take(i * 30),
    "take_along_dim": lambda x, i, j: x.take_along_dim(j.abs()[None, :, None] % 6, 1),
    "embedding": lambda x, i, j: F.embedding(i % 4, x[0]),
    "embedding_padded": lambda x, i, j: F.embedding(i % 4, x[0], padding_idx=1),
    "of_a_view": lambda x, i, j: x.transpose(0, 1)[j, 1:],
    "of_a_gather": lambda x, i, j: x[i % 4][j % 2],
    "of_a_range": lambda x, i, j: torch.arange(10, 20)[j % 4] * x[0, 0, 0],
    "one_hot": lambda x, i, j: (j[:, None] % 5 == torch.arange(5)) * x[0, 0],
}
INDICES = torch.tensor([[2, 0, -1], [1, -4, 3]]), torch.tensor([3, -6, 1])


@pytest.mark.parametrize("name", INDEXING)
def test_indexing(name: str):
    leaves = ["keep.default"] if name == "of_a_gather" else []  # the checks of indices of which a part is read
    program = check(INDEXING[name], torch.randn(4, 6, 5), *INDICES, leaves=leaves)
    check(lambda x, i, j: INDEXING[name](x * 2, i, j) + 1, torch.randn(4, 6, 5), *INDICES, leaves=leaves)
    assert leaves or all(isinstance(node, Map) for node in program.nodes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_of_no_positions_the_rank_may_be_any(dtype: torch.dtype):
    none = torch.zeros(2, 0, dtype=dtype)
    for x in (torch.tensor(3.0), torch.randn(5), torch.randn(4, 6, 5)):
        check(lambda x, i: x.gather(0, i) + 1, x, none)
        check(lambda x, i: x.gather(-1, i), x, none[0])


SCATTERS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "value": lambda x, i: x.scatter(1, i, 7.0),
    "src": lambda x, i: x.scatter(1, i, x[:, :1] * 2),
    "add": lambda x, i: x.scatter_add(1, i, x[:, :1] * 2),
    "one_hot": lambda x, i: torch.zeros_like(x).scatter(-1, i, 1),
}


@pytest.mark.parametrize("name", SCATTERS)
def test_a_scatter_of_one_source_per_row_is_a_comparison(name: str):
    check(SCATTERS[name], torch.randn(4, 6), torch.tensor([[3], [0], [5], [3]]))


def test_a_part_of_memory_is_written():
    x = torch.randn(4, 6)
    check(lambda x: x.as_strided_scatter(x[0] + 9, (6,), (2,), 3), x)
    check(lambda x: x.as_strided_scatter(x[:2, :3] + 9, (2, 3), (1, 7), 1), x)
    check(lambda x: x.as_strided_scatter(x[0, 0] + 9, (), (), 5), x)
    gaps = torch.randn(4, 12)[:, ::2]
    check(lambda x: x.as_strided_scatter(x[0] + 9, (6,), (2,), 0), gaps, leaves=["as_strided_scatter.default"])


def test_a_copy_may_read_memory_around_its_operand():
    x = torch.randn(4, 12)[:, 1::2]
    program = lowered(lambda x: torch.as_strided_copy(x, (3, 2), (5, 1), 0), x)
    (call,) = calls(program)
    assert call == "as_strided.default"
    assert torch.equal(run_program(program, [x])[0], torch.as_strided_copy(x, (3, 2), (5, 1), 0))


def test_scatters_of_many():
    x, many = torch.randn(4, 9000), torch.arange(40).expand(4, 40)
    check(lambda x, i: x.scatter_add(1, i, x[:, :40]), x, many)
    check(lambda x, i: x.index_add(1, i, x[:, :40]), x, many[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_and_its_gradient(reduction: str):
    target = torch.tensor([3, -100, 0, 6])

    def loss(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor) -> object:
        y = F.log_softmax(x, -1)
        out, total = aten.nll_loss_forward(y, t, w, {"none": 0, "mean": 1, "sum": 2}[reduction], -100)
        grad = aten.nll_loss_backward(
            torch.ones_like(out), y, t, w, {"none": 0, "mean": 1, "sum": 2}[reduction], -100, total
        )
        return out, grad

    check(loss, torch.randn(4, 7), target, torch.rand(7))


# Symbolic sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("view_flat", "permute", "slice", "slice_steps", "select", "unfold", "expand", "unsqueeze", "flip", "repeat"),
        *("cat", "stack", "pad", "tril", "slice_scatter", "select_scatter", "flatten", "split_with_sizes"),
    ],
)
def test_symbolic_sizes(name: str):
    small, large, around = torch.randn(4, 6, 5), torch.randn(9, 6, 7), between(name)
    check(around, small, mode="symbolic")
    if name not in ("expand", "slice_scatter", "unfold"):  # these compare sizes with numbers and specialise
        program = lowered(around, small, mode="symbolic")
        for one, other in zip(run_program(program, [large]), tree_leaves(around(large)), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["middle", "adjacent", "gather", "index_select", "of_a_view"])
def test_symbolic_gathers(name: str):
    check(lambda x, i, j: INDEXING[name](x, i, j) + 1, torch.randn(4, 6, 5), *INDICES, mode="symbolic")


def test_tracing_gives_symbols():
    graph = traced(lambda x: x.view(-1), [torch.randn(4, 6)], "symbolic").graph
    assert any(
        isinstance(size, torch.SymInt)
        for node in graph.nodes
        for size in node.meta["val"].shape
        if node.op == "placeholder"
    )
