"""Inlines maps that cost less to recompute than to store into their readers.

`Program → Program`.  A map that loads nothing (a mask from indices, a constant), only converts, moves or lightly
changes one other tensor (by a number in memory, too), or broadcasts vectors to a larger tensor (a mask of equal
documents) is substituted into every generated reader, except one after a call that needs the result in memory: an
operand that only this reader needed would be stored beside it.  A map is substituted into a reader that reads few of
its points (the loss of a class, among the probabilities of all), unless it is stored anyway, by the kernel of a
product, or before a node that the reader waits for: reading its operands instead would extend their live ranges, back
to the first layer of a model whose last one reads one position.  It stays a node only where an extern or the caller
needs the tensor, or where a library may be called with it: `growth.py` fuses an operand into a contraction as a
prologue, if that pays off.  Readers through such a node, or through a tensor that it copies, round as the stored tensor
is rounded, so that all see the same numbers.  A tensor that is compared with a result derived from it stays a node if a
recomputation may differ in the last bit (`lowering/algebra/last_bits.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

import sympy

from fusion.codegen.price import WIDE, additions_of
from fusion.lowering.algebra.dead_code import eliminate_dead_code
from fusion.lowering.algebra.last_bits import compared, may_differ
from fusion.lowering.algebra.positions import simplify_step
from fusion.lowering.indexing import substitute
from fusion.lowering.ir.chunks import Chunked
from fusion.lowering.ir.expr import Cast, Expr, Load, Random, as_stored, free_axes, guarded, loads, postorder, rewrite
from fusion.lowering.ir.program import (
    Compute,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    Reduce,
    axis_sizes,
    copies,
    reads,
    with_exprs,
    writes,
)

FREE_LOADLESS, FREE_SINGLE = 40, 4
"""Largest cost (in additions) of a map that all readers recompute: without any load, and with one, not counting those
of 0-d tensors.
"""

OFTEN, FREE_OFTEN = 8, 8
"""A reader with this many times more points recomputes no map of a larger cost: the price of both decides."""

CACHED = 1 << 20
"""Bytes of operands that stay in a cache between two readers."""

FEWER_POINTS = 64
"""A reader with this many times fewer points than a map computes the points it needs itself."""


def inline_cheap_maps(program: Program) -> Program:
    """Substitute cheap maps into their readers; the same object when there are none.

    >>> from fusion.inspect.examples import show_program
    >>> from torch import empty
    >>> show_program(inline_cheap_maps, lambda x: (x + 1).sin().sum(), empty(3))
      input x: f32[3]
    - add: f32[3] = map(i0:3) x[i0] + 1.0
    - sin: f32[3] = map(i0:3) sin(add[i0])
    + sin: f32[3] = map(i0:3) sin(x[i0] + 1.0)
      sum_1: f32[] = sum(over r0:3) sin[r0]
      return sum_1
    """
    cheap: dict[str, Map] = {}
    maps: dict[str, Map] = {}
    nodes: list[Node] = []
    inlined_names: dict[str, tuple[str, ...]] = dict(program.inlined)
    changed = False
    stays = program.output_names().union(
        *(reads(node) for node in program.nodes if isinstance(node, (Extern, Chunked)))
    )
    stored, compared_back, rounded = _Stored(program, stays), _compared_back(program), _rounded(program, stays)
    for node in program.nodes:
        if not isinstance(node, (Extern, Chunked)) and node.out not in program.library:
            while (inlined := inline(node, known := _inlined_into(node, cheap, maps, stored))) is not node:
                changed = True
                read = [load.buffer for load in loads(*node.exprs) if load.buffer in known]
                names = (name for buffer in read for name in (*inlined_names.get(buffer, ()), buffer))
                inlined_names[node.out] = tuple(dict.fromkeys((*inlined_names.get(node.out, ()), *names)))
                node = inlined
            if isinstance(node, Map) and not any(isinstance(part, Random) for part in postorder(node.expr)):
                visible = replace(node, expr=as_stored(node.expr)) if node.out in rounded else node
                if node.out in compared_back and may_differ(node.expr):
                    nodes.append(node)
                    continue
                maps[node.out] = visible
                if _is_cheap(node):
                    cheap[node.out] = visible
        nodes.append(node)
    if not changed:
        return program
    return eliminate_dead_code(program.edited(nodes, inlined=inlined_names))


def _rounded(program: Program, stays: Collection[str]) -> set[str]:
    """Return the tensors that are stored in any case, rounded, and their copied operands.

    So are the operands of two products, one of which would compute them again.
    """
    products = [load.buffer for node in program.nodes if isinstance(node, Contract) for load in loads(*node.exprs)]
    rounded = {*stays, *(name for name, count in Counter(products).items() if count > 1)}
    for node in reversed(program.nodes):
        if not rounded.isdisjoint(writes(node)):
            rounded |= copies(node)
    return rounded


def _compared_back(program: Program) -> frozenset[str]:
    """Return the tensors that are compared with a result derived from them, by other nodes than maps."""
    node_of = {out: node for node in program.nodes for out in writes(node)}
    pairs = [
        args for node in program.nodes if not isinstance(node, (Extern, Chunked)) for args in compared(*node.exprs)
    ]
    tensors: set[str] = set()
    for args in pairs:
        sides = [{load.buffer for load in loads(arg)} for arg in args]
        for here, there in (sides, reversed(sides)):
            pending, seen = [*there], set[str]()
            while pending and not here <= seen:
                node = node_of.get(pending.pop())
                fresh = {name for name in reads(node) if name not in seen} if node is not None else set[str]()
                seen |= fresh
                pending += fresh
            tensors |= here & seen
    return frozenset(tensors)


class _Stored:
    """The maps that are stored anyway, and when.

    The age of a map is the number of products and calls on the longest path to it.

    Args:
        stays: the maps that are stored whatever the kernels.
    """

    def __init__(self, program: Program, stays: Collection[str]) -> None:
        self._wanted, self._finishing, self._age = set(stays), set[str](), dict[str, int]()
        self.inputs = {name for name in (*program.inputs, *program.constants) if isinstance(name, str)}
        self._stays, self._buffers, self._operands = set(stays), program.buffers, set(stays)
        points, products = dict[str, sympy.Expr](), set[str]()
        for node in program.nodes:
            step = isinstance(node, (Contract, Chunked)) or (isinstance(node, Extern) and not node.is_view)
            age = max((self._age.get(name, 0) for name in reads(node)), default=0) + step
            self._age.update(dict.fromkeys(writes(node), age))
            self._operands.update(name for name in reads(node) if self._age.get(name, -1) < age)
            if step:
                products.update(writes(node))
            if isinstance(node, (Extern, Chunked)):
                continue
            self._wanted.update(name for name in reads(node) if name in points and not _is_few(node, points[name]))
            if isinstance(node, Map):
                points[node.out] = _points(node)
                if node.out in stays and not products.isdisjoint(reads(node)):
                    self._finishing.add(node.out)  # usually by the kernel of the product

    def before(self, reader: str, name: str) -> bool:
        """Return whether the map `name` is stored before the node of `reader` can run."""
        return name in self._finishing or (name in self._wanted and self._age[name] < self._age[reader])

    def is_cheaper(self, reader: str, producer: Map) -> bool:
        """Return whether it moves fewer bytes to read the result of a map than its operands.

        The result is in memory when the reader runs.  An operand without other late readers would be stored, too.
        """
        if producer.out not in self._stays or self._age[producer.out] >= self._age[reader]:
            return False
        moved: sympy.Expr = sympy.Integer(0)
        points = _points(producer)
        for name in {load.buffer for load in loads(producer.expr)}:
            elements = sympy.Min(points, sympy.Mul(*self._buffers[name].shape))
            moved += elements * self._buffers[name].dtype.itemsize * (1 if name in self._operands else 2)
        return bool((moved - points * self._buffers[producer.out].dtype.itemsize).is_positive)


def _inlined_into(node: Compute, cheap: Mapping[str, Map], maps: Mapping[str, Map], stored: _Stored) -> dict[str, Map]:
    """Return the maps that are substituted into a node."""
    read = {name: cheap[name] for name in reads(node) if name in cheap}
    known = {
        name: producer
        for name, producer in read.items()
        if not stored.is_cheaper(node.out, producer) and not _is_repeated(node, producer)
    }
    return known | _read_at_few_points(node, maps, stored) | _of_few_bytes(node, maps, stored.inputs)


def _is_repeated(node: Compute, producer: Map) -> bool:
    """Return whether a node would evaluate each point of a costly map often, or nobody knows how often."""
    ratio = _points(node) / sympy.Max(1, _points(producer))
    return not (OFTEN - ratio).is_positive and cost(producer.expr) > FREE_OFTEN


def _of_few_bytes(node: Compute, maps: Mapping[str, Map], inputs: Set[str]) -> dict[str, Map]:
    """Return the maps of inputs that a reduction to one number computes itself, from operands in a cache.

    Then no kernel that computes them for others stands before it: the number of targets of a loss is known before its
    rows are read, which may use it.
    """
    if not isinstance(node, Reduce) or node.axes:
        return {}
    read = {name: maps[name] for name in reads(node) if name in maps and inputs >= {*reads(maps[name])}}
    return {name: producer for name, producer in read.items() if _is_small(producer)}


def _is_small(node: Map) -> bool:
    direct = not any(isinstance(index, Expr) for load in loads(node.expr) for index in load.index)
    size = _points(node) * sum(load.dtype.itemsize for load in loads(node.expr))
    return direct and bool(size.is_Integer and size <= CACHED) and cost(node.expr) <= FREE_SINGLE


def _read_at_few_points(node: Compute, maps: Mapping[str, Map], stored: _Stored) -> dict[str, Map]:
    """Return the maps of which a node reads few points, except maps that are stored before."""
    read = {name: maps[name] for name in reads(node) if name in maps and not stored.before(node.out, name)}
    return {name: producer for name, producer in read.items() if _is_few(node, _points(producer))}


def _points(node: Compute) -> sympy.Expr:
    """Return the number of points of a node's iteration space."""
    return sympy.Mul(*(axis.size for axis in (*node.axes, *node.over)))


