"""From a cluster to a Kernel: axes get their roles, folds and stores their loops, and everything its canonical name.

Two clusters that compute the same give equal Kernels, however their buffers were called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from codegen.target import Capabilities
from fusion.schedule.axes import accesses_of, drop_ones, indices_of, merge, order_by_stride, replace_in
from fusion.schedule.expand import FLAT, Expanded, Write, expand
from fusion.schedule.graph import Dependences
from fusion.schedule.legality import Cluster
from fusion.schedule.profit import Prices
from fusion.schedule.streams.pull import HELD
from fusion.schedule.streams.walks import follow, replaced, walk
from lowering.errors import Origin
from lowering.expr import Expr, Index, Load, free_axes, postorder, rewrite
from lowering.indexing import axis_symbol, over_symbol, simplify
from lowering.kernel import (
    Fold,
    Kernel,
    KernelAxis,
    Loop,
    Param,
    Prefix,
    Role,
    Stmt,
    Store,
    statements,
    values_of,
    with_values,
)
from lowering.prefixes import named, placed
from lowering.program import Axis, Contract, Scatter
from lowering.value import contiguous_strides


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One launch: the kernel, the buffers and sizes it is called with, and what it does for the report.

    `written` are the buffers that it allocates, `over` says of others in the memory of which operand they are written.
    """

    kernel: Kernel
    buffers: tuple[str, ...]
    written: tuple[str, ...]
    origins: tuple[Origin, ...]
    bytes_read: int
    bytes_written: int
    flops: int
    over: Mapping[str, str] = field(default_factory=dict)


def kernel_of(prices: Prices, cluster: Cluster) -> KernelCall:
    """Build the kernel of one cluster of computed nodes."""
    dependences, capabilities = prices.dependences, prices.capabilities
    expanded = expand(dependences, cluster)
    if cluster.space.streamed:
        axes, body = _streamed(cluster, expanded)
        return _finish(prices, cluster, axes, body, expanded)
    parallel, reduced, expanded = _settle_axes(cluster, expanded)
    role = _role(capabilities, expanded, cluster, reduced)
    parallel, reduced, expanded = _canonical_axes(parallel, reduced, expanded)
    body = _body(expanded, parallel, reduced, role, follows=capabilities.follows)
    axes = (
        *(KernelAxis(axis.symbol, axis.size, Role.GRID) for axis in parallel),
        *(KernelAxis(axis.symbol, axis.size, role) for axis in reduced),
    )
    return _finish(prices, cluster, axes, body, expanded)


# Axes ---------------------------------------------------------------------------------------------------------------


def _settle_axes(cluster: Cluster, expanded: Expanded) -> tuple[tuple[Axis, ...], tuple[Axis, ...], Expanded]:
    parallel, reduced = cluster.space.parallel, cluster.space.reduced
    if cluster.space.rigid:
        return parallel, reduced, expanded
    parallel, ones = drop_ones(parallel)
    reduced, more_ones = drop_ones(reduced)
    if cluster.space.reduced and not reduced:  # a fold over one element is still a fold
        reduced = cluster.space.reduced[-1:]
        more_ones.pop(reduced[0].symbol)
    expanded = _change(expanded, {**ones, **more_ones}, parallel, reduced)
    values = (*expanded.values, *expanded.found)
    offsets = [write.offset for write in expanded.writes if not isinstance(write.offset, Expr)]
    accesses = [*offsets, *accesses_of(values)]
    parallel = order_by_stride(parallel, accesses)
    reduced = order_by_stride(reduced, accesses_of(values))
    indices = [*offsets, *indices_of(values), *_points(expanded, parallel)]
    parallel, change = merge(parallel, indices)
    expanded = _change(expanded, change, parallel, reduced)
    values = (*expanded.values, *expanded.found)
    offsets = [write.offset for write in expanded.writes if not isinstance(write.offset, Expr)]
    reduced, change = merge(reduced, [*offsets, *indices_of(values), *_points(expanded, reduced)])
    expanded = _change(expanded, change, parallel, reduced)
    over = tuple(axis.symbol for axis in reduced)
    return parallel, reduced, replace(expanded, folds=tuple(replace(fold, over=over) for fold in expanded.folds))


def _points(expanded: Expanded, axes: Sequence[Axis]) -> list[sympy.Expr]:
    """For each scatter the number of its point along the `axes` that it runs over, row by row."""
    found: list[sympy.Expr] = []
    for write in expanded.writes:
        symbols = {symbol for point in write.points or () for symbol in point.free_symbols}
        own = [axis for axis in axes if axis.symbol in symbols]
        strides = contiguous_strides(tuple(axis.size for axis in own))
        found.append(sympy.Add(*(axis.symbol * stride for axis, stride in zip(own, strides, strict=True))))
    return found


