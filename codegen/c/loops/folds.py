"""Accumulates folds: writes the declarations before their loops, the updates in them, and the results after them.

Two forms.  *Across* lanes: the lanes run along a folded axis, each lane has a partial result and these are combined at
the end.  Along a short axis OpenMP's `reduction` clause expresses that; the compiler keeps one register of partial
results: each addition waits for the one before it, and the lanes are added one by one.  Along other axes the partial
results are an array of several registers, whose halves are combined until one value is left.  *Per* lane: the lanes run
along an axis that the fold keeps, and the accumulators are an array with one element per lane.  Sums across few lanes,
inside a loop over another folded axis, are such an array too until that loop ends: adding the lanes takes longer than
filling them.

float32 sums are accumulated in chunks and the chunks in double, so that the error does not grow with the length;
eager's cascade of partial sums is no better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from fusion.codegen.c.plan.lanes import FEW_POINTS, FEWER_POINTS
from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.codegen.c.text.code import Code, element_of
from fusion.codegen.c.text.folds import NEVER, NanWatch, across_lanes, better, compared_as, sign, started, take
from fusion.codegen.c.text.nest import Extent, Level, Namespace
from fusion.codegen.c.text.storage import VALUE_TYPES
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.kernel import Fold, KernelAxis
from fusion.lowering.ir.scalar_ops import keeps_position

SHARES = 64
"""Partial results of one fold across lanes: eight registers of float32 with AVX2, to hide the latency of additions
(measured: docs/performance.md, `SHARES`)."""

SHARES_OF_EACH = 32
"""The same for each of several folds in one loop, which share the registers."""

EXTREME_SHARES = 32
"""Partial results of a maximum or minimum, each of which has a register that records NaN."""

FEW_SHARES = 32
"""Partial results of a fold along an axis of at most `SHORT_AXIS` points."""

SHORT_AXIS = 256
"""The longest axis with `FEW_SHARES`; shorter axes that are no multiple of it have one register."""

CHUNK_ACROSS = 512
"""Elements that are summed in float32 in one register of lanes: 32 in each lane, if it holds 16."""

CHUNK_PER_LANE = 16
"""Elements that are summed in float32 by one lane, or in one partial sum of an array: with 64 the error was 2.7 times
eager's."""

ARG_SHARES = 64
"""Candidates of an argmax across lanes."""

REPEATING = frozenset(("max", "min", "argmax", "argmin"))
"""Folds whose text repeats their arguments."""


@dataclass(frozen=True, slots=True)
class LoopLevels:
    """The loop levels at which the code of one fold is written.

    Attributes:
        outer: the level that holds the accumulators, just outside the first folded loop.
        part: the level just outside the innermost folded loop, or outside one chunk of it.
        inner: the innermost level.
        chunked: whether the folded elements exceed one run of the innermost folded loop.
        lanes: the extent of the accumulators' array, None for across lanes.
        cell: returns the array element for the result of each point of the kept axes; None for a scalar.
        shares: the number of partial results in arrays of a fold across lanes, `l` being the current one; None for a
            register.
        apart: the extent of lanes along a folded axis whose sums stay separate until the loops end.
    """

    outer: Level
    part: Level
    inner: Level
    chunked: bool
    lanes: Extent | None
    cell: Callable[[str], Code] | None
    shares: int | None = None
    apart: Extent | None = None


@dataclass(frozen=True, slots=True)
class FoldRuns:
    """The number of elements that the folds of a sweep accumulate before they combine partial results.

    Attributes:
        across: the lanes run along a folded axis.
        apart: each of these lanes accumulates separately until the loops end.
        shares: the number of partial results of folds across lanes, in arrays; None: one register.
        axis: the folded axis whose loop a run ends with; None if the sweep folds nothing.
        length: the number of elements of `axis` in a run; None: all.
        alone: one run has all elements, since the loops fold few.
    """

    across: bool
    apart: bool
    shares: int | None
    axis: KernelAxis | None
    length: int | None
    alone: bool


def runs_of(sweep: Sweep, folded: Sequence[KernelAxis], lane: KernelAxis | None) -> FoldRuns:
    """Return the runs of a sweep with scalar loops over the axes `folded`, outermost first, and lanes along `lane`."""
    across = lane is not None and lane.symbol in sweep.over
    apart = across and lane is not None and _keeps_apart(sweep, lane, folded)
    shared = across and not apart
    axis, run = (lane, 1) if shared else _chunked_axis(folded)
    shares = _shares(sweep, axis) if shared and axis is not None else None
    points = sympy.Mul(*(each.size for each in folded))
    one_run = not shared and points.is_Integer and bool(points <= CHUNK_PER_LANE)
    return FoldRuns(
        across, apart, shares, axis, _chunk_length(sweep, axis, across=shared, shares=shares, run=run), one_run
    )


