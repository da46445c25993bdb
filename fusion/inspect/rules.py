"""Checks the rule of each operation of a graph on the numbers that it gets.

Input: an ATen graph and its inputs; output: the first call whose lowered form computes other numbers than PyTorch's
kernel on the same operands.  Calls that draw random numbers, change their operands or have no rule are not checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx
from torch._ops import OpOverload

from fusion.inspect.accuracy import is_close
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import Origin, Unsupported
from fusion.lowering.interpret import run_program
from fusion.lowering.lower import lower
from fusion.lowering.registry import RULES


@dataclass(frozen=True, slots=True)
class WrongRule:
    """A call that is lowered to other numbers.

    Attributes:
        name: the operation, such as "aten.exp.default".
        origin: the module and line of the program.
        error: of PyTorch's result against the lowered form in float64, by norms.
    """

    name: str
    origin: Origin
    error: float

    def __str__(self) -> str:
        return f"{self.name}: its lowered form differs by {self.error:.1e} from PyTorch's result\n    {self.origin}"


def checking(
    graph: fx.GraphModule, tell: Callable[[WrongRule], object]
) -> Callable[[list[object]], tuple[object, ...]]:
    """Return a function that runs a graph with PyTorch's operations, and calls `tell` for each wrong rule."""

    def run(args: list[object]) -> tuple[object, ...]:
        inputs = tuple(args)
        args.clear()
        results: tuple[object, ...] = _Checking(graph, tell).run(*inputs)
        return results

    return run


class _Checking(fx.Interpreter):
    def __init__(self, graph: fx.GraphModule, tell: Callable[[WrongRule], object]) -> None:
        super().__init__(graph)
        self._tell = tell

    def run_node(self, n: fx.Node) -> object:
        """Run a node, and its lowered form on the same operands."""
        if not _is_checked(n):
            return super().run_node(n)
        operands = [self.env[arg] for arg in n.all_input_nodes]
        result = super().run_node(n)
        for error in _errors(n, operands, result):
            self._tell(WrongRule(str(n.target), origin_of(n), error))
        return result


def _is_checked(node: fx.Node) -> bool:
    """Return whether a node is a call with a rule whose result follows from its operands alone."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or target not in RULES:
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _errors(node: fx.Node, operands: Sequence[object], result: object) -> Iterator[float]:
    """Yield the error of each wrong result of a call."""
    inputs = cast("Sequence[torch.Tensor | int | None]", operands)
    try:
        program = lower(_alone(node))
        rounded, exact = run_program(program, inputs), run_program(program, inputs, exact=False)
    except Unsupported:  # it stays a call
        return
    results = result if isinstance(result, (tuple, list)) else [result]
    for theirs, same, wide in zip(results, rounded, exact, strict=True):
        if all(isinstance(each, torch.Tensor) for each in (theirs, same, wide)) and not theirs.is_complex():
            is_right, error, _ = is_close(theirs, cast("torch.Tensor", same), cast("torch.Tensor", wide))
            if not is_right:
                yield error


def _alone(node: fx.Node) -> fx.GraphModule:
    """Return a graph of one call, with its operands as inputs and all of its results."""
    graph = fx.Graph()
    inputs: dict[fx.Node, fx.Node] = {}
    for arg in node.all_input_nodes:
        inputs[arg] = graph.placeholder(arg.name)
        inputs[arg].meta["val"] = arg.meta["val"]
    call = graph.node_copy(node, inputs.__getitem__)
    values = node.meta["val"]
    if not isinstance(values, (tuple, list)):
        graph.output((call,))
    else:
        parts = [graph.call_function(operator.getitem, (call, k)) for k in range(len(values))]
        for part, value in zip(parts, values, strict=True):
            part.meta["val"] = value
        graph.output(tuple(parts))
    return fx.GraphModule(torch.nn.Module(), graph)


__all__ = ["WrongRule", "checking"]
