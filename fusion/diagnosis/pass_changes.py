"""Cuts the part that a pass changed out of a Program, with separate inputs.

Input: a Program before and after a pass; output: pairs of small Programs with the same inputs and results.  Values that
the part reads become its inputs, so that numbers can be chosen right where a rewrite begins: the scores of a softmax,
not the tokens of the model around it.  Two inputs of which one follows from the other would not be free: the later one
is computed from its own operands, within the part.  So are integers, exponentials and other values of a limited range,
which passes rely on.

The results of calls that both programs have, and that cannot be repeated (random numbers) or whose operands cannot be
invented (positions, which a library may use unchecked), are inputs, too: the changes of a pass before and behind
them are compared, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import OpOverload

from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import Cast, Load, Op
from fusion.lowering.ir.program import BufferRef, Extern, Map, Node, Program, Reduce, reads, writes
from fusion.lowering.ir.scalar_ops import SCALAR_OPS
from fusion.lowering.random.seeded import draws, seeded

_MOST_NODES = 600
"""Nodes of a part; a larger one is not cut out."""


_ON_COPIES = (auto_functionalized, auto_functionalized_v2)
"""Calls, in functional graphs, of operations that change their operands: they copy these, and return the copies."""

_EXTREMES = ("max", "min", "argmax", "argmin")
_LIMITED = {name for name, each in SCALAR_OPS.items() if not each.low is each.high is None}
_LIMITED |= {"maximum", "minimum", "where"}
"""Operations whose results do not take all values."""


@dataclass(frozen=True, slots=True)
class RewrittenPart:
    """A part of a program before and after a pass: two Programs with the same inputs and results."""

    before: Program
    after: Program

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results."""
        return results_of(self.before)


def results_of(program: Program) -> tuple[str, ...]:
    """Return the names of the tensors that a Program returns."""
    return tuple(out.name for out in program.outputs if isinstance(out, BufferRef))


def changed_parts(before: Program, after: Program) -> Iterator[RewrittenPart | Unsupported]:
    """Yield each part that differs, or the reason why it cannot be evaluated by itself.

    >>> from fusion.inspect.examples import lowered
    >>> from fusion.lowering.printer import format_program
    >>> from fusion.schedule.rewrites.inline import inline_cheap_maps
    >>> import torch
    >>> whole = lowered(lambda x: torch.relu(x.sum(1) + 1).cumsum(0), torch.empty(3, 4))
    >>> (part,) = changed_parts(whole, inline_cheap_maps(whole))
    >>> print(format_program(part.before))
    program on cpu
      input sum_1: f32[3]
      add: f32[3] = map(i0:3) sum_1[i0] + 1.0   # add
      relu: f32[3] = map(i0:3) maximum(0.0, add[i0])   # relu
      cumsum: f32[3] = running sum(i0:3 along i0) relu[i0]   # cumsum
      return cumsum
    """
    old, new = _nodes_not_in(before, after), _nodes_not_in(after, before)
    kept = [node for node in before.nodes if not any(node is each for each in old)]
    seen = {name for node in kept for name in reads(node)} | before.output_names()
    cut_before, cut_after = _without_sources(before, after)
    for names in _groups([*old, *new]):
        own = [[node for node in nodes if names & {*writes(node)}] for nodes in (old, new)]
        written = [{name for node in nodes for name in writes(node)} for nodes in own]
        wanted = [name for name in before.buffers if name in written[0] & written[1] & seen]
        if not wanted:
            continue  # nothing that others read: nodes were removed, or are computed for these alone
        read = {
            name for nodes, results in zip(own, written, strict=True) for name in _read(nodes) if name not in results
        }
        try:
            yield _part(cut_before, cut_after, [name for name in read if name in before.buffers], wanted)
        except Unsupported as reason:
            yield reason


def parts_of(program: Program, names: Iterable[str], *wanted: Sequence[str]) -> tuple[Program, ...]:
    """Return Programs with the same inputs that compute each of `wanted` from `names`, or from the operands of these.

    Raises:
        Unsupported: one has side effects, or is large.
    """
    (program,) = _without_sources(program)
    inputs = free_inputs(program, names)
    return _with_equal_inputs([extracted(program, inputs, each) for each in wanted])