def _is_few(node: Compute, total: sympy.Expr) -> bool:
    """Return whether a node has few points, compared with `total`."""
    points = FEWER_POINTS * _points(node)
    return bool(points.is_Integer and total.is_Integer and points <= total)


def inline(node: Compute, producers: dict[str, Map]) -> Compute:
    """Replace every load of one of `producers` in `node` by the producer's expression at that index.

    Conditions are simplified on the way: `~mask.tril()` becomes one comparison, which decides others.
    """
    if not any(load.buffer in producers for load in loads(*node.exprs)):
        return node
    sizes = axis_sizes(node)

    def rule(expr: Expr) -> Expr | None:
        if not (isinstance(expr, Load) and expr.buffer in producers):
            return simplify_step(expr, sizes)
        producer = producers[expr.buffer]
        at = {axis.symbol: index for axis, index in zip(producer.axes, expr.index, strict=True)}
        value = substitute(producer.expr, at, sizes)
        return value if expr.mask is None else guarded(value, expr.mask)

    return with_exprs(node, rewrite(node.exprs, rule))


def cost(*exprs: Expr, wide: float = 0) -> float:
    """Return the cost of evaluating expressions once, in additions, whatever the device; shared parts count once."""
    return sum(additions_of(part, wide=wide) for part in postorder(*exprs))


