"""Captures a program as one graph of ATen operations whose inputs are its weights and its arguments.

Input: a fused or plain module, a function, or the result of `torch.export.export`; output: the exported program, with a
graph in which every mutation is an operation and every result one of the caller's.  PyTorch exports without Dynamo: a
program that has no single graph is refused there, with the line that prevents it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from types import FunctionType

import torch
import torch.fx.experimental._config
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv, rebind_unbacked

from fusion.api import unfused
from fusion.artifact.manifest import Json
from fusion.artifact.trees import described, leaf_names
from fusion.artifact.values import written
from fusion.lowering.builder import origin_of
from fusion.lowering.errors import Unsupported, brief

WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True, slots=True)
class CapturedWeight:
    """A tensor that the program holds; `kind` is "parameter", "buffer" or "constant" (not in its state)."""

    name: str
    kind: str
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the arguments: a fake tensor, a size or a constant."""

    name: str
    value: object

    @property
    def is_input(self) -> bool:
        """Whether the exported graph takes this leaf as a tensor or size input."""
        return isinstance(self.value, (torch.Tensor, torch.SymInt))


@dataclass(frozen=True, slots=True)
class Constant:
    """A constant result, as JSON."""

    text: Json


@dataclass(frozen=True, slots=True)
class CapturedProgram:
    """A program as a graph.

    Attributes:
        name: of the module or function.
        graph: its placeholders are the weights, then the sizes that vary, then the arguments that are no constants.
        inputs: the fake tensors and sizes of the placeholders.
        sizes: the sizes that vary.
        mode: of the fake tensors.
        weights: in the order of the placeholders.
        leaves: of the arguments, in the order of `exported`'s structure.
        positional: the names of the parameters that take positional arguments.
        constants: the constant of each result; None for results that the graph returns.
        results: the values of the latter, with the memory that they share with inputs.
        exported: the program as PyTorch exports it.
    """

    name: str
    graph: fx.GraphModule
    inputs: tuple[object, ...]
    sizes: tuple[torch.SymInt, ...]
    mode: FakeTensorMode
    weights: tuple[CapturedWeight, ...]
    leaves: tuple[Leaf, ...]
    positional: tuple[str, ...]
    constants: tuple[Constant | None, ...]
    results: tuple[object, ...]
    exported: ExportedProgram


def captured(
    program: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    dynamic_shapes: object = None,
) -> CapturedProgram:
    """Capture a program; a module in the state (train or eval) it is in, an exported program as it is.

    Raises:
        TypeError: `program` cannot be called, or `args` is no sequence.
        Unsupported: a part of it cannot be saved, or PyTorch cannot export it.
    """
    if not callable(program) and not isinstance(program, ExportedProgram):
        raise TypeError(f"expected an nn.Module, a function or an exported program, got {type(program).__name__}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"inputs must be a tuple or a list of arguments, got {type(args).__name__}")
    exported = program if isinstance(program, ExportedProgram) else _exported(program, args, kwargs, dynamic_shapes)
    specs = _input_specs(exported)
    copied, constants = _copied(exported)
    holders = copied.find_nodes(op="placeholder")
    values = [_value_of(node, spec.arg) for node, spec in zip(holders, specs, strict=True)]
    weights = _weights(exported)
    spec, positional = exported.call_spec.in_spec, _positional(program, exported)
    assert spec is not None
    names = leaf_names(described(spec), positional)
    leaves = [Leaf(name, value) for name, value in zip(names, values[len(weights) :], strict=True)]
    for leaf, node in zip(leaves, holders[len(weights) :], strict=True):
        if not leaf.is_input:
            node.replace_all_uses_with(leaf.value)
            copied.erase_node(node)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise Unsupported("a program without tensors among its inputs and weights is not saved")
    sizes = tuple(_varying(leaves, mode))
    _add_inputs(copied, len(weights), sizes)
    graph = fx.GraphModule(exported.graph_module, copied)
    inputs = (*values[: len(weights)], *sizes, *(leaf.value for leaf in leaves if leaf.is_input))
    return CapturedProgram(
        name=getattr(program, "__name__", type(program).__name__),
        graph=graph,
        inputs=inputs,
        results=described_values(graph, inputs, mode),
        sizes=sizes,
        mode=mode,
        weights=weights,
        leaves=tuple(leaves),
        positional=positional,
        constants=constants,
        exported=exported,
    )


def sizes_from_one() -> contextlib.AbstractContextManager[None]:
    """Allow varying sizes to be 1 in a block, unless an operation depends on it: PyTorch assumes at least 2.

    An operation that does know records it as a guard, which becomes an inequality of the file.
    """
    # PyTorch does not annotate the type of its settings.
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined, no-any-return]