def _without_sources(*programs: Program) -> tuple[Program, ...]:
    """Return programs without the calls that all of them have and that a part cannot run: their results are inputs."""
    first, *others = programs
    known = [{name: node for node in other.nodes for name in writes(node)} for other in others]
    sources = {
        name
        for node in first.nodes
        if _is_source(first, node) and all(of.get(name) == node for of in known for name in writes(node))
        for name in writes(node)
    }
    if not sources:
        return programs
    return tuple(
        replace(each, nodes=tuple(node for node in each.nodes if not writes(node) or not {*writes(node)} <= sources))
        for each in programs
    )


def _is_source(program: Program, node: Node) -> bool:
    """Return whether a call draws random numbers, or takes integers."""
    if not isinstance(node, Extern) or node.is_view or node.sizes or node.overwrites:
        return False
    return _draws(node) or (not node.impure and _takes(program, node, program.buffers))


def _draws(call: Extern) -> bool:
    return call.impure and draws(call.target, call.args, call.kwargs)


def _part(before: Program, after: Program, names: Iterable[str], wanted: Sequence[str]) -> RewrittenPart:
    inputs: frozenset[str] = frozenset()
    others = free_inputs(before, names)
    while others != inputs:  # a node on the way may read something else after the pass
        inputs = others
        parts = [extracted(program, inputs, wanted) for program in (before, after)]
        used = {name for part in parts for name in part.inputs if isinstance(name, str)}
        others = free_inputs(before, inputs | (used & before.buffers.keys()))
    return RewrittenPart(*_with_equal_inputs(parts))


def _with_equal_inputs(parts: Sequence[Program]) -> tuple[Program, ...]:
    """Extend the inputs of each program to the inputs of all.

    Raises:
        Unsupported: an input is another tensor in one of them.
    """
    inputs = tuple(dict.fromkeys(name for part in parts for name in part.inputs))
    buffers = {name: buffer for part in parts for name, buffer in part.buffers.items()}
    for name in inputs:
        if isinstance(name, str) and any(part.buffers.get(name, buffers[name]) != buffers[name] for part in parts):
            raise Unsupported(f"{name} is another tensor after the pass")
    given = {name: buffers[name] for name in inputs if isinstance(name, str)}
    return tuple(replace(part, inputs=inputs, buffers={**part.buffers, **given}) for part in parts)


def _nodes_not_in(program: Program, other: Program) -> list[Node]:
    """Return the nodes that write something, and that the other program does not have."""
    known = {name: node for node in other.nodes for name in writes(node)}
    return [node for node in program.nodes if writes(node) and any(known.get(name) != node for name in writes(node))]


def _groups(nodes: Sequence[Node]) -> Iterator[set[str]]:
    """Yield groups of names that nodes write, joined where one of these nodes reads another."""
    graph: nx.Graph[str] = nx.Graph()
    results = {name for node in nodes for name in writes(node)}
    for node in nodes:
        first, *others = (*writes(node), *(name for name in reads(node) if name in results))
        graph.add_node(first)
        graph.add_edges_from((first, name) for name in others)
    yield from nx.connected_components(graph)


def _read(nodes: Iterable[Node]) -> list[str]:
    return [name for node in nodes for name in reads(node)]


def free_inputs(program: Program, names: Iterable[str]) -> frozenset[str]:
    """Return the operands of `names`, such that no input follows from another, and none is a computed integer."""
    maker = {name: node for node in program.nodes for name in writes(node)}
    place = {name: number for number, name in enumerate(maker)}
    above = _Above(maker)
    chosen = set(names)
    while True:
        computed = sorted((name for name in chosen if name in maker), key=place.__getitem__, reverse=True)
        bound = next((name for name in computed if _is_bound(program, name, chosen, above)), None)
        if bound is None:
            return frozenset(chosen)
        chosen = (chosen - {*writes(maker[bound])}) | {*reads(maker[bound])}


def _is_bound(program: Program, name: str, chosen: set[str], above: _Above) -> bool:
    """Return whether a value follows from another chosen one, or from no floats, or does not take all values."""
    origins = above.of(name)
    fixed = not any(program.buffers[each].dtype.is_floating_point for each in origins - above.maker.keys())
    return fixed or _is_limited(program, name, above.maker) or bool(origins & (chosen - {name}))