def _is_cheap(node: Map) -> bool:
    parts = postorder(node.expr)
    if any(isinstance(part, Random) for part in parts):
        return False
    reading = [part for part in parts if isinstance(part, Load)]
    work = cost(node.expr)
    if not reading:
        return cost(node.expr, wide=WIDE) <= FREE_LOADLESS
    if work <= FREE_SINGLE and _is_spread(node, reading):
        return True
    widened = any(part.dtype.itemsize > node.expr.dtype.itemsize for part in reading)
    casts_only = work == 0 and all(isinstance(part, (Load, Cast)) for part in parts)
    streamed = [load for load in reading if free_axes(load) or any(isinstance(at, Expr) for at in load.index)]
    return len(streamed) <= 1 and (casts_only or (work <= FREE_SINGLE and not widened))


def _is_spread(node: Map, reading: Sequence[Load]) -> bool:
    """Return whether `node` broadcasts: it stores at least as many bytes as it loads, each element once."""
    for load in reading:
        if load.mask is not None or any(isinstance(index, Expr) for index in load.index):
            return False
        within = free_axes(load)
        times = math.prod((axis.size for axis in node.axes if axis.symbol not in within), start=sympy.Integer(1))
        if times.is_Integer and times * node.expr.dtype.itemsize < len(reading) * load.dtype.itemsize:
            return False
    return True