def described_values(graph: fx.GraphModule, inputs: Sequence[object], mode: FakeTensorMode) -> tuple[object, ...]:
    """Describe each node of a graph by its value, and return the values of its results.

    Values that PyTorch leaves in an exported graph do not share memory as the program's do.
    """
    shapes = mode.shape_env
    fresh = contextlib.nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
    # Sizes that depend on data keep their names; PyTorch's functions in Python take symbols where those in C++ do not.
    with mode, torch.no_grad(), fresh, sizes_from_one(), enable_python_dispatcher():
        results = _Described(graph, shapes).run(*inputs)
    assert isinstance(results, tuple)
    return results


class _Described(fx.Interpreter):
    """Runs a graph over fake tensors, and notes the value of each node as Dynamo does."""

    def __init__(self, graph: fx.GraphModule, shapes: ShapeEnv | None) -> None:
        super().__init__(graph)
        self.shapes = shapes

    def run_node(self, n: fx.Node) -> object:
        """Run one node.

        Raises:
            Unsupported: it cannot be traced.
        """
        try:
            value: object = super().run_node(n)
        except RuntimeError as error:
            message = f"PyTorch does not trace {n.target} with sizes that vary: {brief(error)}"
            raise Unsupported(message, origin=origin_of(n)) from error
        if self.shapes is not None:
            rebind_unbacked(self.shapes, n, value)  # type: ignore[arg-type]  # the result of a node
        n.meta = {**n.meta, "val": value, "example_value": value}
        return value


def _varying(leaves: Sequence[Leaf], mode: FakeTensorMode) -> Iterator[torch.SymInt]:
    """Yield each size that varies in the arguments, as Dynamo passes it to a graph.

    Code that reads a size off a tensor finds only sizes that are a dimension themselves, and no multiple of one.
    """
    tensors = [leaf.value for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    numbers = (number for tensor in tensors for number in (*tensor.shape, *tensor.stride()))
    symbols = {
        symbol for number in numbers if isinstance(number, torch.SymInt) for symbol in number.node.expr.free_symbols
    }
    for symbol in sorted(symbols, key=str):
        assert mode.shape_env is not None
        size = mode.shape_env.create_symintnode(symbol, hint=int(mode.shape_env.backed_var_to_val[symbol]))
        if isinstance(size, torch.SymInt):
            yield size


def _add_inputs(graph: fx.Graph, position: int, sizes: Sequence[torch.SymInt]) -> None:
    before = [*graph.nodes][position]
    with graph.inserting_before(before):
        for size in sizes:
            graph.placeholder(f"size_{size.node.expr}")


def _exported(
    program: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], dynamic_shapes: object
) -> ExportedProgram:
    module = _module_of(unfused(program))
    export: Callable[..., ExportedProgram] = torch.export.export
    given = {"dynamic_shapes": dynamic_shapes, "strict": False}
    if dynamic_shapes is not None:
        with contextlib.suppress(Exception), torch.no_grad(), sizes_from_one():
            return export(module, tuple(args), dict(kwargs), **given)
    try:  # sizes are at least 2 where a decision depends on whether one is 1
        with torch.no_grad():
            return export(module, tuple(args), dict(kwargs), **given)
    except Exception as error:
        raise Unsupported(
            f"PyTorch does not export the program as one graph: {type(error).__name__}: {brief(error)}",
            hint="torch.export.export of the program has the details",
        ) from error


