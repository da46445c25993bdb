"""Products that both forward and backward compute are stored in float32, generated or by the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Contract, Extern, Program
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_program


def given(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).mul(0.8).to(dtype) for shape in ((3, 20, 8), (3, 24, 8))]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.bmm(q, k.mT).exp().sum(-1)


def marked(args: list[Tensor], function: Callable[..., Tensor] = scores) -> fx.GraphModule:
    graph = make_fx(function, tracing_mode="fake")(*args)
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default):
        node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return graph


def by_library(program: Program) -> Program:
    nodes = [step for node in program.nodes for step in program.library.get(getattr(node, "out", ""), (node,))]
    return program.edited(nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("called", [False, True])
def test_a_recomputed_product_is_not_rounded(called: bool, dtype: torch.dtype) -> None:
    args = given(dtype)
    program = lower(marked(args))
    (product,) = (node for node in program.nodes if isinstance(node, Contract))
    assert program.buffers[product.out].dtype is torch.float32
    program = by_library(program) if called else program
    assert any(isinstance(node, Extern) for node in program.nodes) == called
    verify_program(program)
    (result,) = run_program(program, args)
    exact = scores(*(x.double() for x in args))
    torch.testing.assert_close(result.double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
    assert not torch.allclose(scores(*args).double(), exact, rtol=torch.finfo(dtype).eps, atol=0)


def test_on_a_gpu_the_library_returns_float32() -> None:
    """Its call takes the 16-bit operands as they are."""
    with torch._subclasses.fake_tensor.FakeTensorMode():
        args = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in given()]
    program = lower(marked(args))
    (product,) = (node for node in program.nodes if isinstance(node, Contract))
    *_, call = program.library[product.out]
    assert isinstance(call, Extern) and call.target is torch.ops.aten.bmm.dtype and call.args[-1] is torch.float32
    verify_program(by_library(program))


def test_other_products_are_rounded() -> None:
    """No pass marked them, or they are only returned (the gradient of a weight), or multiplied."""

    def returned(q: Tensor, k: Tensor) -> Tensor:
        return torch.bmm(q, k.mT).mT

    def multiplied(q: Tensor, k: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(q, k.mT), k)

    for graph in (
        make_fx(scores, tracing_mode="fake")(*given()),
        *(marked(given(), f) for f in (returned, multiplied)),
    ):
        program = lower(graph)
        products = [node for node in program.nodes if isinstance(node, Contract)]
        assert {program.buffers[product.out].dtype for product in products} == {torch.bfloat16}
