"""Represents the loops of one sweep, which the parts of this package fill with statements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from fusion.codegen.c.loops.folds import FoldRuns
from fusion.codegen.c.loops.transposed_stores import Tiles
from fusion.codegen.c.plan.loop_fusion import Sweep
from fusion.codegen.c.text.nest import Extent, Level
from fusion.lowering.ir.expr import Expr
from fusion.lowering.ir.kernel import KernelAxis


@dataclass(frozen=True, slots=True)
class SweepPiece:
    """A sweep over some of its lanes.

    Attributes:
        lanes: their extent; None: all of them.
        lines: declare the ends of that extent, which may be empty: where this piece meets one block of lanes.
    """

    sweep: Sweep
    lanes: Extent | None = None
    lines: Sequence[str] = ()

    @property
    def condition(self) -> str:
        """The condition under which there are any lanes; empty if there always are."""
        return f"{self.lanes.start} < {self.lanes.end}" if self.lanes is not None and self.lines else ""


@dataclass(frozen=True, slots=True)
class SweepNest:
    """The loops of one sweep.

    Attributes:
        depth: axis → its level.
        outer, part, chunked: see `folds.LoopLevels`.
        lane: the axis of the lanes, if there are any.
        runs: how the folds accumulate.
        kept: axes of scalar loops that no fold reduces.
        tiles: the tiles of stores that are transposed.
        steps: the loop over steps of as many lanes as `runs` has shares, and the start of the current step.
        condition: where it is false, the innermost loop does nothing.
    """

    levels: list[Level]
    depth: dict[sympy.Symbol, int]
    outer: Level
    part: Level
    chunked: bool
    lane: KernelAxis | None
    runs: FoldRuns
    kept: tuple[KernelAxis, ...]
    tiles: Tiles | None = None
    steps: tuple[Level, str] | None = None
    condition: Expr | None = None

    @property
    def lanes_are_innermost(self) -> bool:
        """Whether the loop of the lanes is the innermost."""
        return self.lane is not None and self.depth[self.lane.symbol] == len(self.levels) - 1
