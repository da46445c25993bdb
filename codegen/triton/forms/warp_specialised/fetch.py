"""Emits the function of the warp that loads operands into rings of slots, a block ahead of the computing groups.

Input: a warp-specialised program; output: the lines that wait for an empty slot, and fill it, for each block.
"""

from __future__ import annotations

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import PRODUCT, Code, Operand, compose, listed
from fusion.codegen.triton.expressions.prelude import LOAD
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.forms.warp_groups.functions import Function
from fusion.codegen.triton.forms.warp_specialised import boxes
from fusion.codegen.triton.forms.warp_specialised.order import order_of
from fusion.codegen.triton.forms.warp_specialised.program import ADVANCE, RING, WarpSpecialisedProgram
from fusion.codegen.triton.forms.warp_specialised.tile_schedule import open_tile_loop


def fetch(program: WarpSpecialisedProgram, values: Values) -> list[Function]:
    """Return the functions of the loading warp: for one block, and for all."""
    plan, depth = program.plan, program.layout.config.num_stages
    values.line("slot, phase, begun = 0, 1, 1")
    tiles = open_tile_loop(values, plan.m)
    m0 = values.starts[plan.m]
    order = order_of(values, plan.loop, plan.n)
    for group in range(program.groups):
        start = m0 if group == 0 else compose("{} + {} * ({})", m0, group, program.share)
        _load(program, values, "left", group, "begun", {plan.m: start})
    values.line("begun ^= 1")
    turn = program.open_block(values, order, order.start)
    for ring in ("right", "other"):
        _load(program, values, ring, "slot", "phase", {plan.n: values.starts[plan.n]})
    values.line(ADVANCE, *RING, "_next_slot", depth)
    values.close("for {} in {}:", turn, order.header)
    block = program.end_tile_loop(values, tiles, "fetch_block", program.fetch_takes)
    return [block, Function("fetch", program.fetch_takes, values.scopes[0].lines, program.signature.constants)]


def _load(
    program: WarpSpecialisedProgram, values: Values, ring: str, slot: Operand, phase: str, starts: dict[Dim, Code]
) -> None:
    box = program.boxes()[ring]
    size = values.layout.blocked.kernel.param(box.matrix.param).dtype.itemsize
    count = listed((size.at(PRODUCT + 1) for size in program.shape(box)), " * ")
    corner = boxes.corner(values, box, *(starts.get(dim, 0) for dim in box.dims))
    filled, emptied = (compose("{}.index({})", f"{ring}_{state}", slot) for state in ("filled", "emptied"))
    values.line("hopper.mbarrier.wait({}, {})", emptied, phase)
    values.line("hopper.mbarrier.expect({}, {} * {})", filled, count, size)
    values.line("{}({}, {}, {}, {}.index({}))", LOAD, f"{ring}_desc", corner, filled, ring, slot)