def _positional(program: Callable[..., object], exported: ExportedProgram) -> tuple[str, ...]:
    """Return the names by which positional arguments may be passed; none if the program does not tell."""
    spec = exported.call_spec.in_spec
    assert spec is not None
    count = spec.child(0).num_children
    if isinstance(program, ExportedProgram):
        return ()
    called = program.forward if isinstance(program, torch.nn.Module) else program
    try:
        parameters = inspect.signature(called).parameters
    except ValueError:  # a function of PyTorch
        return ()
    names = [name for name, each in parameters.items() if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return tuple(names[:count]) if len(names) >= count else ()


def _module_of(program: Callable[..., object]) -> torch.nn.Module:
    if isinstance(program, torch.nn.Module):
        return program
    function = program

    class Function(torch.nn.Module):
        """A module that calls a function."""

    module = Function()
    if isinstance(function, FunctionType):
        module.forward = _as_forward(function)
        return module

    def forward(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    module.forward = forward
    with contextlib.suppress(ValueError):  # a function of PyTorch does not tell its parameters
        forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # functions take attributes
    return module


def _as_forward(function: FunctionType) -> Callable[..., object]:
    """Return a copy of `function` whose frames are named `forward`: export notes the lines of such frames alone."""
    code = function.__code__.replace(co_name="forward")
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return update_wrapper(copy, function)


def _input_specs(exported: ExportedProgram) -> Sequence[InputSpec]:
    specs: Sequence[InputSpec] = exported.graph_signature.input_specs
    kinds = {spec.kind for spec in specs} - {*WEIGHTS, InputKind.USER_INPUT}
    if kinds:
        raise Unsupported(f"a program with inputs of the kind {min(kind.name for kind in kinds)} is not saved")
    order = [spec.kind is InputKind.USER_INPUT for spec in specs]
    assert order == sorted(order), "weights come before arguments"
    return specs


def _weights(exported: ExportedProgram) -> tuple[CapturedWeight, ...]:
    weights = []
    for spec in exported.graph_signature.input_specs:
        if spec.kind in WEIGHTS:
            name = spec.target
            assert name is not None
            kept = name in exported.state_dict
            tensor = exported.state_dict[name] if kept else exported.constants[name]
            kind = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}.get(spec.kind, "constant")
            weights.append(CapturedWeight(name, kind if kept else "constant", tensor.detach()))
    return tuple(weights)


def _value_of(node: fx.Node, argument: object) -> object:
    return node.meta["val"] if "val" in node.meta else getattr(argument, "value", None)


def _copied(exported: ExportedProgram) -> tuple[fx.Graph, tuple[Constant | None, ...]]:
    """Return a copy of the graph in which mutations are operations, and results are those of the caller.

    Results that are constants are not in the graph, but returned beside it.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(exported.graph, copies)
    assert isinstance(results, (tuple, list))
    targets = {spec.target: copies[node] for spec, node in _placeholders(exported)}
    names = {node.name: copies[node] for _, node in _placeholders(exported)}
    returned: list[object] = []
    for spec, result in zip(exported.graph_signature.output_specs, results, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            returned.append(result)
        elif spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            assert isinstance(result, fx.Node)
            written = targets[spec.target] if spec.kind is OutputKind.BUFFER_MUTATION else names[str(spec.target)]
            graph.call_function(torch.ops.aten.copy_.default, (written, result))
        else:
            raise Unsupported(f"a program with results of the kind {spec.kind.name} is not saved")
    graph.output(tuple(result for result in returned if isinstance(result, fx.Node)))
    return graph, tuple(None if isinstance(result, fx.Node) else _constant(result) for result in returned)


def _constant(result: object) -> Constant:
    try:
        return Constant(written(result, lambda value: None))
    except ValueError as error:
        raise Unsupported(f"a result that is {error} is not saved") from error


def _placeholders(exported: ExportedProgram) -> list[tuple[InputSpec, fx.Node]]:
    holders = exported.graph.find_nodes(op="placeholder")
    return list(zip(exported.graph_signature.input_specs, holders, strict=True))


__all__ = ["CapturedProgram", "CapturedWeight", "Leaf", "captured", "described_values", "sizes_from_one"]
