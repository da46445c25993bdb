"""Traced shapes and strides are eager's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fusion
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.aten.mistraced import traced_as_eager

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(1,), (3, 1), (1, 3), (3, 5), ()])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_have_the_shape_of_eager(shape: tuple[int, ...], keepdim: bool) -> None:
    dims = [-1] if shape else []

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x, 2, dims, keepdim)

    x = torch.randn(shape)
    with traced_as_eager():
        graph = make_fx(norm, decomposition_table=decompositions(), tracing_mode="fake")(x)
    (result,) = graph.graph.output_node().all_input_nodes
    assert result.meta["val"].shape == norm(x).shape
    assert torch.equal(graph(x), norm(x))


@pytest.mark.parametrize("sizes", [None, ShapeEnv], ids=["known", "symbolic"])
@pytest.mark.parametrize("dim", [-1, (-1, -3), (0, -1), (-2,), None, (), 2])
def test_norms_of_fake_tensors_have_the_shape_of_eager(dim: int | tuple[int, ...] | None, sizes: type | None) -> None:
    x = torch.randn(7, 1, 1)
    mode = FakeTensorMode(shape_env=sizes and sizes())
    for keepdim in (False, True):
        with mode, traced_as_eager():
            fake = mode.from_tensor(x, symbolic_context=sizes and StatelessSymbolicContext([DimDynamic.DYNAMIC] * 3))
            actual = torch.linalg.vector_norm(fake, 3, dim, keepdim, dtype=torch.float64)
        expected = torch.linalg.vector_norm(x, 3, dim, keepdim, dtype=torch.float64)
        assert tuple(map(int, actual.shape)) == expected.shape and actual.dtype is expected.dtype


def test_a_norm_of_fake_tensors_refuses_the_dimensions_that_eager_refuses() -> None:
    with FakeTensorMode() as mode, traced_as_eager(), pytest.raises(IndexError):
        torch.linalg.vector_norm(mode.from_tensor(torch.randn(3, 1)), 2, -3)


def test_sizes_of_a_norm_along_a_single_element_agree_with_eager() -> None:
    def counted(x: torch.Tensor) -> torch.Tensor:
        norms = torch.linalg.norm(x, dim=-1)
        return norms * norms.shape[-1] + x.norm(dim=-1).ndim

    x = torch.rand(7, 20, 1)
    torch.testing.assert_close(fusion.fuse(counted)(x), counted(x))


@pytest.mark.parametrize("amounts", [(0, 0), (0, -1), (1, 0), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("layout", ["reversed", "channels_last", "sliced"])
def test_padding_of_symbolic_widths_has_the_layout_of_eager(amounts: tuple[int, int], layout: str) -> None:
    def edged(x: torch.Tensor, n: int, m: int) -> torch.Tensor:
        y = F.pad(x, (n, m, m, 0), value=1.5)
        return y * 2 + y.stride(-1)

    x = torch.randn(4, 3, 5, 7)
    x = {"reversed": x.permute(3, 2, 1, 0), "sliced": x[..., ::2]}.get(layout, x.to(memory_format=torch.channels_last))
    fused = fusion.fuse(edged, dynamic=True)
    for n, m in (amounts, (3, 2)):
        actual, expected = fused(x, n, m), edged(x, n, m)
        assert actual.stride() == expected.stride() and torch.equal(actual, expected)


def test_gradients_of_padding_of_symbolic_widths_have_the_layout_of_eager() -> None:
    def cropped(x: torch.Tensor, n: int) -> torch.Tensor:
        (grad,) = torch.autograd.grad(F.pad(x, (n, 0)).t() * 2, x, torch.ones(x.shape[1] + n, x.shape[0]))
        return grad

    x = torch.randn(3, 5, requires_grad=True)
    for n in (2, 0, -1):
        assert fusion.fuse(cropped, dynamic=True)(x, n).stride() == cropped(x, n).stride()


def test_only_the_thread_that_is_within_traces_otherwise() -> None:
    def shares() -> bool:
        """Does the result of dropout share memory with its operand?"""
        x = torch.ones(3)
        with enable_python_dispatcher():
            return F.dropout(x, 0.0).data_ptr() == x.data_ptr()

    kernels = dict(aten.dropout.default.py_kernels)
    within, outside = Event(), Event()

    def enter() -> bool:
        with traced_as_eager(), traced_as_eager():
            within.set()
            assert outside.wait(60)
            return shares()

    with ThreadPoolExecutor(1) as pool:
        entered = pool.submit(enter)
        assert within.wait(60)
        assert dict(aten.dropout.default.py_kernels) != kernels and not shares()
        with traced_as_eager():
            outside.set()
            assert shares() and entered.result()
        assert dict(aten.dropout.default.py_kernels) == kernels and not shares()
