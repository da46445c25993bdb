"""Emits the function that a warp-specialised kernel launches: rings of slots, barriers, loops over blocks.

Input: a kernel that loops over the columns of one product, folds its rows, and multiplies their result again; output:
the names and parameters of its functions, and the lines of the launched one, which starts a warp that loads
(`fetch.py`) and groups that compute (`compute.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusion.codegen.triton.expressions.code import Code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.forms.warp_groups import groups
from fusion.codegen.triton.forms.warp_groups.functions import Function, split_off
from fusion.codegen.triton.forms.warp_groups.groups import GROUP, KernelSignature
from fusion.codegen.triton.forms.warp_specialised import boxes
from fusion.codegen.triton.forms.warp_specialised.boxes import DescriptorBox
from fusion.codegen.triton.forms.warp_specialised.chain import WarpSpecialisedChain
from fusion.codegen.triton.forms.warp_specialised.config import groups_of, shape
from fusion.codegen.triton.forms.warp_specialised.order import Order
from fusion.codegen.triton.forms.warp_specialised.tile_schedule import TileLoop

SCORES, SUMS, STAGED = "SCORES", "SUMS", "staged"
"""Names: the layouts of the results of both products, and the slot from which a result is stored."""

RING = ("slot", "phase")
"""Variables: the slot of the latest first product, and its phase."""

BEHIND = ("behind", "behind_phase")
"""Variables: the slot of the next second product, and its phase."""

ADVANCE = "{0}, {1} = {2}({0}, {1}, {3})"
"""A line: to the next slot, of a number of them."""

CARRIED = (*RING, "begun")
"""Variables that a program carries from block to block."""

_NAMES = (*CARRIED, *BEHIND, "weights", "next_scores", "next_sums", "sums")


class WarpSpecialisedProgram:
    """Names the buffers and barriers that the functions of one kernel share, and writes the entry function."""

    def __init__(self, layout: Layout, plan: WarpSpecialisedChain, signature: KernelSignature) -> None:
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
        """Return the other names that the generated lines use."""
        return [*_NAMES, SCORES, SUMS, STAGED, GROUP]

    def launched(self, values: Values) -> list[Code]:
        """Return the lines of the entry function, which allocates buffers and barriers and starts the groups."""
        depth = self.layout.config.num_stages
        counts = {"left": self.groups, "right": depth, "other": depth, "out": self.groups if self.staging else 0}
        for ring, box in self.boxes().items():
            boxes.describe(values, ring, box, self.shape(box), counts[ring])
        for ring in self.rings:
            arrivals = {"filled": 1, "emptied": 1 if ring == "left" else self.groups}
            for state, count in arrivals.items():
                values.line("{} = {}({}, {})", f"{ring}_{state}", "_barriers", counts[ring], count)
        groups.start(values, self.signature.name, self, self.groups)
        return values.scopes[0].lines

    def boxes(self) -> dict[str, DescriptorBox]:
        """Return the descriptor box of each ring of slots."""
        plan = self.plan
        return {"left": plan.left, "right": plan.right, "other": plan.other, "out": plan.result}

    def shape(self, box: DescriptorBox) -> list[Code]:
        """Return the shape of a block for one group."""
        return shape(self.layout, box.dims, self.plan.m)

    def slot(self, ring: str, number: str) -> Code:
        """Return one slot of a ring as a matrix."""
        box = self.boxes()[ring]
        slot = compose("{}.index({})", ring, number)
        return compose("{}.reshape([{}])", slot, listed(self.shape(box))) if box.outer else slot

    def open_block(self, values: Values, order: Order, start_of: Callable[[Code], Code]) -> Code:
        """Open a loop over blocks and define the start of each; return the name of its variable."""
        turn = values.open(order.variable)
        start = start_of(turn)
        if order.variable != "n0":
            start = values.name("n0", Tile(start, depth=values.depth)).code
        values.starts[self.plan.n] = start
        return turn

    def end_tile_loop(self, values: Values, tiles: TileLoop, suffix: str, known: Sequence[str]) -> Function:
        """Close the loop over blocks; its body becomes a function."""
        constants = [*self.signature.constants, SCORES, SUMS]
        block = split_off(values, tiles.begin, suffix, known, constants, CARRIED)
        # The number of a group is not a constant there, so that the function is read once for all equal groups.
        arguments = (compose("gl.to_tensor({})", name) if name == GROUP else name for name in block.takes)
        values.line("{} = {}({})", listed(CARRIED), f"{self.signature.name}_{suffix}", listed(arguments))
        tiles.close()
        return block