def _keeps_apart(sweep: Sweep, lane: KernelAxis, folded: Sequence[KernelAxis]) -> bool:
    """Return whether lanes along a folded axis are too few to combine them in each iteration over `folded`."""
    few = bool(folded) and lane.size.is_Integer and bool(lane.size <= FEW_POINTS)
    return few and not sweep.scans and all(fold.op == "sum" for fold in sweep.folds)


def _chunked_axis(folded: Sequence[KernelAxis]) -> tuple[KernelAxis | None, int]:
    """Return the innermost of the folded axes, except for very short ones, and how many points these have."""
    run, rest = 1, list(folded)
    while len(rest) > 1 and rest[-1].size.is_Integer and run * rest[-1].size <= FEWER_POINTS:
        run *= int(rest.pop().size)
    return (rest[-1] if rest else None), run


def _shares(sweep: Sweep, lane: KernelAxis) -> int | None:
    """Return the number of partial results of a fold across lanes along `lane`; None: one register."""
    if any(keeps_position(fold.op) for fold in sweep.folds):
        return ARG_SHARES
    if sweep.scans:
        return None
    if lane.size.is_Integer and lane.size <= SHORT_AXIS:
        return FEW_SHARES if lane.size % FEW_SHARES == 0 else None
    if len(sweep.folds) > 1:
        return SHARES_OF_EACH
    return EXTREME_SHARES if sweep.folds[0].op in ("max", "min") else SHARES


def _chunk_length(sweep: Sweep, last: KernelAxis | None, *, across: bool, shares: int | None, run: int) -> int | None:
    """Return the number of elements of `last`, a folded axis, after which partial sums are combined; None: all.

    `run`: the number of elements folded for each of `last`.
    """
    if last is None or not any(fold.op == "sum" and VALUE_TYPES[fold.dtype] == "float" for fold in sweep.folds):
        return None
    most = shares * CHUNK_PER_LANE if shares else CHUNK_ACROSS if across else CHUNK_PER_LANE // run
    return None if last.size.is_Integer and last.size <= most else most


def write_fold(fold: Fold, args: Sequence[Code], place: LoopLevels, space: Namespace) -> Code:
    """Write the code of `fold` at its loop levels and return its result.

    `args` are of no narrow float type; those of `REPEATING` folds are names or literals.  `place.cell`, if given, is
    called with the C type of the accumulators and returns the element that holds them.

    Raises:
        BuildError: a fold that the C target does not know.
    """
    if keeps_position(fold.op):
        return _arg(fold, args, place, space)
    value = args[0]
    dtype = fold.args[0].dtype
    if dtype is torch.bool and fold.op in ("any", "max", "all", "min"):
        return _logical(fold, value, place, space)
    if fold.op == "sum":
        return _sum(fold, value, place, space)
    if fold.op == "prod":
        return _prod(fold, value, place, space)
    if fold.op in ("max", "min"):
        return _extreme(fold, value, place, space)
    raise BuildError(f"the C target does not know the fold {fold.op} of {dtype}")


def _start(held: str, name: str, first: Code, place: LoopLevels, level: Level) -> Code:
    """Declare accumulators with value `first` at `level`; return the accumulator of the current point."""
    if place.shares is not None:
        each = f"for (int l = 0; l < {place.shares}; l++)"
        level.before += [f"_Alignas(64) {held} {name}[{place.shares}];", f"{each} {name}[l] = {first};"]
        return element_of(name, "l")
    if place.lanes is None:
        level.before.append(f"{held} {name} = {first};")
        return Code(name)
    element = element_of(name, place.lanes.slot)
    if place.cell is not None and level is place.outer:
        element = place.cell(held)
    else:
        level.before.append(f"_Alignas(64) {held} {name}[{place.lanes.size}];")
    level.before.append(f"{place.lanes.header} {element} = {first};")
    return element


def _combined(fold: Fold, held: str, name: str, place: LoopLevels) -> str:
    """Return the accumulators `name` of all lanes along a folded axis as one."""
    if place.shares is not None:
        return f"{fold.op}_of_{held}({name}, {place.shares})"
    place.inner.clauses.append(across_lanes(fold, name))
    return name


def _finish(held: str, name: str, text: str, place: LoopLevels) -> Code:
    """Store `text`, the result across lanes, in its cell if there is one, else under a name."""
    if place.cell is not None:
        element = place.cell(held)
        place.outer.after.append(f"{element} = {text};")
        return element
    if text != name:
        place.outer.after.append(f"const {held} {name} = {text};")
    return Code(name)


def _folded(fold: Fold, held: str, step: Callable[[Code], str], place: LoopLevels, space: Namespace) -> Code:
    """Write a fold that combines lanes as it accumulates; `step`: returns the text that updates an accumulator."""
    name = space.exactly(fold.name)
    start = name if place.shares is None else space.exactly(f"{fold.name}_shares")
    total = _start(held, start, started(fold), place, place.outer)
    place.inner.before.append(f"{step(total)};")
    return total if place.lanes is not None else _finish(held, name, _combined(fold, held, start, place), place)