def _is_limited(program: Program, name: str, maker: Mapping[str, Node]) -> bool:
    """Return whether the range of a computed value is limited: integers, exponentials and their sums, squares, values
    compared with a maximum.
    """
    node = maker.get(name)
    if node is None:
        return False
    if not program.buffers[name].dtype.is_floating_point:
        return True
    if not isinstance(node, (Map, Reduce)):
        return False
    producers = [maker.get(each) for each in reads(node)]
    if any(isinstance(each, Reduce) and each.op in _EXTREMES for each in (node, *producers)):
        return True
    value = node.exprs[0]
    while isinstance(value, Cast):
        value = value.arg
    if isinstance(value, Load):
        return value.buffer != name and _is_limited(program, value.buffer, maker)
    return isinstance(value, Op) and (
        (value.name in _LIMITED) or (value.name == "mul" and value.args[0] == value.args[1])
    )


@dataclass(slots=True)
class _Above:
    """The names from which each name is computed."""

    maker: Mapping[str, Node]

    def of(self, name: str) -> set[str]:
        origins: set[str] = set()
        waiting = [name]
        while waiting:
            node = self.maker.get(waiting.pop())
            fresh = [each for each in (() if node is None else reads(node)) if each not in origins]
            origins.update(fresh)
            waiting += fresh
        return origins


def extracted(program: Program, inputs: frozenset[str], wanted: Sequence[str]) -> Program:
    """Return the Program that computes `wanted` from `inputs`, and from inputs of the whole program where needed.

    Raises:
        Unsupported: it has side effects or random numbers, takes integers that cannot be invented, or is large.
    """
    needed, nodes = {name for name in wanted if name not in inputs}, []
    for node in reversed(program.nodes):
        if not needed & {*writes(node)}:
            continue
        if isinstance(node, Extern):
            _refuse_effects(node)
        nodes.append(node)
        needed |= {name for name in reads(node) if name not in inputs}
    if len(nodes) > _MOST_NODES:
        raise Unsupported(f"it is a part of {len(nodes)} nodes")
    results = {name for node in nodes for name in writes(node)}
    used = [*dict.fromkeys((*_read(reversed(nodes)), *wanted))]
    symbols = tuple(entry for entry in program.inputs if entry is not None and not isinstance(entry, str))
    given = tuple(name for name in used if name not in results and name not in program.constants)
    _refuse_invented(program, given, reversed(nodes))
    constants = {name: program.constants[name] for name in used if name in program.constants}
    origins = {name: program.origins[name] for name in results if name in program.origins}
    outputs = tuple(map(BufferRef, wanted))
    buffers = {name: program.buffers[name] for name in (*given, *results, *constants)}
    return Program((*symbols, *given), buffers, tuple(reversed(nodes)), outputs, origins, constants)


def _refuse_effects(call: Extern) -> None:
    """Refuse a call that does more than to compute its results from its operands.

    Raises:
        Unsupported: it does.
    """
    if _draws(call):
        raise Unsupported(f"{call.name} draws random numbers, and the pass replaced the call")
    if call.sizes or call.overwrites or (call.impure and not _repeats(call)):
        raise Unsupported(f"{call.name} changes its operands or determines sizes")


def _repeats(call: Extern) -> bool:
    """Return whether a call gives the same results again: it might draw, and does not, or draws from a seed, or is one
    that changes operands, made of copies of them.
    """
    if call.target in _ON_COPIES:
        (changing, *_) = call.args
        return isinstance(changing, OpOverload) and torch.Tag.nondeterministic_seeded not in changing.tags
    might = isinstance(call.target, OpOverload) and torch.Tag.nondeterministic_seeded in call.target.tags
    return might or call.target is seeded


def _refuse_invented(program: Program, given: Sequence[str], nodes: Iterable[Node]) -> None:
    """Refuse calls of integers that are inputs, or follow from some: random ones may be out of bounds.

    Raises:
        Unsupported: there is such a call.
    """
    invented = {name for name in given if _is_integer(program, name)}
    for node in nodes:
        if isinstance(node, Extern) and not node.is_view and _takes(program, node, invented):
            raise Unsupported(f"{node.name} takes integers, which it may use unchecked")
        if invented & {*reads(node)}:
            invented |= {name for name in writes(node) if _is_integer(program, name)}


def _takes(program: Program, call: Extern, names: Collection[str]) -> bool:
    """Return whether a call takes integers among `names`; a seed may be any."""
    return call.target is not seeded and any(name in names and _is_integer(program, name) for name in call.reads)


def _is_integer(program: Program, name: str) -> bool:
    dtype = program.buffers[name].dtype
    return not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool


__all__ = ["RewrittenPart", "changed_parts", "extracted", "free_inputs", "parts_of", "results_of"]