def _change(
    expanded: Expanded, change: Mapping[sympy.Symbol, sympy.Expr], parallel: Sequence[Axis], reduced: Sequence[Axis]
) -> Expanded:
    """Replace axes everywhere."""
    if not change:
        return expanded
    sizes = {axis.symbol: axis.size for axis in (*parallel, *reduced)}
    roots, offsets = replace_in(expanded.values, [write.offset for write in expanded.writes], change, sizes)
    rest = iter(roots)
    folds = tuple(replace(fold, args=tuple(next(rest) for _ in fold.args)) for fold in expanded.folds)
    prefixes = tuple(replace(scan, args=tuple(next(rest) for _ in scan.args)) for scan in expanded.prefixes)
    values = [next(rest) for _ in expanded.writes]
    writes = tuple(
        replace(
            write,
            offset=offset,
            value=value,
            points=None if write.points is None else tuple(simplify(p.xreplace(change), sizes) for p in write.points),
            where=None if write.where is None else next(rest),
        )
        for write, offset, value in zip(expanded.writes, offsets, values, strict=True)
    )
    return Expanded(folds, writes, prefixes)


def _canonical_axes(
    parallel: Sequence[Axis], reduced: Sequence[Axis], expanded: Expanded
) -> tuple[tuple[Axis, ...], tuple[Axis, ...], Expanded]:
    """Axes renamed `i0, i1, …` and `r0, r1, …` in order."""
    new_parallel = tuple(Axis(axis_symbol(k), axis.size) for k, axis in enumerate(parallel))
    new_reduced = tuple(Axis(over_symbol(k), axis.size) for k, axis in enumerate(reduced))
    pairs = zip((*parallel, *reduced), (*new_parallel, *new_reduced), strict=True)
    names = {old.symbol: new.symbol for old, new in pairs if old.symbol != new.symbol}
    expanded = _change(expanded, names, new_parallel, new_reduced)

    known = {axis.symbol for axis in (*parallel, *reduced)}

    def renamed(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(names.get(symbol, symbol) for symbol in symbols if symbol in known)  # others had size 1

    folds = tuple(
        replace(fold, over=renamed(fold.over), rows=renamed(fold.rows), columns=renamed(fold.columns))
        for fold in expanded.folds
    )
    prefixes = tuple(replace(scan, along=names.get(scan.along, scan.along)) for scan in expanded.prefixes)
    return new_parallel, new_reduced, replace(expanded, folds=folds, prefixes=prefixes)


def _role(capabilities: Capabilities, expanded: Expanded, cluster: Cluster, reduced: Sequence[Axis]) -> Role:
    length = sympy.Mul(*(axis.size for axis in reduced))
    if capabilities.ordered and any(write.points is not None for write in expanded.writes):
        return Role.LOOP
    if cluster.space.rigid or not length.is_Integer or length > capabilities.whole_limit:
        return Role.LOOP
    return Role.WHOLE


# Statements ---------------------------------------------------------------------------------------------------------


def _streamed(cluster: Cluster, expanded: Expanded) -> tuple[tuple[KernelAxis, ...], tuple[Stmt, ...]]:
    """The axes and the body of a kernel that makes tiles and walks them at once."""
    space = cluster.space
    grid, more = drop_ones([axis for axis in space.parallel if axis.symbol not in space.held])
    inner = (*space.reduced, *space.private, *(axis for axis in space.parallel if axis.symbol in space.held))
    same = _one_axis(expanded, inner[len(space.reduced) :])
    expanded = _called(_change(expanded, {**more, **same}, grid, inner), same)
    inner = tuple(axis for axis in inner if axis.symbol not in same)
    kept = sum(axis.symbol not in same for axis in space.private)
    grid, inner, expanded = _canonical_axes(grid, inner, expanded)
    walked = inner[: len(space.reduced)]
    private = inner[len(walked) : len(walked) + kept]
    long = tuple(axis for axis in private if not axis.size.is_Integer or axis.size > HELD)
    loops = {axis.symbol for axis in (*walked, *long)}
    axes = (
        *(KernelAxis(axis.symbol, axis.size, Role.GRID) for axis in grid),
        *(KernelAxis(axis.symbol, axis.size, Role.LOOP if axis.symbol in loops else Role.WHOLE) for axis in inner),
    )
    body = walk(expanded, [axis.symbol for axis in walked], [axis.symbol for axis in long])
    assert not isinstance(body, str), f"a stream that does not run in one walk was not refused: {body}"
    return axes, body


def _one_axis(expanded: Expanded, axes: Sequence[Axis]) -> dict[sympy.Symbol, sympy.Symbol]:
    """Axes to be called by the name of another one, so that folds which read the same tile load it once.

    The columns of one contraction may be what another one runs over, as long as no fold knows both.
    """
    roots = [*(arg for fold in expanded.folds for arg in fold.args)]
    found: dict[sympy.Symbol, sympy.Symbol] = {}
    together = [free_axes(*fold.args).union(fold.over, fold.rows, fold.columns) for fold in expanded.folds]
    loaded = {node for node in postorder(*roots) if isinstance(node, Load)}
    for k, axis in enumerate(axes):
        for other in axes[k + 1 :]:
            taken = axis.symbol in found or other.symbol in found or axis.symbol in found.values()
            if taken or axis.size != other.size or any({axis.symbol, other.symbol} <= known for known in together):
                continue
            renamed = {load for load in loaded if other.symbol in free_axes(load)}
            moved = {Load(n.buffer, tuple(_renamed(i, other, axis) for i in n.index), n.dtype, n.mask) for n in renamed}
            if moved & loaded:
                found[other.symbol] = axis.symbol
    return found


def _called(expanded: Expanded, names: Mapping[sympy.Symbol, sympy.Symbol]) -> Expanded:
    """`expanded` with other names for what its folds run over and keep."""

    def called(symbols: tuple[sympy.Symbol, ...]) -> tuple[sympy.Symbol, ...]:
        return tuple(dict.fromkeys(names.get(symbol, symbol) for symbol in symbols))

    folds = (
        replace(fold, over=called(fold.over), rows=called(fold.rows), columns=called(fold.columns))
        for fold in expanded.folds
    )
    return replace(expanded, folds=tuple(folds))


def _renamed(index: Index, old: Axis, new: Axis) -> Index:
    return index if isinstance(index, Expr) else index.xreplace({old.symbol: new.symbol})


def _body(
    expanded: Expanded, parallel: Sequence[Axis], reduced: Sequence[Axis], role: Role, *, follows: bool
) -> tuple[Stmt, ...]:
    stores = [_store(write, (*parallel, *reduced)) for write in expanded.writes]
    over = tuple(axis.symbol for axis in reduced)
    if role is Role.WHOLE or not reduced:
        return placed((*expanded.folds, *stores), expanded.prefixes)
    if expanded.prefixes or not follows:
        return _walk_by_walk(expanded.folds, stores, over, expanded.prefixes)
    return _looped(expanded.folds, stores, over)


def _store(write: Write, axes: Sequence[Axis]) -> Store:
    if write.points is None:
        return Store(write.buffer, write.offset, write.value)
    walked = {symbol for point in write.points for symbol in point.free_symbols} & {axis.symbol for axis in axes}
    own = tuple(sorted(walked, key=str))
    return Store(write.buffer, write.offset, write.value, write.op, own, write.where)


def _stored_at(store: Store) -> set[sympy.Symbol]:
    """The axes at whose points a store happens."""
    return _symbols(store.offset) if store.axes is None else set(store.axes)


def _looped(folds: Sequence[Fold], stores: Sequence[Store], over: tuple[sympy.Symbol, ...]) -> tuple[Stmt, ...]:
    """As few walks as will do: one for all folds where the online rule holds, then one for what is written whole."""
    followed = follow(folds, over, ()) if len(folds) > 1 else "nothing to follow"
    if isinstance(followed, str):
        return _walk_by_walk(folds, stores, over)
    after = [with_values(store, replaced(values_of(store), followed.results)) for store in stores]
    whole = [store for store in after if set(over) & _stored_at(store)]
    rows = [store for store in after if store not in whole]
    return (Loop(over, followed.body), *rows, *([Loop(over, tuple(whole))] if whole else []))


def _walk_by_walk(
    folds: Sequence[Fold],
    stores: Sequence[Store],
    over: tuple[sympy.Symbol, ...],
    prefixes: Sequence[Prefix] = (),
) -> tuple[Stmt, ...]:
    """One walk per level of dependence between folds; a store joins the first walk that follows all it needs."""
    level: dict[str, int] = {}
    scans = {prefix.name: prefix for prefix in prefixes}
    loops: dict[int, list[Stmt]] = {}
    after: dict[int, list[Stmt]] = {}

    def needs(*values: Expr) -> int:
        return max((level[name] for name in named(values, scans) if name not in scans), default=0)

    for fold in folds:
        level[fold.name] = needs(*fold.args) + 1
        loops.setdefault(level[fold.name], []).append(fold)
    for store in stores:
        ready = needs(*values_of(store))
        walked = set(over) & _stored_at(store)
        if walked:
            loops.setdefault(ready + 1, []).append(store)
        else:
            after.setdefault(ready, []).append(store)
    body: list[Stmt] = list(after.get(0, ()))
    for k in sorted({*loops, *after} - {0}):
        if k in loops:
            body.append(Loop(over, tuple(loops[k])))
        body.extend(after.get(k, ()))
    return placed(body, prefixes)


def _symbols(offset: sympy.Expr | Expr) -> set[sympy.Symbol]:
    exprs = indices_of([offset]) if isinstance(offset, Expr) else [offset]
    return {symbol for expr in exprs for symbol in expr.free_symbols}


# Names and parameters -----------------------------------------------------------------------------------------------


def _finish(
    prices: Prices,
    cluster: Cluster,
    axes: tuple[KernelAxis, ...],
    body: tuple[Stmt, ...],
    expanded: Expanded,
) -> KernelCall:
    dependences = prices.dependences
    program = dependences.program
    over = _destinations(dependences, cluster)
    written = list(dict.fromkeys(over.get(write.buffer, write.buffer) for write in expanded.writes))
    roots = [value for stmt in statements(body) for value in values_of(stmt)]
    loaded = dict.fromkeys(node.buffer for node in postorder(*roots) if isinstance(node, Load))
    read = [name.removeprefix(FLAT) for name in loaded]
    names = {name: f"in{k}" for k, name in enumerate(loaded)} | {name: f"out{k}" for k, name in enumerate(written)}
    params = []
    for name, param in zip((*read, *written), names.values(), strict=True):
        buffer = program.buffers[name]
        params.append(Param(param, buffer.dtype, buffer.shape, buffer.strides, name in written))
    body = rename(body, {**names, **{out: names[start] for out, start in over.items()}})
    names_of = (name for m in cluster.members for name in program.made_of(dependences.compute(m).out))
    origins = tuple(dict.fromkeys(program.origins[name] for name in names_of))
    own = {axis.symbol for axis in axes}
    used = {symbol for index in indices_of(roots) for symbol in index.free_symbols}
    used |= {symbol for stmt in statements(body) if isinstance(stmt, Store) for symbol in _symbols(stmt.offset)}
    used |= {symbol for axis in axes for symbol in axis.size.free_symbols}
    sizes = tuple(sorted(used - own, key=str))
    kernel = Kernel(_name(dependences, cluster), tuple(params), sizes, axes, body, origins=tuple(map(str, origins)))
    reads_bytes, written_bytes = prices.traffic(cluster)
    return KernelCall(
        kernel,
        (*read, *written),
        tuple(name for name in written if name not in over.values()),
        origins,
        reads_bytes,
        written_bytes,
        prices.flops(cluster),
        over,
    )


def _destinations(dependences: Dependences, cluster: Cluster) -> dict[str, str]:
    """What is scattered, and in the memory of which tensor from before this kernel."""
    found: dict[str, str] = {}
    for node in map(dependences.compute, cluster.members):
        if isinstance(node, Scatter):
            found[node.out] = found.get(node.start, node.start)
    return found


def rename(body: Sequence[Stmt], names: Mapping[str, str]) -> tuple[Stmt, ...]:
    """The statements with other buffer names."""

    def rule(node: Expr) -> Expr | None:
        return Load(names[node.buffer], node.index, node.dtype, node.mask) if isinstance(node, Load) else None

    def value(expr: Expr) -> Expr:
        return rewrite([expr], rule)[0]

    result: list[Stmt] = []
    for stmt in body:
        if isinstance(stmt, Loop):
            where = None if stmt.where is None else value(stmt.where)
            result.append(Loop(stmt.axes, rename(stmt.body, names), where))
        elif isinstance(stmt, Prefix):
            result.append(replace(stmt, args=tuple(rewrite(stmt.args, rule))))
        elif isinstance(stmt, Fold):
            carry = None if stmt.carry is None else value(stmt.carry)
            result.append(replace(stmt, args=tuple(rewrite(stmt.args, rule)), carry=carry))
        else:
            result.append(replace(with_values(stmt, rewrite(values_of(stmt), rule)), param=names[stmt.param]))
    return tuple(result)


def _name(dependences: Dependences, cluster: Cluster) -> str:
    """The operations inside, in order and each once: `addmm_gelu`, `amax_sub_exp_sum_div`."""
    words: dict[str, None] = {}
    for member in cluster.members:
        node = dependences.compute(member)
        for name in dependences.program.made_of(node.out):
            word = "matmul" if isinstance(node, Contract) else re.sub(r"(_\d+)+$", "", name)
            words[re.sub(r"\W", "_", word).strip("_") or "map"] = None
    picked = list(words)
    if len(picked) > 5:
        picked = [*picked[:3], *picked[-2:]]
    return "_".join(picked)


__all__ = ["KernelCall", "kernel_of", "rename"]
