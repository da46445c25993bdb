"""Emits the program of two products in one loop, such as attention, the first of them a block ahead of the second.

Input: a kernel that loops over the columns of one product, folds its rows, and multiplies their result again; output:
the lines of a program of `groups`.  Each group computes a part of the rows of a block:

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.expressions.code import PRODUCT, Code, Operand, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout, expand
from fusion.codegen.triton.expressions.prelude import LOAD
from fusion.codegen.triton.expressions.scalar_code import cast
from fusion.codegen.triton.expressions.scopes import Tile, Transfer
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.forms.warp_specialised import boxes, groups
from fusion.codegen.triton.forms.warp_specialised.boxes import Box
from fusion.codegen.triton.forms.warp_specialised.chain import Chain, factor_of
from fusion.codegen.triton.forms.warp_specialised.functions import Function, split_off
from fusion.codegen.triton.forms.warp_specialised.groups import GROUP, Signature, groups_of
from fusion.codegen.triton.forms.warp_specialised.order import Order, order_of
from fusion.codegen.triton.forms.warp_specialised.turns import Turns, open_turns
from fusion.codegen.triton.products import contract
from fusion.codegen.triton.rewrites.interior import conditional, only_selection
from fusion.lowering.kernel import Fold, Loop

_SCORES, _SUMS, _STAGED = "SCORES", "SUMS", "staged"
_RING = ("slot", "phase")
_BEHIND = ("behind", "behind_phase")
_ADVANCE = "{0}, {1} = {2}({0}, {1}, {3})"
_CARRIED = (*_RING, "begun")
"""Variables that a program carries from block to block."""

_NAMES = (*_CARRIED, *_BEHIND, "weights", "next_scores", "next_sums", "sums")


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


class Program:
    """Writes the functions of one kernel."""

    def __init__(self, layout: Layout, plan: Chain, signature: Signature) -> None:
        self.layout, self.signature, self.plan = layout, signature, plan
        self.groups = groups_of(layout.config)
        self.share = compose("{} // {}", plan.m.constant, self.groups)

    @property
    def rings(self) -> list[str]:
        """Return the names of the loaded operands: both of the first product, then the second operand of the second
        one.
        """
        return ["left", "right", "other"]

    @property
    def staging(self) -> list[str]:
        """Return the names of the slots from which results are stored, where these have separate slots."""
        return [] if self.plan.in_place else ["out"]

    @property
    def barriers(self) -> list[str]:
        """Return the names of the barriers, two for each slot of a ring (`groups`)."""
        return [f"{ring}_{state}" for ring in self.rings for state in ("filled", "emptied")]

    @property
    def fetch_takes(self) -> list[str]:
        """Return the parameters of the loading function."""
        return [*self.signature.names, *(f"{ring}_desc" for ring in self.rings), *self.rings, *self.barriers]

    @property
    def compute_takes(self) -> list[str]:
        """Return the parameters of the computing function, after the group."""
        return [*self.signature.names, "out_desc", *self.rings, *self.staging, *self.barriers]

    @property
    def reserved(self) -> list[str]:
        """Return other names that the lines use."""
        return [*_NAMES, _SCORES, _SUMS, _STAGED, GROUP]

    def launched(self, values: Values) -> list[Code]:
        """Return the lines of the launched function: descriptors, shared memory, barriers."""
        depth = self.layout.config.num_stages
        counts = {"left": self.groups, "right": depth, "other": depth, "out": self.groups if self.staging else 0}
        for ring, box in self._boxes().items():
            boxes.describe(values, ring, box, self._shape(box), counts[ring])
        for ring in self.rings:
            arrivals = {"filled": 1, "emptied": 1 if ring == "left" else self.groups}
            for state, count in arrivals.items():
                values.line("{} = {}({}, {})", f"{ring}_{state}", "_barriers", counts[ring], count)
        groups.start(values, self.signature.name, self, self.groups)
        return values.scopes[0].lines

    def _boxes(self) -> dict[str, Box]:
        plan = self.plan
        return {"left": plan.left, "right": plan.right, "other": plan.other, "out": plan.result}

    def _shape(self, box: Box) -> list[Code]:
        return groups.shape(self.layout, box.dims, self.plan.m)

    def _slot(self, ring: str, number: str) -> Code:
        """Return one slot of a ring as a matrix."""
        box = self._boxes()[ring]
        slot = compose("{}.index({})", ring, number)
        return compose("{}.reshape([{}])", slot, listed(self._shape(box))) if box.outer else slot

    # The loading warp -------------------------------------------------------------------------------------------------

    def fetch(self, values: Values) -> list[Function]:
        """Return the functions of the loading warp: for one block, and for all."""
        plan, depth = self.plan, self.layout.config.num_stages
        values.line("slot, phase, begun = 0, 1, 1")
        turns = open_turns(values, plan.m)
        m0 = values.starts[plan.m]
        order = order_of(values, plan.loop, plan.n)
        for group in range(self.groups):
            start = m0 if group == 0 else compose("{} + {} * ({})", m0, group, self.share)
            self._fetch(values, "left", group, "begun", {plan.m: start})
        values.line("begun ^= 1")
        turn = self._open_block(values, order, order.start)
        for ring in ("right", "other"):
            self._fetch(values, ring, "slot", "phase", {plan.n: values.starts[plan.n]})
        values.line(_ADVANCE, *_RING, "_next_slot", depth)
        values.close("for {} in {}:", turn, order.header)
        block = self._end_turn(values, turns, "fetch_block", self.fetch_takes)
        return [block, Function("fetch", self.fetch_takes, values.scopes[0].lines, self.signature.constants)]

    def _fetch(self, values: Values, ring: str, slot: Operand, phase: str, starts: dict[Dim, Code]) -> None:
        box = self._boxes()[ring]
        size = values.layout.blocked.kernel.param(box.matrix.param).dtype.itemsize
        count = listed((size.at(PRODUCT + 1) for size in self._shape(box)), " * ")
        corner = boxes.corner(values, box, *(starts.get(dim, 0) for dim in box.dims))
        filled, emptied = (compose("{}.index({})", f"{ring}_{state}", slot) for state in ("filled", "emptied"))
        values.line("hopper.mbarrier.wait({}, {})", emptied, phase)
        values.line("hopper.mbarrier.expect({}, {} * {})", filled, count, size)
        values.line("{}({}, {}, {}, {}.index({}))", LOAD, f"{ring}_desc", corner, filled, ring, slot)

    # The computing groups ---------------------------------------------------------------------------------------------

    def compute(self, values: Values) -> list[Function]:
        """Return the functions of a group: for one block, and for all."""
        plan = self.plan
        for name, columns in ((_SCORES, plan.n), (_SUMS, plan.e)):
            instruction = compose("[16, {}, 16]", columns.constant)
            values.line("{}: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], {})", name, instruction)
        values.line("{} = {}.index({})", _STAGED, "left" if plan.in_place else "out", GROUP)
        values.line("slot, phase, begun = 0, 0, 0")
        turns = open_turns(values, plan.m)
        order = order_of(values, plan.loop, plan.n)
        start = compose("{} + {} * ({})", values.starts[plan.m], GROUP, self.share, binds=PRODUCT)
        values.starts[plan.m] = values.name("m1", Tile(start, depth=values.depth)).code
        values.layout = replace(self.layout, parted=(plan.m,), parts=self.groups)
        values.row_layout = compose("gl.SliceLayout(1, {})", _SCORES)
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
        values.store_through[matrix.param] = Transfer("out_desc", matrix.rows, matrix.columns, None, _STAGED, corner)
        body.stores()
        if plan.in_place:  # the staged result is read from there
            values.line("hopper.tma.store_wait(0)")
            values.line("{}", release)
        takes = [GROUP, *self.compute_takes]
        block = self._end_turn(values, turns, "compute_block", [*takes, _STAGED])
        values.line("hopper.tma.store_wait(0)")
        return [block, Function("compute", takes, values.scopes[0].lines, [GROUP, *self.signature.constants])]

    def _end_turn(self, values: Values, turns: Turns, suffix: str, known: Sequence[str]) -> Function:
        """Close the loop over blocks; its body becomes a function."""
        constants = [*self.signature.constants, _SCORES, _SUMS]
        block = split_off(values, turns.begin, suffix, known, constants, _CARRIED)
        # The number of a group is not a constant there, so that the function is read once for all equal groups.
        arguments = (compose("gl.to_tensor({})", name) if name == GROUP else name for name in block.takes)
        values.line("{} = {}({})", listed(_CARRIED), f"{self.signature.name}_{suffix}", listed(arguments))
        turns.close()
        return block

    def _loop(self, values: Values, body: Body, order: Order) -> tuple[Callable[[], None], ...]:
        """Add the first block, then the others, part by part; return the functions that complete the folds after the
        loop.
        """
        plan = self.plan
        values.open("n0")
        if order.first != Code("0"):
            values.starts[plan.n] = order.first
        values.line("hopper.mbarrier.wait({}.index({}), {})", "right_filled", *_RING)
        scores = values.fresh(plan.first.name, values.depth)
        values.line("{} = hopper.warpgroup_mma_wait(0, deps=({},))", scores, self._first())
        values.line("hopper.mbarrier.arrive({}.index({}), count=1)", "right_emptied", "slot")
        block = self._between(values, body, conditional(plan.loop), scores)
        shape = compose("[{}, {}]", self.share, plan.e.constant)
        values.line("weights = {}", block.weights)
        values.line("sums = gl.full({}, 0.0, gl.float32, {})", shape, _SUMS)
        self._step(values, block)
        values.inline()
        for turns in order.others:
            turn = self._open_block(values, order, turns.start)
            values.full = frozenset({plan.n}) if turns.part.full or turns.conditional is not None else frozenset()
            values.line("hopper.mbarrier.wait({}.index({}), {})", "right_filled", *_RING)
            scores = values.fresh(plan.first.name, values.depth)
            values.line("next_scores = {}", self._first())
            self._begin_second(values)
            values.line("{} = hopper.warpgroup_mma_wait(1, deps=(next_scores,))", scores)
            values.line("hopper.mbarrier.arrive({}.index({}), count=1)", "right_emptied", "slot")
            if turns.conditional is not None:
                self._select_in(values, compose("{} < {}", turn, turns.conditional))
            block = self._between(values, body, turns.part.loop, scores)
            self._end_second(values)
            values.line("sums = sums * {}", self._factor(block.factor))
            values.line("weights = {}", block.weights)
            self._step(values, block)
            values.close("for {} in {}:", turn, turns.header)
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

    def _open_block(self, values: Values, order: Order, start_of: Callable[[Code], Code]) -> Code:
        """Open a loop over blocks and define the start of each; return the name of its variable."""
        turn = values.open(order.variable)
        start = start_of(turn)
        if order.variable != "n0":
            start = values.name("n0", Tile(start, depth=values.depth)).code
        values.starts[self.plan.n] = start
        return turn

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
            compose("gl.convert_layout({}, gl.DotOperandLayout(0, {}, 2))", lhs, _SUMS), tile, tuple(ends), tuple(later)
        )

    def _first(self) -> Code:
        over_first = self.plan.right.matrix.rows is not self.plan.n
        operands = listed([self._slot("left", GROUP), self._slot("right", "slot")])
        return compose("{}({}, {}, {})", "_begin_product", operands, over_first, _SCORES)

    def _begin_second(self, values: Values) -> None:
        other = self._slot("other", "behind")
        if self.plan.other.matrix.rows is not self.plan.n:
            other = compose("{}.permute((1, 0))", other)
        values.line("hopper.mbarrier.wait({}.index({}), {})", "other_filled", *_BEHIND)
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
            rows = compose("gl.convert_layout({}, gl.SliceLayout(1, {}))", rows, _SUMS)
        return expand(rows, tile.dims, (plan.m, plan.e))

    def _convert_rows(self, values: Values) -> None:
        """Convert numbers of each row to the layout of the sums, for the epilogue on both."""
        plan = self.plan
        if self._same_layout:
            return
        values.row_layout = compose("gl.SliceLayout(1, {})", _SUMS)
        for stmt in plan.loop.body:
            known = values.find(stmt.ref) if isinstance(stmt, Fold) else None
            if known is not None and known.dims == (plan.m,):
                assert isinstance(stmt, Fold)
                code = compose("gl.convert_layout({}, {})", known.code, values.row_layout)
                values.bind(stmt.ref, values.name(stmt.name, replace(known, code=code, depth=values.depth)))
        values.forget(plan.m)

    def _step(self, values: Values, block: _Block) -> None:
        """End a block: the block of the latest first product is now the one of the next second product."""
        for line in block.ends:
            values.line("{}", line)
        values.line("{}, {} = {}, {}", *_BEHIND, *_RING)
        values.line(_ADVANCE, *_RING, "_next_slot", self.layout.config.num_stages)
