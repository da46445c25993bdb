"""Evaluates the subjects of passes in float64: fx graphs, joint graphs and their halves, Programs, launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map

from fusion.lowering.interpret import kernels, programs, run_kernel, run_program
from fusion.lowering.interpret.evaluate import pieces
from fusion.lowering.ir.chunks import BETA, POINTS, START
from fusion.lowering.ir.program import Buffer, BufferRef, Program
from fusion.lowering.ir.sizes import size_value
from fusion.runner.contexts import ForwardBackward, Joint, Planned
from fusion.schedule.kernels import KernelCall

Values: TypeAlias = "list[object]"
"""Results, and for a graph that may change its inputs, the inputs afterwards."""

SEED = 7
TURNS = 3
"""How many turns the programs of a launch run in, at least."""
TOLERANCE = 1e-8
"""Relative to the largest finite number of a result: passes reorder additions, and remove terms that cancel."""


def wide(value: object) -> object:
    """Return a copy of a tensor in the same layout, in float64 if it holds floats; other values unchanged."""
    return _as(value, torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else _as(value, None)


def _as(value: object, dtype: torch.dtype | None) -> object:
    if not isinstance(value, Tensor):
        return value
    value, dtype = value.detach(), dtype or value.dtype
    memory = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=dtype)
    own = torch.as_strided(value, memory.shape, (1,), 0)
    memory.copy_(own)
    return torch.as_strided(memory, value.shape, value.stride(), value.storage_offset())


# fx graphs ------------------------------------------------------------------------------------------------------------

CASTS = ("float", "half", "bfloat16")
"""Methods that convert to a shorter float."""


class _Wide(fx.Interpreter):
    """Run a graph in float64: dtype arguments are replaced, and results in shorter floats are widened.

    A call that has no meaning in float64 (a view as integers) runs in the traced dtypes.
    """

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n.op == "call_method" and n.target in CASTS:
            return args[0].double()
        run = getattr(self, n.op)
        if n.op not in ("call_function", "call_method"):
            return tree_map(_double, run(n.target, args, kwargs))
        try:
            result = run(n.target, *tree_map(_wide_dtype, (args, kwargs)))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            given = {id(self.env[arg]): _traced(arg) for arg in n.all_input_nodes}
            narrow = tree_map(lambda arg: arg.to(given[id(arg)]) if given.get(id(arg)) else arg, (args, kwargs))
            result = run(n.target, *narrow)
        return tree_map(_double, result)


def _double(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _wide_dtype(value: object) -> object:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _traced(node: fx.Node) -> torch.dtype | None:
    value = node.meta.get("val", node.meta.get("example_value"))
    return value.dtype if isinstance(value, Tensor) else None


def of_graph(graph: fx.GraphModule, args: Sequence[object]) -> Values:
    """The results of a graph, and its inputs afterwards."""
    given = [wide(arg) for arg in args]
    results = tree_leaves(_run(graph, given))
    changed = [arg for arg in given if isinstance(arg, Tensor)]
    return [*results, *changed, *_seen(given, results)]


def of_captured(graph: fx.GraphModule, known: Mapping[str, object]) -> Values:
    """The results of Dynamo's graph, whose inputs may have become numbers, and the tensors it was called with."""
    given = {name: wide(value) for name, value in known.items()}
    results = tree_leaves(_run(graph, [given[node.name] for node in _inputs(graph)]))
    return [*results, *(value for value in given.values() if isinstance(value, Tensor))]


def _run(graph: fx.GraphModule, given: Sequence[object]) -> list[object]:
    """The results, one for each of the graph's own."""
    torch.manual_seed(SEED)
    results = _Wide(graph).run(*given, enable_io_processing=False)
    return list(results) if isinstance(results, (list, tuple)) else [results]


def of_joint(joint: Joint, known: Mapping[str, object]) -> Values:
    """The results of a joint graph without those that are there for the partition alone."""
    given = [_known(node, known) for node in _inputs(joint.graph)]
    results = _run(joint.graph, given)
    forward, gradients = results[: joint.results], results[joint.returned or joint.results :]
    return [*forward, *gradients, *_seen(given, forward)]


def _seen(given: Sequence[object], results: Sequence[object]) -> Values:
    """What a caller sees of results besides their values: shared memory, and strides."""
    return [*_memory(given, results), *_layouts(results)]


def _memory(given: Sequence[object], results: Sequence[object]) -> Iterator[int]:
    """For each result the first one in the same memory, or, as a negative number, an input: who writes to it."""
    inputs, own = (
        [x.untyped_storage()._cdata if isinstance(x, Tensor) else None for x in of] for of in (given, results)
    )
    return (-1 - inputs.index(place) if place in inputs else own.index(place) for place in own)


def _layouts(results: Sequence[object]) -> Iterator[int]:
    """The strides of the results, which a caller sees, along dimensions of several elements."""
    for result in results:
        if isinstance(result, Tensor) and result.numel():
            yield from (stride for size, stride in zip(result.shape, result.stride(), strict=True) if size > 1)


