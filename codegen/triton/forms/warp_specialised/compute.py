"""Computes two products of one loop, such as attention, the first of them a block ahead of the second.

Input: a kernel that loops over the columns of one product, folds its rows, and multiplies their result again; output:
the function of the groups that compute.  Each computes a part of the rows of a block:

    fetch    q, then k and v of block 0, of block 1, …
    group    q·k₀ | softmax 0 | begin q·k₁, begin p₀·v₀ | wait for q·k₁ | softmax 1 | wait for p₀·v₀ | begin q·k₂ …

So the matrix units process one block while exponentials of the next one are computed, and other groups fill the
remaining gaps.  In Triton's own form both products of a block are awaited before its exponentials are computed.

The operations between the products (scales, masks, running folds) are written by the same `Values` and `running_folds`
as everywhere, in each part of the loop, and once before it for its first block, under the full condition.  Every row
has at least one block: where a condition holds nowhere, its scores are masked like others.

A slot of the first ring is released after `warpgroup_mma_wait(1)`: products of one group end in the order in which they
began, so that only the second one of the two may still be running.  A slot of the second ring, and the operand in
registers, are free after `warpgroup_mma_wait(0)`.  The rows of the first product are released after the last wait of
the loop.  The four warps of a group synchronise before each of these signals, which one thread sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fusion.codegen.interior import conditional, only_selection
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.expressions.code import PRODUCT, Code, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import expand
from fusion.codegen.triton.expressions.scalar_code import cast
from fusion.codegen.triton.expressions.scopes import Tile, Transfer
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.forms.warp_groups.functions import Function
from fusion.codegen.triton.forms.warp_groups.groups import GROUP
from fusion.codegen.triton.forms.warp_specialised import boxes
from fusion.codegen.triton.forms.warp_specialised.chain import factor_of
from fusion.codegen.triton.forms.warp_specialised.order import Order, order_of
from fusion.codegen.triton.forms.warp_specialised.program import (
    ADVANCE,
    BEHIND,
    RING,
    SCORES,
    STAGED,
    SUMS,
    WarpSpecialisedProgram,
)
from fusion.codegen.triton.forms.warp_specialised.tile_schedule import open_tile_loop
from fusion.codegen.triton.products import contract
from fusion.lowering.ir.kernel import Fold, Loop


@dataclass(frozen=True, slots=True)
class _Block:
    """The values computed from the scores of a block.

    Attributes:
        weights: the operand of the second product, in registers.
        factor: the factor of the carry of its sums.
        ends, later: the lines that end the block, and the functions that complete the folds after the loop.
    """

    weights: Code
    factor: Tile
    ends: tuple[Code, ...]
    later: tuple[Callable[[], None], ...]


class Compute:
    """Writes the function of the groups that compute."""

    def __init__(self, program: WarpSpecialisedProgram) -> None:
        self.program, self.layout, self.plan = program, program.layout, program.plan

    def functions(self, values: Values) -> list[Function]:
        """Return the functions of a group: for one block, and for all."""
        plan = self.plan
        for name, columns in ((SCORES, plan.n), (SUMS, plan.e)):
            instruction = compose("[16, {}, 16]", columns.constant)
            values.line("{}: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], {})", name, instruction)
        values.line("{} = {}.index({})", STAGED, "left" if plan.in_place else "out", GROUP)
        values.line("slot, phase, begun = 0, 0, 0")
        tiles = open_tile_loop(values, plan.m)
        order = order_of(values, plan.loop, plan.n)
        start = compose("{} + {} * ({})", values.starts[plan.m], GROUP, self.program.share, binds=PRODUCT)
        values.starts[plan.m] = values.name("m1", Tile(start, depth=values.depth)).code
        values.layout = replace(self.layout, parted=(plan.m,), parts=self.program.groups)
        values.row_layout = compose("gl.SliceLayout(1, {})", SCORES)
        body = Body(values)
        values.line("hopper.mbarrier.wait({}.index({}), {})", "left_filled", GROUP, "begun")
        values.line("begun ^= 1")
        later = self._loop(values, body, order)
        release = compose("hopper.mbarrier.arrive({}.index({}), count=1)", "left_emptied", GROUP)
        if not plan.in_place:
            values.line("{}", release)
        self._begin_second(values)
        self._end_second(values)
        sums = Tile(as_code("sums"), (plan.m, plan.e), values.depth)
        values.bind(plan.second.ref, replace(sums, code=cast(sums.code, torch.float32, plan.second.dtype)))
        for finish in later:
            finish()
        self._convert_rows(values)
        corner = boxes.corner(values, plan.result, values.starts[plan.m])
        matrix = plan.result.matrix
        values.store_through[matrix.param] = Transfer("out_desc", matrix.rows, matrix.columns, None, STAGED, corner)
        body.stores()
        if plan.in_place:  # the staged result is read from there
            values.line("hopper.tma.store_wait(0)")
            values.line("{}", release)
        takes = [GROUP, *self.program.compute_takes]
        block = self.program.end_tile_loop(values, tiles, "compute_block", [*takes, STAGED])
        values.line("hopper.tma.store_wait(0)")
        return [block, Function("compute", takes, values.scopes[0].lines, [GROUP, *self.program.signature.constants])]

    def _loop(self, values: Values, body: Body, order: Order) -> tuple[Callable[[], None], ...]:
        """Add the first block, then the others, part by part; return the functions that complete the folds after the
        loop.
        """
        plan = self.plan
        values.open("n0")
        if order.first != Code("0"):
            values.starts[plan.n] = order.first
        values.line("hopper.mbarrier.wait({}.index({}), {})", "right_filled", *RING)
        scores = values.fresh(plan.first.name, values.depth)
        values.line("{} = hopper.warpgroup_mma_wait(0, deps=({},))", scores, self._first())
        values.line("hopper.mbarrier.arrive({}.index({}), count=1)", "right_emptied", "slot")
        block = self._between(values, body, conditional(plan.loop), scores)
        shape = compose("[{}, {}]", self.program.share, plan.e.constant)
        values.line("weights = {}", block.weights)
        values.line("sums = gl.full({}, 0.0, gl.float32, {})", shape, SUMS)
        self._step(values, block)
        values.inline()
        for blocks in order.others:
            turn = self.program.open_block(values, order, blocks.start)
            values.full = frozenset({plan.n}) if blocks.part.full or blocks.conditional is not None else frozenset()
            values.line("hopper.mbarrier.wait({}.index({}), {})", "right_filled", *RING)
            scores = values.fresh(plan.first.name, values.depth)
            values.line("next_scores = {}", self._first())
            self._begin_second(values)
            values.line("{} = hopper.warpgroup_mma_wait(1, deps=(next_scores,))", scores)
            values.line("hopper.mbarrier.arrive({}.index({}), count=1)", "right_emptied", "slot")
            if blocks.conditional is not None:
                self._select_in(values, compose("{} < {}", turn, blocks.conditional))
            block = self._between(values, body, blocks.part.loop, scores)
            self._end_second(values)
            values.line("sums = sums * {}", self._factor(block.factor))
            values.line("weights = {}", block.weights)
            self._step(values, block)
            values.close("for {} in {}:", turn, blocks.header)
        values.full = frozenset()
        return block.later

    def _select_in(self, values: Values, blocks: Code) -> None:
        """Evaluate the loop's only selection in `blocks`; elsewhere, take the value of its `inside` branch.

        Points past the end of the loop's axis, which only these blocks have, are not selected.
        """
        plan, selection = self.plan, only_selection(self.plan.loop)
        assert selection is not None, "asked before"

        def emitted() -> Tile:
            del values.emitters[selection.node]
            tile = values.value(selection.inside)
            name = as_code(values.fresh("selected", values.depth))
            values.line("{} = {}", name, tile.code)
            values.open("inside")
            full, values.full, layout = values.full, frozenset(), values.layout
            values.layout = replace(layout, depth={**layout.depth, plan.n: values.depth})
            seen = values.value(selection.node)
            mask = values.masks((plan.n,))
            seen = seen if mask is None else values.select(mask, seen, values.value(selection.constant))
            values.line("{} = {}", name, seen.code)
            values.full, values.layout = full, layout
            values.close("if {}:", blocks)
            return replace(tile, code=name)

        values.emitters[selection.node] = emitted

    def _between(self, values: Values, body: Body, loop: Loop, name: str) -> _Block:
        """Add the operations on the scores of a block, which have this name."""
        plan = self.plan
        folds = [stmt for stmt in loop.body if isinstance(stmt, Fold)]
        first, second = folds[0], next(fold for fold in folds if fold.name == plan.second.name)
        scores = Tile(as_code(name), (plan.m, plan.n), values.depth)
        values.bind(first.ref, replace(scores, code=cast(scores.code, torch.float32, first.dtype)))
        others = [stmt for stmt in loop.body if stmt is not first and stmt is not second]
        later, ends = body.in_loop(loop, others)
        lhs = contract.operand(values, second.args[0], (plan.m, plan.n), plan.n, "lhs")
        factor = factor_of(second)
        assert factor is not None, "called for a kernel that is refused"
        tile = values.value(factor)
        return _Block(
            compose("gl.convert_layout({}, gl.DotOperandLayout(0, {}, 2))", lhs, SUMS), tile, tuple(ends), tuple(later)
        )

    def _first(self) -> Code:
        over_first = self.plan.right.matrix.rows is not self.plan.n
        operands = listed([self.program.slot("left", GROUP), self.program.slot("right", "slot")])
        return compose("{}({}, {}, {})", "_begin_product", operands, over_first, SCORES)

    def _begin_second(self, values: Values) -> None:
        other = self.program.slot("other", "behind")
        if self.plan.other.matrix.rows is not self.plan.n:
            other = compose("{}.permute((1, 0))", other)
        values.line("hopper.mbarrier.wait({}.index({}), {})", "other_filled", *BEHIND)
        values.line("next_sums = hopper.warpgroup_mma(weights, {}, sums, is_async=True)", other)

    def _end_second(self, values: Values) -> None:
        values.line("sums = hopper.warpgroup_mma_wait(0, deps=(next_sums,))")
        values.line("hopper.mbarrier.arrive({}.index({}), count=1)", "other_emptied", "behind")

    @property
    def _same_layout(self) -> bool:
        """Whether scores and sums have the same layout."""
        return self.layout.config.block(self.plan.e.name) == self.layout.config.block(self.plan.n.name)

    def _factor(self, tile: Tile) -> Code:
        """Return the factor of the carry, in the layout of the sums."""
        plan = self.plan
        if tile.dims != (plan.m,):
            return tile.code.at(PRODUCT + 1)
        rows = tile.code
        if not self._same_layout:
            rows = compose("gl.convert_layout({}, gl.SliceLayout(1, {}))", rows, SUMS)
        return expand(rows, tile.dims, (plan.m, plan.e))

    def _convert_rows(self, values: Values) -> None:
        """Convert numbers of each row to the layout of the sums, for the epilogue on both."""
        plan = self.plan
        if self._same_layout:
            return
        values.row_layout = compose("gl.SliceLayout(1, {})", SUMS)
        for stmt in plan.loop.body:
            known = values.find(stmt.ref) if isinstance(stmt, Fold) else None
            if known is not None and known.dims == (plan.m,):
                assert isinstance(stmt, Fold)
                code = compose("gl.convert_layout({}, {})", known.code, values.row_layout)
                values.bind(stmt.ref, values.name(stmt.name, replace(known, code=code, depth=values.depth)))
        values.forget(plan.m)

    def _step(self, values: Values, block: _Block) -> None:
        """End a block: the block whose first product was computed last gets its second product next."""
        for line in block.ends:
            values.line("{}", line)
        values.line("{}, {} = {}, {}", *BEHIND, *RING)
        values.line(ADVANCE, *RING, "_next_slot", self.layout.config.num_stages)
