"""Checks a function against its lowering: same values, shapes, dtypes and strides, and no call that has a rule."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.aten.mistraced import traced_as_eager
from fusion.lowering.interpret import run_program
from fusion.lowering.ir.program import Extern, Program
from fusion.lowering.lower import lower
from fusion.lowering.verify import verify_program

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Relative and absolute, per dtype of the result: both sides compute 16-bit floats in float32 and round once."""


def traced(
    function: Callable[..., object], inputs: Sequence[torch.Tensor], mode: str = "fake", *, whole: bool = False
) -> GraphModule:
    """Return the graph of ATen calls that AOTAutograd would give for these inputs; `whole`: nothing is decomposed."""

    def call(*args: torch.Tensor) -> object:
        return tree_leaves(function(*args))

    with traced_as_eager():
        return make_fx(call, decomposition_table={} if whole else decompositions(), tracing_mode=mode)(*inputs)


def lowered(
    function: Callable[..., object],
    *inputs: torch.Tensor,
    mode: str = "fake",
    contractions: Collection[str] | None = None,
) -> Program:
    """The verified Program of `function` on these inputs."""
    program = lower(traced(function, inputs, mode), contractions=contractions)
    verify_program(program)
    return program


def single_call(target: OpOverload, args: Sequence[object], results: Sequence[torch.Tensor | None]) -> GraphModule:
    """Return a graph of one call with `results`, for operations that PyTorch does not trace on a CPU."""
    graph, mode = Graph(), FakeTensorMode()
    holders = [graph.placeholder(f"x{k}") if isinstance(arg, torch.Tensor) else arg for k, arg in enumerate(args)]
    for holder, arg in zip(holders, args, strict=True):
        if isinstance(holder, Node):
            holder.meta["val"] = mode.from_tensor(arg)
    node = graph.call_function(target, tuple(holders))
    node.meta["val"] = tuple(out if out is None else mode.from_tensor(out) for out in results)
    parts = [graph.call_function(operator.getitem, (node, k)) for k in range(len(node.meta["val"]))]
    for part, out in zip(parts, node.meta["val"], strict=True):
        part.meta["val"] = out
    graph.output(tuple(parts))
    return GraphModule({}, graph)


def calls(program: Program) -> dict[str, str]:
    """Return the program's library calls except views: name of the ATen operation → reason."""
    return {node.target.__name__: node.reason for node in program.nodes if isinstance(node, Extern) and node.reason}


def layout(tensor: torch.Tensor) -> list[int]:
    """Return the strides of dimensions with more than one element; other strides do not matter."""
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and tensor.numel() > 0]


def same(actual: object, expected: object) -> None:
    """Equal in every respect: dtype, shape, strides, values, sign of zero apart."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, check_stride=True)


def check(
    function: Callable[..., object],
    *inputs: torch.Tensor,
    leaves: Sequence[str] = (),
    mode: str = "fake",
    tolerance: float | None = None,
    contractions: Collection[str] | None = None,
) -> Program:
    """Lower, verify, run, and compare with eager; `leaves` names the expected library calls."""
    program = lowered(function, *inputs, mode=mode, contractions=contractions)
    assert sorted(calls(program)) == sorted(leaves)
    expected = tree_leaves(function(*inputs))
    actual = run_program(program, inputs)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        close = TOLERANCE.get(other.dtype, 0.0) if tolerance is None else tolerance
        torch.testing.assert_close(one, other, rtol=close, atol=close, equal_nan=True)
        assert layout(one) == layout(other)
    return program
