"""Gradients have the memory layout of their tensors."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion
from fusion.codegen.triton import TritonTarget
from fusion.compilation.autograd import aot_backend
from fusion.compilation.compile import schedule_graph
from fusion.dumps.trace import Trace
from fusion.runtime import Boxed
from fusion.schedule.kernels import KernelCall
from tests.fusion.agreement import assert_as_eager
from tests.fusion.attentions import causal
from tests.fusion.capabilities import of_everything


def transposed_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.transpose(-1, -2) @ y / 5).tanh()  # far from where 1 - tanh² has lost its digits


def channels_last(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.sin() * y + x.mean((2, 3), keepdim=True)


SEEDED = torch.Generator().manual_seed(0)
"""Cases are built at import, where the state of PyTorch's own generator differs from process to process."""


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=SEEDED)


CASES = {
    "attention": (causal, [normal(1, 2, 40, 8) for _ in range(3)]),
    "transposed product": (transposed_product, [normal(3, 20, 30), normal(3, 20, 10)]),
    "transposed inputs": (transposed_product, [normal(3, 30, 20).mT, normal(3, 10, 20).mT]),
    "channels last": (
        channels_last,
        [normal(2, 3, 4, 5).to(memory_format=torch.channels_last), normal(2, 3, 4, 5)],
    ),
    "expanded": (channels_last, [normal(2, 3, 4, 5), normal(1, 3, 1, 5).expand(2, 3, 4, 5)]),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_strides_of_their_inputs(name: str) -> None:
    function, given = CASES[name]

    def gradients(f: object, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(f(*leaves).square().sum(), leaves)  # type: ignore[operator]

    fused = fusion.fuse(function, options={"target": "c", "strict": True})
    got, eager = gradients(fused, given), gradients(function, given)
    exact = gradients(function, [x.double() for x in given])
    for mine, theirs, true, leaf in zip(got, eager, exact, given, strict=True):
        dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
        assert mine.stride() == (leaf if dense else theirs).stride()
        assert_as_eager(mine.contiguous(), theirs.contiguous(), true.contiguous())


def test_a_factor_of_a_chained_product_is_applied_after_the_loop() -> None:
    """The scale of the scores enters the gradients of queries and keys once per result, not once per score."""
    sources: list[str] = []
    target = TritonTarget("sm_90")

    def compile_one(graph: fx.GraphModule, label: str) -> Boxed:
        calls = schedule_graph(graph, target, Trace(None, label))[1].steps
        if label == "backward":
            sources.extend(target.emit(call.kernel) for call in calls if isinstance(call, KernelCall))
        return lambda inputs: graph(*inputs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        leaves = [torch.empty(2, 16, 1024, 24, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        torch.compile(causal, backend=aot_backend(compile_one, of_everything))(*leaves).sum().backward()
    walks = [source for source in sources if source.count("tl.dot(") > 2]
    assert len(walks) == 2
    for source in walks:
        (scaled,) = (line for line in source.splitlines() if "/ 4.898979485566356" in line)
        assert not scaled.startswith("        ")  # which is how the lines of a loop begin
