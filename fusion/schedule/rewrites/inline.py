"""Inlines maps that cost less to recompute than to store into their readers.

`Program → Program`.  A map that loads nothing (a mask made of indices, a constant), only converts, moves or lightly
changes one other tensor, or combines vectors to something larger (a mask of equal documents) is substituted into every
generated reader; any map is, into one that looks at few of its points (the loss of a class, among the probabilities of
all), unless it is stored in any case, of a product, or before one that the reader waits for: to read what it was made
of would keep that alive, back to the first layer of a model whose last one looks at one position.  It stays a node
only where an extern or the caller needs the tensor itself, or where a library may be called with it: an operand is
taken into a contraction by `growth.py`, if that pays.  Whoever reads through such a node, or through what it
copies, rounds as the tensor is rounded, so that all see the same numbers.  What is compared with something that was
made of it stays a node where it may differ from itself in the last bit (`lowering/last_bits.py`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import sympy

from fusion.lowering.chunks import Chunked
from fusion.lowering.expr import Cast, Expr, Load, Op, Random, as_stored, free_axes, guarded, loads, postorder, rewrite
from fusion.lowering.indexing import substitute
from fusion.lowering.last_bits import compared, may_differ
from fusion.lowering.live import without_dead_nodes
from fusion.lowering.positions import simplify_step
from fusion.lowering.program import (
    Compute,
    Contract,
    Extern,
    Map,
    Node,
    Program,
    axis_sizes,
    copies,
    reads,
    with_exprs,
    writes,
)
from fusion.lowering.scalar_ops import SCALAR_OPS

FREE_LOADLESS, FREE_SINGLE = 40, 4
"""How costly a map may be (in additions) to be recomputed by all readers: without any load, and with one."""

RANDOM = 60
"""What drawing a number costs, in additions: more than all readers may compute, so that it is drawn once."""

FEW = 64
"""A reader with this many times fewer points than a map computes the ones it needs itself."""


def inline_cheap_maps(program: Program) -> Program:
    """The program with cheap maps substituted into their readers; the same object when there are none."""
    cheap: dict[str, Map] = {}
    maps: dict[str, Map] = {}
    nodes: list[Node] = []
    taken_in: dict[str, tuple[str, ...]] = dict(program.inlined)
    changed = False
    stays = program.output_names().union(
        *(reads(node) for node in program.nodes if isinstance(node, (Extern, Chunked)))
    )
    stored, compared_back, rounded = _Stored(program, stays), _compared_back(program), _rounded(program, stays)
    for node in program.nodes:
        if not isinstance(node, (Extern, Chunked)) and node.out not in program.library:
            while (inlined := inline(node, known := {**cheap, **_seen_at_few_points(node, maps, stored)})) is not node:
                changed = True
                read = [load.buffer for load in loads(*node.exprs) if load.buffer in known]
                names = (name for buffer in read for name in (*taken_in.get(buffer, ()), buffer))
                taken_in[node.out] = tuple(dict.fromkeys((*taken_in.get(node.out, ()), *names)))
                node = inlined
            if isinstance(node, Map) and not any(isinstance(part, Random) for part in postorder(node.expr)):
                seen = replace(node, expr=as_stored(node.expr)) if node.out in rounded else node
                if node.out in compared_back and may_differ(node.expr):
                    nodes.append(node)
                    continue
                maps[node.out] = seen
                if _is_cheap(node):
                    cheap[node.out] = seen
        nodes.append(node)
    if not changed:
        return program
    return without_dead_nodes(program.edited(nodes, inlined=taken_in))


def _rounded(program: Program, stays: Collection[str]) -> set[str]:
    """The tensors that are stored in any case, rounded, and those that they copy."""
    found = set(stays)
    for node in reversed(program.nodes):
        if not found.isdisjoint(writes(node)):
            found |= copies(node)
    return found


def _compared_back(program: Program) -> frozenset[str]:
    """The tensors that are compared with something that was made of them, by other than maps."""
    made = {out: node for node in program.nodes for out in writes(node)}
    pairs = [
        args for node in program.nodes if not isinstance(node, (Extern, Chunked)) for args in compared(*node.exprs)
    ]
    found: set[str] = set()
    for args in pairs:
        sides = [{load.buffer for load in loads(arg)} for arg in args]
        for here, there in (sides, reversed(sides)):
            pending, seen = [*there], set[str]()
            while pending and not here <= seen:
                node = made.get(pending.pop())
                fresh = {name for name in reads(node) if name not in seen} if node is not None else set[str]()
                seen |= fresh
                pending += fresh
            found |= here & seen
    return frozenset(found)


class _Stored:
    """The maps that are stored in any case, and when.

    A map is as old as the products and calls on the longest way to it are many.

    Args:
        stays: what is stored, whatever kernels there are.
    """

    def __init__(self, program: Program, stays: Collection[str]) -> None:
        self._wanted, self._finishing, self._age = set(stays), set[str](), dict[str, int]()
        points, products = dict[str, sympy.Expr](), set[str]()
        for node in program.nodes:
            step = isinstance(node, (Contract, Chunked)) or (isinstance(node, Extern) and not node.is_view)
            age = max((self._age.get(name, 0) for name in reads(node)), default=0) + step
            self._age.update(dict.fromkeys(writes(node), age))
            if step:
                products.update(writes(node))
            if isinstance(node, (Extern, Chunked)):
                continue
            self._wanted.update(name for name in reads(node) if name in points and not _is_few(node, points[name]))
            if isinstance(node, Map):
                points[node.out] = _points(node)
                if node.out in stays and not products.isdisjoint(reads(node)):
                    self._finishing.add(node.out)  # in the kernel of the product, as a rule

    def before(self, reader: str, made: str) -> bool:
        """Is the map `made` stored when what makes `reader` can run?"""
        return made in self._finishing or (made in self._wanted and self._age[made] < self._age[reader])


def _seen_at_few_points(node: Compute, maps: Mapping[str, Map], stored: _Stored) -> dict[str, Map]:
    """The maps of which a node reads few points, but for those that it finds stored."""
    read = {name: maps[name] for name in reads(node) if name in maps and not stored.before(node.out, name)}
    return {name: made for name, made in read.items() if _is_few(node, _points(made))}


def _points(node: Compute) -> sympy.Expr:
    """How many points a node walks."""
    return sympy.Mul(*(axis.size for axis in (*node.axes, *node.over)))


def _is_few(node: Compute, whole: sympy.Expr) -> bool:
    """Does a node walk few points, compared with `whole`?"""
    points = FEW * _points(node)
    return bool(points.is_Integer and whole.is_Integer and points <= whole)


def inline(node: Compute, producers: dict[str, Map]) -> Compute:
    """`node` with every load of one of `producers` replaced by the producer's expression at that index.

    Conditions are made plain on the way: `~mask.tril()` is one comparison, of which others see what it leaves out.
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


