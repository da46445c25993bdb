"""Emits the functions of an alternating product: the loading warp, a group that computes, and the launched one.

    def matmul_fetch(…):
        slot, phase = 0, 1
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            …
            for k0 in range(0, 1024, KBLOCK):
                wait until slot is empty, then load both operands into it
    def matmul_compute(group, …):
        for block in range(tl.program_id(0) + group * tl.num_programs(0), blocks, 2 * tl.num_programs(0)):
            …
            dot0 = _multiply_in_turn(left, right, …)
            _send(out0_desc, staged, [m0, n0], …)

Blocks pass through one ring of slots, in the order of the program, so that a group knows the slots of its block by
their number.  A group waits for its turn before it looks at them: the phase of a barrier says only whether an even or
an odd number of blocks has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.code import PRODUCT, Code, Operand, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Hosted, Matrix
from fusion.codegen.triton.expressions.prelude import LOAD
from fusion.codegen.triton.expressions.scalar_code import TYPES, cast
from fusion.codegen.triton.expressions.scopes import Identifiers, Tile, Transfer
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import descriptor_comments, launched_function, signature
from fusion.codegen.triton.forms.alternating_product.config import GROUPS
from fusion.codegen.triton.forms.alternating_product.rule import Moved, moved_by
from fusion.codegen.triton.forms.persistent_product.program import count_blocks
from fusion.codegen.triton.forms.warp_groups import groups
from fusion.codegen.triton.forms.warp_groups.functions import Function
from fusion.codegen.triton.forms.warp_groups.groups import GROUP
from fusion.codegen.triton.products import descriptors
from fusion.codegen.triton.products.block_order import assign_block
from fusion.codegen.triton.writer import Writer

SUMS, STAGED = "SUMS", "staged"
"""Names: the layout of sums, and the slot from which results of a group are stored."""

RINGS = ("left", "right")
"""The slots of both operands."""

BARRIERS = ("filled", "emptied", "turns")
"""The barriers: of each slot, and of the turn of each group."""

_NAMES = (
    *RINGS,
    *BARRIERS,
    SUMS,
    STAGED,
    GROUP,
    "out",
    "slot",
    "phase",
    "first",
    "turn",
    "steps",
    "gl",
    "gluon",
    "hopper",
)


def functions(layout: Layout, writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
    """Return the functions of the kernel, of which the last is launched; add the descriptors it takes to `hosted`."""
    kernel = layout.blocked.kernel
    params = [*map(argument, kernel.params), *(size.name for size in kernel.sizes)]
    names = [*params, *layout.constants, *_NAMES, *prelude.FUNCTIONS, kernel.name]

    def values(*further: str) -> Values:
        return writer.values(layout, Identifiers([*names, *further]))

    moved = moved_by(layout.blocked)
    assert moved is not None, "called for a kernel that is refused"
    launched = values()
    launched.hosted = hosted
    transfers = {matrix: _described(launched, matrix) for matrix in moved.all}
    hosted.update({name: _with_layout(layout, each) for name, each in hosted.items()})
    program = AlternatingProgram(layout, moved, transfers, (*params, *hosted), list(layout.constants))
    program.start(launched)
    head = signature(kernel, kernel.name, descriptor_comments(hosted), program.constants)
    return [
        program.fetch(values(*hosted)).text(kernel.name),
        program.compute(values(*hosted)).text(kernel.name),
        launched_function(head, launched.scopes[0].lines, writer.device, "gluon.jit"),
    ]


def _described(values: Values, matrix: Matrix) -> Transfer:
    return descriptors.describe(values, matrix, values.layout)


def _with_layout(layout: Layout, hosted: Hosted) -> Hosted:
    """Return a descriptor with the layout of its blocks in shared memory."""
    element = TYPES[layout.blocked.kernel.param(hosted.param).dtype].replace("tl.", "gl.")
    return replace(hosted, layout=f"gl.NVMMASharedLayout.get_default_for({hosted.block}, {element})")


@dataclass(frozen=True)
class AlternatingProgram:
    """Writes the functions of one kernel.

    Attributes:
        transfers: the descriptor of each matrix.
        params: the parameters of all functions, descriptors included; then follow the `constants`.
    """

    layout: Layout
    moved: Moved
    transfers: dict[Matrix, Transfer]
    params: Sequence[str]
    constants: list[str]

    @property
    def fetch_takes(self) -> list[str]:
        """Return the parameters of the loading function."""
        return [*self.params, *self.constants, *RINGS, "filled", "emptied"]

    @property
    def compute_takes(self) -> list[str]:
        """Return the parameters of the computing function, after the group."""
        return [*self.params, *self.constants, *RINGS, "out", *BARRIERS]

    @property
    def reserved(self) -> list[str]:
        """Return the other names that the generated lines use."""
        return list(_NAMES)

    def start(self, values: Values) -> None:
        """Add the lines of the launched function, which allocates memory and barriers and starts the groups."""
        depth, blocked = self.layout.config.num_stages, self.layout.blocked
        result = next(iter(self.moved.results.values()))
        slots = {"left": (self.moved.left, depth), "right": (self.moved.right, depth), "out": (result, GROUPS)}
        for name, (matrix, count) in slots.items():
            element = TYPES[blocked.kernel.param(matrix.param).dtype]
            shape = compose("[{}]", listed([count, matrix.rows.constant, matrix.columns.constant]))
            described = self.transfers[matrix].name
            values.line("{} = gl.allocate_shared_memory({}, {}, {}.layout)", name, element, shape, described)
        for name, count in zip(BARRIERS, (depth, depth, GROUPS), strict=True):
            values.line("{} = {}({}, 1)", name, "_barriers", count)
        groups.start(values, blocked.kernel.name, self, GROUPS)

    def fetch(self, values: Values) -> Function:
        """Return the function of the loading warp."""
        over = self._over
        values.line("slot, phase = 0, 1")
        block, blocks = self._open(values)
        k0 = values.open("k0")
        values.starts[over] = k0
        values.line("hopper.mbarrier.wait(emptied.index(slot), phase)")
        values.line("hopper.mbarrier.expect(filled.index(slot), {})", self._bytes())
        for ring, matrix in zip(RINGS, (self.moved.left, self.moved.right), strict=True):
            transfer = self.transfers[matrix]
            _, corner, _ = values.block_corner(transfer)
            values.line("{}({}, {}, filled.index(slot), {}.index(slot))", LOAD, transfer.name, corner, ring)
        values.line("slot, phase = {}(slot, phase, {})", "_next_slot", self.layout.config.num_stages)
        values.close("for {} in range(0, {}, {}):", k0, values.index_tile(over.size).code, over.constant)
        values.close("for {} in range(tl.program_id(0), {}, tl.num_programs(0)):", block, blocks)
        return Function("fetch", self.fetch_takes, values.scopes[0].lines, self.constants)

    def compute(self, values: Values) -> Function:
        """Return the function of a group."""
        over, (dot,) = self._over, self.layout.blocked.dots
        m, n = map(self.layout.blocked.named, ("m", "n"))
        values.line("{}: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, {}, 16])", SUMS, n.constant)
        values.line("{} = out.index({})", STAGED, GROUP)
        values.line("steps = tl.cdiv({}, {})", values.index_tile(over.size).code, over.constant)
        values.line("first, turn = {0} * steps, 1 - {0}", GROUP)
        block, blocks = self._open(values)
        body = Body(values)
        result = values.fresh(dot.name, values.depth)
        turned = [self.moved.left.rows is over, self.moved.right.rows is not over]
        arguments = listed(
            [
                *RINGS,
                "filled",
                "emptied",
                "turns",
                GROUP,
                "turn",
                "first",
                "steps",
                *(Code(str(each)) for each in turned),
            ]
        )
        values.line("{} = {}({}, {}, {})", result, "_multiply_in_turn", arguments, self.layout.config.num_stages, SUMS)
        values.line("turn ^= 1")
        values.line("first += {} * steps", GROUPS)
        sums = Tile(as_code(result), (m, n), values.depth)
        values.bind(dot.ref, replace(sums, code=cast(sums.code, torch.float32, dot.dtype)))
        for param, matrix in self.moved.results.items():
            values.store_through[param] = replace(self.transfers[matrix], staged=STAGED)
        body.stores()
        begin = compose("tl.program_id(0) + {} * tl.num_programs(0)", GROUP)
        values.close("for {} in range({}, {}, {} * tl.num_programs(0)):", block, begin, blocks, GROUPS)
        values.line("hopper.tma.store_wait(0)")
        return Function("compute", [GROUP, *self.compute_takes], values.scopes[0].lines, [GROUP, *self.constants])

    @property
    def _over(self) -> Dim:
        (dot,) = self.layout.blocked.dots
        return self.layout.blocked.sides(dot)[2]

    def _open(self, values: Values) -> tuple[Code, Code]:
        """Open the loop over blocks and define the start of each; return its variable, and the number of blocks."""
        blocks = count_blocks(values)
        number = values.open("block")
        assign_block(values, number)
        return number, blocks

    def _bytes(self) -> Code:
        """Return the bytes of a slot."""
        blocked, over = self.layout.blocked, self._over
        size: Operand = blocked.kernel.param(self.moved.left.param).dtype.itemsize
        sides = [
            matrix.rows if matrix.columns is over else matrix.columns for matrix in (self.moved.left, self.moved.right)
        ]
        return compose("({} + {}) * {} * {}", *(side.constant for side in sides), over.constant, size, binds=PRODUCT)