def of_partitioned(halves: ForwardBackward, known: Mapping[str, object]) -> Values:
    """The program's own results of forward, and those of backward on what forward saves: tensors, then sizes."""
    given = [_known(node, known) for node in _inputs(halves.forward)]
    forward = _run(halves.forward, given)
    holders = [node for node in _inputs(halves.backward) if "tangents" not in node.name]
    saved = forward[len(forward) - len(holders) :]
    numbers = iter([value for value in saved if not isinstance(value, Tensor)])
    tensors = iter([value for value in saved if isinstance(value, Tensor)])
    passed = {node.name: next(tensors if isinstance(node.meta["val"], Tensor) else numbers) for node in holders}
    backward = _run(halves.backward, [_known(node, {**known, **passed}) for node in _inputs(halves.backward)])
    results = forward[: halves.results]
    return [*results, *backward, *_seen(given, results)]


def _inputs(graph: fx.GraphModule) -> list[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _known(node: fx.Node, known: Mapping[str, object]) -> object:
    """Return the recorded value of an input; random numbers for a gradient that backward did not need."""
    if node.name in known:
        return wide(known[node.name])
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"nothing is known of {node.name}"
    shape = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(SEED))


# Programs and launches ------------------------------------------------------------------------------------------------


def of_program(program: Program, args: Sequence[object]) -> Values:
    """Return the results of a Program, and its inputs afterwards; only inputs without shorter floats may change."""
    torch.manual_seed(SEED)
    given = [_as(arg, None) for arg in args]
    results = run_program(program, given, exact=False)  # type: ignore[arg-type]  # tensors and sizes
    return [*results, *_unrounded(given)]


def of_planned(planned: Planned, args: Sequence[object]) -> Values:
    """The results of a list of launches and calls, and its inputs afterwards, as for a Program.

    The programs of a launch run in several turns, so that what one of them overwrites is not there for the next ones.
    """
    torch.manual_seed(SEED)
    program, given = planned.program, [_as(arg, None) for arg in args]
    sizes = programs.bind_sizes(program, given)  # type: ignore[arg-type]  # tensors and sizes
    values = {
        name: _in_place(value) for name, value in zip(program.inputs, given, strict=True) if isinstance(name, str)
    }
    values |= {name: _double(tensor) for name, tensor in program.constants.items()}
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "pieces", lambda cost: max(TURNS, pieces(cost)))
        for step in planned.steps:
            if isinstance(step, KernelCall):
                values |= {name: _empty(program.buffers[name], sizes) for name in step.written}
                tensors: Any = [values[name] for name in step.buffers]
                run_kernel(step.kernel, tensors, [sizes[size] for size in step.kernel.sizes], exact=False)
                values |= {name: values[operand] for name, operand in step.over.items()}
            else:
                one: Any = Program((), program.buffers, (step,), (), constants=program.constants)
                programs._results(one, values, sizes, False)  # type: ignore[arg-type]  # tensors
    results = [
        values[out.name] if isinstance(out, BufferRef) else None if out is None else size_value(out, sizes)
        for out in program.outputs
    ]
    return [*results, *_unrounded(given)]


def _in_place(value: object) -> object:
    """A tensor that is evaluated in place if it holds float64 or no floats, else its copy in float64."""
    rounded = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64
    return wide(value) if rounded else value


def _unrounded(given: Sequence[object]) -> Iterator[Tensor]:
    """Return the tensors to evaluate in place: those of shorter floats are copied to float64."""
    for value in given:
        if isinstance(value, Tensor) and (value.dtype is torch.float64 or not value.is_floating_point()):
            yield value


def _empty(buffer: Buffer, sizes: Mapping[sympy.Symbol, int]) -> Tensor:
    shape, strides = ([size_value(size, sizes) for size in of] for of in (buffer.shape, buffer.strides))
    dtype = torch.float64 if buffer.dtype.is_floating_point else buffer.dtype
    return torch.empty_strided(shape, strides, dtype=dtype).fill_(1)


def drawn_inputs(program: Program, hints: Mapping[sympy.Symbol, int]) -> list[object]:
    """Inputs for the body of a chunk: the first one, of 16 points, and random numbers."""
    sizes = {START: 0, BETA: 0, POINTS: 16, **hints}
    generator = torch.Generator().manual_seed(SEED)

    def drawn(buffer: Buffer) -> Tensor:
        shape, strides = ([size_value(size, sizes) for size in of] for of in (buffer.shape, buffer.strides))
        empty = torch.empty_strided(shape, strides, dtype=buffer.dtype)
        if buffer.dtype.is_floating_point:
            return empty.copy_(torch.randn(shape, generator=generator))
        return empty.copy_(torch.randint(2, shape, generator=generator))

    return [
        drawn(program.buffers[entry]) if isinstance(entry, str) else sizes[entry] if entry is not None else None
        for entry in program.inputs
    ]


# Comparison -----------------------------------------------------------------------------------------------------------


def differences(before: Values, after: Values) -> Iterator[str]:
    """Yield the differences of values beyond those of reordered additions."""
    if len(before) != len(after):
        yield f"{len(after)} results, before {len(before)}"
        return
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            if isinstance(old, (int, float, bool)) and old != new:
                yield f"result {place} is {new}, before {old}"
        elif old.shape != new.shape:
            yield f"result {place} is {list(new.shape)}, before {list(old.shape)}"
        elif not _close(old, new):
            yield f"result {place}: {new.flatten()[:4].tolist()} …, before {old.flatten()[:4].tolist()} …"


def _close(old: Tensor, new: Tensor) -> bool:
    if not old.is_floating_point():
        return torch.equal(old, new)
    old, new = old.double(), new.double()
    finite = old[old.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(old, new, rtol=TOLERANCE, atol=TOLERANCE * max(scale, 1e-6), equal_nan=True)