def cost(*exprs: Expr) -> int:
    """The work of evaluating expressions once, in additions; shared parts count once."""
    total = 0
    for expr in postorder(*exprs):
        if isinstance(expr, Op):
            total += SCALAR_OPS[expr.name].cost
        elif isinstance(expr, Random):
            total += RANDOM
    return total


def _is_cheap(node: Map) -> bool:
    parts = postorder(node.expr)
    if any(isinstance(part, Random) for part in parts):
        return False
    reading = [part for part in parts if isinstance(part, Load)]
    work = cost(node.expr)
    if not reading:
        return work <= FREE_LOADLESS
    if work <= FREE_SINGLE and _is_spread(node, reading):
        return True
    widened = any(part.dtype.itemsize > node.expr.dtype.itemsize for part in reading)
    casts_only = work == 0 and all(isinstance(part, (Load, Cast)) for part in parts)
    return len(reading) == 1 and (casts_only or (work <= FREE_SINGLE and not widened))


def _is_spread(node: Map, reading: Sequence[Load]) -> bool:
    """Does `node` make much of little: does it store at least as many bytes as it loads, each element once?"""
    for load in reading:
        if load.mask is not None or any(isinstance(index, Expr) for index in load.index):
            return False
        within = free_axes(load)
        times = math.prod((axis.size for axis in node.axes if axis.symbol not in within), start=sympy.Integer(1))
        if times.is_Integer and times * node.expr.dtype.itemsize < len(reading) * load.dtype.itemsize:
            return False
    return True