def _sum(fold: Fold, value: Code, place: LoopLevels, space: Namespace) -> Code:
    held = VALUE_TYPES[fold.dtype]
    chunked = held == "float" and place.chunked
    if place.apart is not None:
        per_lane = replace(place, lanes=place.apart, cell=None, apart=None)
        each = _chunked_sum(fold, value, per_lane, space)[1] if chunked else _plain_sum(fold, value, per_lane, space)
        wide = "double" if held == "float" else held
        name = space.fresh(f"{fold.name}_all")
        place.outer.after += [f"{wide} {name} = 0;", f"{place.apart.header} {name} += {each};"]
        text = name if wide == held else f"(float){name}"
        return _finish(held, text, text, place)
    if not chunked:
        return _plain_sum(fold, value, place, space)
    name, total = _chunked_sum(fold, value, place, space)
    text = f"(float){total}"
    return Code(text, unconditional=True) if place.lanes is not None else _finish("float", name, text, place)


def _plain_sum(fold: Fold, value: Code, place: LoopLevels, space: Namespace) -> Code:
    return _folded(fold, VALUE_TYPES[fold.dtype], lambda total: f"{total} += {value}", place, space)


def _chunked_sum(fold: Fold, value: Code, place: LoopLevels, space: Namespace) -> tuple[str, Code]:
    """Write a float32 sum whose chunks are added in double; return the name of the fold, and its total in double."""
    name = space.exactly(fold.name)
    total_name = name if place.lanes is not None else space.exactly(f"{fold.name}_total")
    part_name = space.exactly(f"{fold.name}_part")
    total = _start("double", total_name, Code("0.0"), replace(place, shares=None), place.outer)
    part = _start("float", part_name, Code("0.0f"), place, place.part)
    place.inner.before.append(f"{part} += {value};")
    if place.lanes is not None:
        place.part.after.append(f"{place.lanes.header} {total} += {part};")
    else:
        place.part.after.append(f"{total} += {_combined(fold, 'float', part_name, place)};")
    return name, total


def _prod(fold: Fold, value: Code, place: LoopLevels, space: Namespace) -> Code:
    return _folded(fold, VALUE_TYPES[fold.dtype], lambda total: f"{total} *= {value}", place, space)


def _logical(fold: Fold, value: Code, place: LoopLevels, space: Namespace) -> Code:
    held = "int" if place.lanes is None and place.shares is None else "uint8_t"
    return _folded(fold, held, lambda total: f"{total} {sign(fold)}= {value}", place, space)


def _extreme(fold: Fold, value: Code, place: LoopLevels, space: Namespace) -> Code:
    """Write max or min; across lanes NaN is noted separately, which leaves one instruction for the rest."""
    dtype = fold.dtype
    held = VALUE_TYPES[dtype]
    if place.lanes is not None or (place.shares is not None and not dtype.is_floating_point):
        return _folded(fold, held, lambda total: f"{total} = {fold.op}imum_{held}({value}, {total})", place, space)
    name = space.exactly(fold.name)
    start = name if place.shares is None else space.exactly(f"{fold.name}_shares")
    total = _start(held, start, started(fold), place, place.outer)
    place.inner.before.append(better(fold, total, value))
    result = name if place.shares is None else f"{fold.op}_of_{held}({start}, {place.shares})"
    if place.shares is None:
        place.inner.clauses.append(across_lanes(fold, name))
    if dtype.is_floating_point:
        watch = NanWatch(space.exactly(f"{fold.name}_nan"), held, place.shares)
        place.outer.before += watch.before
        place.inner.before.append(watch.look(value))
        place.inner.clauses += watch.clauses
        result = watch.result(result)
    if place.shares is None and result != name:
        place.outer.after.append(f"{name} = {result};")
        result = name
    return _finish(held, name, result, place)


def _arg(fold: Fold, args: Sequence[Code], place: LoopLevels, space: Namespace) -> Code:
    """Write argmax or argmin: the best value so far and its position; `takes_…` compares two."""
    dtype = fold.args[0].dtype
    value, index = args
    name = space.exactly(fold.name)
    best_name = space.exactly(f"{fold.name}_best")
    best = _start(compared_as(dtype), best_name, started(fold, dtype), replace(place, cell=None), place.outer)
    if place.shares is None:
        at = _start("int64_t", name, NEVER, place, place.outer)
    else:
        shares_name = space.exactly(f"{fold.name}_shares")
        at = _start("int64_t", shares_name, NEVER, place, place.outer)
        joined = f"{fold.op}_of_{compared_as(dtype)}({best_name}, {shares_name}, {place.shares})"
        place.outer.after.append(f"const int64_t {name} = {joined};")
    place.inner.before += take(fold, space.fresh("take"), value, index, best, at)
    return at if place.lanes is not None else _finish("int64_t", name, name, place)
