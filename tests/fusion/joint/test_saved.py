"""Saved tensors: statistics of 16-bit rows are saved in float32, all others unchanged."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusion
from fusion.compilation.autograd import aot_backend
from fusion.compilation.graphs import donated_inputs
from fusion.joint.saved import mark_donated
from fusion.lowering.ir.expr import Cast, postorder
from fusion.lowering.ir.program import Map
from fusion.lowering.lower import lower
from tests.fusion.attentions import by_hand, normalised_last
from tests.fusion.capabilities import of_everything

HALVES = (torch.bfloat16, torch.float16)
OPTIONS = {"target": "reference", "strict": True}


def normalised_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    e = torch.exp(y - y.amax(-1, keepdim=True).detach())
    return e / e.sum(-1, keepdim=True)


def kept(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
    results: list[torch.Tensor] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        results.append(x)
        return x

    torch._dynamo.reset()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fusion.fuse(function, options=OPTIONS)(*given)
    return results


def heads(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, 3, 70, 8).to(dtype).requires_grad_() for _ in range(3))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", [by_hand, normalised_last])
def test_statistics_of_rows_are_kept_in_float32(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    saved = kept(function, *heads(dtype))
    rows = [x for x in saved if x.numel() == 2 * 3 * 70]
    assert len(rows) == 2 and all(x.dtype is torch.float32 for x in rows)  # the maximum and the sum
    assert {x.dtype for x in saved if x.numel() > 2 * 3 * 70} == {dtype}


def test_other_dtypes_are_kept_as_they_are() -> None:
    assert {x.dtype for x in kept(by_hand, *heads(torch.float64))} == {torch.float64}


def test_inputs_are_saved_in_their_own_dtype() -> None:
    """A row statistic that another function has computed, and one that is also a result, keep their dtypes."""

    def divide(x: torch.Tensor, most: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = (x * x).sum(-1, keepdim=True)
        return x * most / total, total

    given = torch.rand(6, 50).bfloat16().requires_grad_(), torch.rand(6, 1).bfloat16().requires_grad_()
    torch._dynamo.reset()
    result = fusion.fuse(divide, options=OPTIONS)(*given)
    assert [x.dtype for x in result] == [torch.bfloat16] * 2
    assert {x.dtype for x in kept(lambda x, most: x * most, *given)} == {torch.bfloat16}


def test_backward_reads_the_statistic_unrounded() -> None:
    """The narrow value that stands for it is marked as a rounding that the user did not ask for."""
    graphs: dict[str, torch.fx.GraphModule] = {}

    def compile_one(graph: torch.fx.GraphModule, label: str) -> Callable[[list[object]], tuple[object, ...]]:
        graphs[label] = graph
        return lambda given: tuple(graph(*given))

    torch._dynamo.reset()
    given = torch.randn(6, 50).bfloat16().requires_grad_(), torch.rand(50).bfloat16().requires_grad_()
    result = torch.compile(normalised_rows, backend=aot_backend(compile_one, of_everything))(*given)
    result.sum().backward()
    wide = [node for node in graphs["backward"].graph.nodes if node.op == "placeholder"]
    assert any(node.meta["val"].dtype is torch.float32 for node in wide)
    program = lower(graphs["backward"], device=torch.device("cpu"))
    casts = [
        expr
        for node in program.nodes
        if isinstance(node, Map)
        for expr in postorder(node.expr)
        if isinstance(expr, Cast) and expr.dtype is torch.bfloat16
    ]
    assert casts and all(cast.implicit for cast in casts)


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_of_large_numbers(dtype: torch.dtype) -> None:
    """The rounded maximum of a 16-bit row is not the maximum of the row that backward recomputes."""
    generator = torch.Generator().manual_seed(0)
    given = [(20 * torch.randn(shape, generator=generator)).to(dtype) for shape in ((40, 60), (60,))]
    weights = torch.randn(40, 60, generator=generator).to(dtype)

    def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        function(*leaves).backward(weights.to(inputs[0].dtype))
        return [leaf.grad.double() for leaf in leaves if leaf.grad is not None]

    torch._dynamo.reset()
    fused = gradients(fusion.fuse(normalised_rows, options=OPTIONS), *given)
    eager, exact = gradients(normalised_rows, *given), gradients(normalised_rows, *(x.double() for x in given))
    for got, rounded, want in zip(fused, eager, exact, strict=True):
        assert float((got - want).abs().max()) <= 2 * float((rounded - want).abs().max()) + 1e-6


@pytest.mark.parametrize("dtype", HALVES)
def test_the_mean_of_a_norm_is_as_exact_as_the_row(dtype: torch.dtype) -> None:
    """Rows of one number equal their mean, and the remaining error is multiplied by 300."""

    def norm_of_sums(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm((x * x).sum(-1, keepdim=True), (1,))

    torch._dynamo.reset()
    given = torch.rand(6, 50, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    fusion.fuse(norm_of_sums, options=OPTIONS)(given).backward(torch.ones(6, 1, dtype=dtype))
    assert given.grad is not None and not given.grad.any()
    assert {x.dtype for x in kept(norm_of_sums, given) if x.numel() == 6} == {torch.float32}


@pytest.mark.parametrize("dtype", HALVES)
def test_a_running_log_sum_exp_is_kept_in_float32(dtype: torch.dtype) -> None:
    """For large numbers it grows by less than 16 bits resolve; the result has 16 bits nevertheless."""

    def run(function: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        result = function(x)
        return result.detach(), torch.autograd.grad(result, x, torch.ones_like(result))[0]

    torch._dynamo.reset()
    row, length = torch.full((3, 5), 10000.0, dtype=dtype), torch.arange(1, 6, dtype=torch.float64)
    fuse = fusion.fuse(lambda x: x.logcumsumexp(1), options=OPTIONS)
    (result, gradient), (eager, _) = run(fuse, row), run(lambda x: x.logcumsumexp(1), row)
    assert torch.equal(result, eager)
    exact = (1 / length).flip(0).cumsum(0).flip(0).expand(3, 5)  # each point gives 1 / length to all up to it
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-2, atol=1e-3)
    assert {x.dtype for x in kept(lambda x: x.logcumsumexp(1), row.requires_grad_())} == {dtype, torch.float32}


def test_a_softmax_is_recomputed_from_its_operand() -> None:
    """Two numbers of each row are saved, instead of its float32 result, which is as large as the 16-bit operand."""
    scores = torch.randn(64, 500).bfloat16().requires_grad_()
    words = torch.randint(0, 500, (64,))
    saved = kept(lambda x: torch.nn.functional.cross_entropy(x.float(), words), scores)
    assert [x.dtype for x in saved if x.numel() > 64] == [torch.bfloat16]
    assert sorted(x.numel() for x in saved if x.dtype is torch.float32) == [1, 64, 64]


@pytest.mark.parametrize("dtype", HALVES)
def test_rows_recomputed_by_backward_equal_those_stored_by_forward(dtype: torch.dtype) -> None:
    """Scores that forward stores between two kernels are not rounded: one kernel of backward does not round them."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT * 0.5, -1) @ v

    def gradients(call: Callable[..., torch.Tensor], given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in given]
        out = call(*leaves)
        weights = torch.linspace(0.5, 1.5, out.numel()).view(out.shape).to(out.dtype)
        return torch.autograd.grad(out, leaves, weights)

    generator = torch.Generator().manual_seed(1)
    shapes = ((8, 65, 1), (8, 8, 1), (8, 8, 1))
    given = [(2 * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    fused = fusion.fuse(attention, options={"target": "c", "strict": True})
    exact = gradients(attention, [x.double() for x in given])
    for ours, theirs, truth in zip(gradients(fused, given), gradients(attention, given), exact, strict=True):
        assert (ours - truth).norm() < 1.5 * (theirs - truth).norm()


def test_only_tensors_saved_for_backward_alone_are_donated() -> None:
    """A donated tensor is no part of an input or of a result, and no part of it is saved separately."""

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result, whole = x.exp(), x.sin()
        return result, whole, whole[:2], x.cos(), x[1:], result.t()

    parted = make_fx(forward, tracing_mode="fake")(torch.randn(6, 5))
    saved = parted.graph.output_node().args[0][1:]
    graph = torch.fx.Graph()
    for node in saved:
        graph.placeholder(node.name).meta["val"] = node.meta["val"]
    graph.output(())
    backward = torch.fx.GraphModule({}, graph)
    mark_donated(parted, backward, 1)
    assert [saved[k].name for k in donated_inputs(backward)] == ["cos"]
    assert not donated_inputs(parted)
