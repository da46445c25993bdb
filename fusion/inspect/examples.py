"""Prints the effect of a pass on a small function, as a difference of lines: the examples in docstrings of passes.

A line that the pass removes begins with `-`, an added line with `+`; the others stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import ndiff
from inspect import signature
from textwrap import wrap

import torch
from sympy import sympify
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from fusion.codegen.reference import ReferenceTarget
from fusion.inspect.text import step_lines
from fusion.joint.saved import DONATED
from fusion.lowering.aten.decompositions import decompositions
from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.program import Program
from fusion.lowering.lower import lower
from fusion.lowering.printer import format_kernel, format_program
from fusion.lowering.printer.programs import tensor_text
from fusion.schedule import Step, grow
from fusion.schedule.kernels import KernelCall
from fusion.schedule.launches.generate import kernels_of
from fusion.schedule.rewrites.inline import inline_cheap_maps

WIDTH = 112
"""Columns of an example, inside a docstring."""

MARKS: Mapping[object, str] = {
    CheckpointPolicy.MUST_SAVE: "   # save",
    CheckpointPolicy.PREFER_RECOMPUTE: "   # recompute",
}
"""Marks of a joint graph's nodes, as text: forward saves the result, or backward rather computes it again."""

TARGET = ReferenceTarget()
"""The target of examples, which can generate everything."""


def traced(function: Callable[..., object], *inputs: torch.Tensor, symbolic: bool = False) -> fx.GraphModule:
    """Trace the ATen graph of a function, whose results are a flat tuple; `symbolic`: with symbols for sizes."""

    def flat(*args: torch.Tensor) -> object:
        return tuple(tree_leaves(function(*args)))

    trace = make_fx(flat, tracing_mode="symbolic" if symbolic else "fake", decomposition_table=decompositions())
    graph = trace(*inputs)
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), signature(function).parameters, strict=True):
        node._rename(name)
    graph.recompile()
    return graph


def lowered(function: Callable[..., object], *inputs: torch.Tensor) -> Program:
    """Lower a function to a Program."""
    return lower(traced(function, *inputs))


def show_program(
    change: Callable[[Program], Program], program: Program | Callable[..., object], *inputs: torch.Tensor
) -> None:
    """Print the changes of a pass to a Program, or to the Program of a function of `inputs`.

    >>> show_program(lambda program: program, lambda x: x + 1, torch.ones(3))
      input x: f32[3]
      add: f32[3] = map(i0:3) x[i0] + 1.0
      return add
    """
    before = program if isinstance(program, Program) else lowered(program, *inputs)
    _print_change(_program_lines(before), _program_lines(change(before)))


def show_graph(
    change: Callable[[fx.GraphModule], object],
    graph: fx.GraphModule | Callable[..., object],
    *inputs: torch.Tensor,
    layouts: bool = False,
) -> None:
    """Print the changes of a pass, which works in place, to a graph, or to the graph of a function of `inputs`.

    Marks are printed behind a node: for the partition, and of inputs that may be overwritten.

    Args:
        layouts: print the shape and the strides of each value.

    >>> show_graph(lambda graph: None, lambda x: x.sin() * 2, torch.ones(3))
      sin = sin(x)
      mul = mul.Tensor(sin, 2)
      return mul
    """
    subject = graph if isinstance(graph, fx.GraphModule) else traced(graph, *inputs)
    before = _graph_lines(subject, layouts)
    change(subject)
    _print_change(before, _graph_lines(subject, layouts))


def show_captured(
    change: Callable[[fx.GraphModule], object],
    function: Callable[..., object],
    *inputs: torch.Tensor,
    dynamic: bool | None = False,
) -> None:
    """Print the changes of a pass, which works in place, to Dynamo's graph of a function, or why it refuses the graph.

    >>> show_captured(lambda graph: None, lambda x: x.sin() * 2, torch.ones(3))
      sin = sin(l_x_)
      mul = mul(sin, 2)
      return mul
    """

    def backend(graph: fx.GraphModule, _: object) -> Callable[..., object]:
        try:
            show_graph(change, graph)
        except Unsupported as refusal:
            print(f"refused: {refusal.message}")
        return lambda *args: [None] * len(tree_leaves(graph.graph.output_node().args))  # nothing is run

    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)


def show_launches(
    change: Callable[[Sequence[Step], Program], Sequence[Step]],
    function: Callable[..., object],
    *inputs: torch.Tensor,
    kernels: bool = False,
) -> None:
    """Print the changes of a pass to the launches of a function of `inputs`.

    Args:
        kernels: print the kernels.

    >>> show_launches(lambda steps, program: steps, lambda x: x.sin() * 2, torch.ones(3))
      launch sin_mul(x, mul)
    """
    program = inline_cheap_maps(lowered(function, *inputs))
    steps, _ = kernels_of(program, grow(program, TARGET.capabilities), TARGET)
    _print_change(_step_lines(steps, kernels), _step_lines(change(steps, program), kernels))


def _step_lines(steps: Sequence[Step], kernels: bool) -> list[str]:
    if kernels:
        texts = [format_kernel(step.kernel) for step in steps if isinstance(step, KernelCall)]
        return [line.partition("   # ")[0] for text in texts for line in text.splitlines()]
    return step_lines(steps)


def _print_change(before: list[str], after: list[str]) -> None:
    for line in ndiff(before, after):
        if not line.startswith("?"):
            print("\n".join(wrap(line, WIDTH, subsequent_indent=8 * " ", drop_whitespace=True) or [line]))


def _program_lines(program: Program) -> list[str]:
    lines = format_program(program.edited(origins={})).splitlines()[1:]
    return [line.partition("   # ")[0].removeprefix("  ") for line in lines]


def _graph_lines(graph: fx.GraphModule, layouts: bool) -> list[str]:
    return [line for node in graph.graph.nodes for line in _node_lines(node, layouts)]


def _node_lines(node: fx.Node, layouts: bool) -> Iterator[str]:
    args = [_text(arg) for arg in node.args] + [f"{key}={_text(arg)}" for key, arg in node.kwargs.items()]
    if node.op == "placeholder" and DONATED in node.meta:
        yield f"input {node.name}   # {DONATED}"
    elif node.op == "output":
        yield f"return {', '.join(map(str, tree_leaves(node.args[0])))}"
    elif node.op in ("call_function", "call_method"):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        value = node.meta.get("val")
        described = f": {_layout(value)}" if layouts and isinstance(value, torch.Tensor) else ""
        mark = MARKS.get(node.meta.get("recompute"), "")
        yield f"{node.name}{described} = {name.removesuffix('.default')}({', '.join(args)}){mark}"


def _layout(value: torch.Tensor) -> str:
    return tensor_text(value.dtype, *(tuple(sympify(str(n)) for n in sizes) for sizes in (value.shape, value.stride())))


def _text(arg: object) -> str:
    return getattr(arg, "__name__", "function") if callable(arg) and not isinstance(arg, fx.Node) else str(arg)
