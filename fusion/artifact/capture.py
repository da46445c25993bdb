"""Captures a program as one graph of ATen operations whose inputs are its weights and its arguments.

Input: a fused or plain module, a function, or the result of `torch.export.export`; output: the exported program, with a
graph in which every mutation is an operation and every result one of the caller's.  PyTorch exports without Dynamo: a
program that has no single graph is refused there, with the line that prevents it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from fusion.api import unfused
from fusion.lowering.errors import Unsupported

WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor that the program holds; `kind` is "parameter", "buffer" or "constant" (not in its state)."""

    name: str
    kind: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Captured:
    """A program as a graph.

    Attributes:
        graph: its placeholders are the weights, and then the arguments in the order of `exported`'s structure.
        inputs: the fake tensors, sizes and constants of the placeholders.
        mode: of the fake tensors.
        weights: in the order of the placeholders.
        exported: the program as PyTorch exports it.
    """

    graph: fx.GraphModule
    inputs: tuple[object, ...]
    mode: FakeTensorMode
    weights: tuple[Weight, ...]
    exported: ExportedProgram

    @property
    def arguments(self) -> tuple[object, ...]:
        """The fake tensors, sizes and constants that the caller passes."""
        return self.inputs[len(self.weights) :]


def captured(
    program: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    dynamic_shapes: Any = None,
) -> Captured:
    """Capture a program; a module in the state (train or eval) it is in, an exported program as it is.

    Raises:
        Unsupported: a part of it cannot be saved.
        Exception: PyTorch's own, where it cannot export the program.
    """
    if isinstance(program, ExportedProgram):
        exported = program
    else:
        with torch.no_grad():
            exported = torch.export.export(
                _module_of(unfused(program)), tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
            )
    graph = fx.GraphModule(exported.graph_module, _copied(exported))
    holders = graph.graph.find_nodes(op="placeholder")
    inputs = tuple(_value_of(node, spec.arg) for node, spec in zip(holders, _input_specs(exported), strict=True))
    mode = next((value.fake_mode for value in inputs if isinstance(value, torch._subclasses.FakeTensor)), None)
    if mode is None:
        raise Unsupported("a program without tensors among its inputs and weights is not saved")
    return Captured(graph, inputs, mode, _weights(exported), exported)


def _module_of(program: Callable[..., object]) -> torch.nn.Module:
    if isinstance(program, torch.nn.Module):
        return program
    function = program

    class Function(torch.nn.Module):
        """A module that calls a function."""

    @functools.wraps(function)
    def forward(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    module = Function()
    module.forward = forward
    forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # functions take attributes
    return module


def _input_specs(exported: ExportedProgram) -> Sequence[Any]:
    specs = exported.graph_signature.input_specs
    kinds = {spec.kind for spec in specs} - {*WEIGHTS, InputKind.USER_INPUT}
    if kinds:
        raise Unsupported(f"a program with inputs of the kind {min(kind.name for kind in kinds)} is not saved")
    order = [spec.kind is InputKind.USER_INPUT for spec in specs]
    assert order == sorted(order), "weights come before arguments"
    return specs


def _weights(exported: ExportedProgram) -> tuple[Weight, ...]:
    weights = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind in WEIGHTS:
            name = spec.target
            assert name is not None
            kept = name in exported.state_dict
            tensor = exported.state_dict[name] if kept else exported.constants[name]
            kind = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}.get(spec.kind, "constant")
            weights.append(Weight(name, kind if kept else "constant", tensor.detach()))
    return tuple(weights)


def _value_of(node: fx.Node, argument: object) -> object:
    return node.meta["val"] if "val" in node.meta else getattr(argument, "value", None)


def _copied(exported: ExportedProgram) -> fx.Graph:
    """Return a copy of the graph in which mutations are operations, and results are what the caller gets."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(exported.graph, copies)
    assert isinstance(results, (tuple, list))
    targets = {spec.target: copies[node] for spec, node in _placeholders(exported)}
    names = {node.name: copies[node] for _, node in _placeholders(exported)}
    returned = []
    for spec, result in zip(exported.graph_signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            returned.append(result)
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            assert isinstance(result, fx.Node)
            written = targets[spec.target] if spec.kind is OutputKind.BUFFER_MUTATION else names[str(spec.target)]
            update = graph.call_function(torch.ops.aten.copy_.default, (written, result))
            update.meta = {"val": written.meta["val"]}
        else:
            raise Unsupported(f"a program with results of the kind {spec.kind.name} is not saved")
    graph.output(tuple(returned))
    for node in graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta["val"]  # as in a graph of Dynamo
    return graph


def _placeholders(exported: ExportedProgram) -> list[tuple[Any, fx.Node]]:
    holders = exported.graph.find_nodes(op="placeholder")
    return list(zip(exported.graph_signature.input_specs, holders, strict=True))


__all__ = ["Captured", "Weight", "captured"]
