"""Calls whose results differ from PyTorch's trace: other strides are copied, another shape is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

import fusion
from fusion.compilation.compile import compile_graph
from fusion.lowering.errors import FusionError, Unsupported
from fusion.lowering.lower import lower
from fusion.options import Options
from fusion.runtime.results import as_traced
from tests.lowering.lowered import single_call

aten = torch.ops.aten


@torch.library.custom_op("fusion_tests::turned", mutates_args=())
def turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return twice x, column by column, and the positions of nonzero elements: a data-dependent number of rows."""
    return (x * 2).t().contiguous().t(), torch.nonzero(x)


@turned.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: row by row, and one row."""
    return torch.empty(x.shape), torch.empty((1, x.dim()), dtype=torch.long)


@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_other_than_traced(dynamic: bool):
    f = fusion.fuse(lambda x: turned(x + 1)[0].sin() + 1, dynamic=dynamic, options={"strict": True})
    for rows, columns in ((3, 5), (4, 7), (1, 7)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(f(x), ((x + 1) * 2).sin() + 1)
    assert len(fusion.report(f).kernels) % 2 == 0 and fusion.report(f).externs


def test_a_shape_other_than_traced():
    f = fusion.fuse(lambda x: turned(x)[1].sum(0) * 2, options={"strict": True})
    torch.testing.assert_close(f(torch.eye(3) * torch.tensor([0.0, 1.0, 0.0])), torch.tensor([2, 2]))
    with pytest.raises(FusionError, match=r"turned.* shape \[3, 2\], but PyTorch traced \[1, 2\]"):
        f(torch.eye(3))


def test_a_result_with_the_traced_layout_is_not_copied():
    x = torch.randn(3, 1, 4)
    assert as_traced(x, "x", (3, 1, 4), (4, 4, 1)) is x
    assert as_traced(x, "x", (3, None, 4), (4, 7, 1)) is x
    assert as_traced(x, "x", (3, 1, 4), None) is x
    assert as_traced(x[:0], "x", (0, 1, 4), (9, 9, 9)).numel() == 0
    got = as_traced(x, "x", (3, 1, 4), (1, 1, 3))
    assert got.stride() == (1, 1, 3) and torch.equal(got, x)


def filled(index: Tensor, after: OpOverload, *args: object) -> fx.GraphModule:
    """Return the graph of `index_fill`'s gradient for an index, as PyTorch 2.11 traces it; `after` reads the rows."""
    graph = single_call(aten._unique.default, (index,), (index[:1], torch.empty(0, dtype=torch.long)))
    output = graph.graph.output_node()
    with graph.graph.inserting_before(output):
        rows = graph.graph.placeholder("rows")
        result = graph.graph.call_function(aten.index_select.default, (rows, 0, output.args[0][0]))
        end = graph.graph.call_function(after, (result, *args))
        twice = graph.graph.call_function(aten.mul.Tensor, (end, 2))
    mode = output.args[0][0].meta["val"].fake_mode
    rows.meta["val"], result.meta["val"] = (mode.from_tensor(torch.empty(n, 3)) for n in (4, 1))
    end.meta["val"] = twice.meta["val"] = after(result.meta["val"], *args)
    output.args = ((twice,),)
    graph.recompile()
    return graph


def test_tensors_of_data_dependent_size_are_read_by_calls() -> None:
    """The traced size is one row; the real one is the number of distinct indices."""
    index, rows = torch.tensor([3, 1, 3]), torch.randn(4, 3)
    compiled, report = compile_graph(filled(index, aten.sum.default), Options())
    (result,) = compiled([index, rows])
    torch.testing.assert_close(result, 2 * (rows[1] + rows[3]).sum())
    assert report.kernels and {extern.name for extern in report.externs} >= {"aten.sum.default", "aten._unique.default"}


def test_an_operation_with_a_data_dependent_size_argument_is_refused() -> None:
    with pytest.raises(Unsupported, match=r"as if its size were known: aten.view"):
        lower(filled(torch.tensor([3, 1, 3]), aten.view.default, [3]))


def test_of_one_element_each_size_is_known() -> None:
    alone = single_call(
        aten._unique.default, (torch.tensor([3]),), (torch.tensor([3]), torch.empty(0, dtype=torch.long))
    )
    assert len(lower(alone).nodes) == 1


@pytest.mark.skipif(torch.__version__ < "2.13", reason="AOTAutograd drops the check in this release")
def test_a_check_with_an_effect_is_called_by_itself(monkeypatch: pytest.MonkeyPatch):
    """PyTorch's function around it takes ten times as long as the inverse of a small matrix."""
    f = fusion.fuse(lambda x: torch.linalg.inv(x) * 2)
    x = torch.eye(3) * 4
    f(x)
    effects = torch.ops.higher_order.with_effects

    def called(*args: object, **kwargs: object) -> None:
        raise AssertionError("called at a run")

    monkeypatch.setattr(type(effects), "__call__", called)
    torch.testing.assert_close(f(x), torch.eye(3) / 2)
    assert any("with_effects" in call.name for call in fusion.report(f).externs)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        f(torch.zeros(3, 3))
