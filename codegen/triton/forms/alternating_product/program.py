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
from functools import partial

import torch

from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.code import PRODUCT, SUM, Code, Operand, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.expressions.prelude import LOAD
from fusion.codegen.triton.expressions.scalar_code import TYPES, cast
from fusion.codegen.triton.expressions.scopes import Identifiers, Tile, Transfer
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import descriptor_comments, launched_function, signature
from fusion.codegen.triton.forms.alternating_product.config import BLOCKS, GROUPS, HALF, leaving
from fusion.codegen.triton.forms.alternating_product.rule import Moved, epilogue_params, moved_by
from fusion.codegen.triton.forms.persistent_product.program import count_blocks
from fusion.codegen.triton.forms.warp_groups import groups
from fusion.codegen.triton.forms.warp_groups.functions import Function
from fusion.codegen.triton.forms.warp_groups.groups import GROUP
from fusion.codegen.triton.products import descriptors
from fusion.codegen.triton.products.block_order import assign_block, blocks_of, start_block, swizzled
from fusion.codegen.triton.products.selection import column_ends, select
from fusion.codegen.triton.writer import Writer
from fusion.lowering.ir.kernel import Kernel, Store

_SUMS, _ROWS, _STAGED = "SUMS", "ROWS", "staged"
"""Names: the layouts of sums and of rows of results, and the memory in which results of a group leave."""

_RINGS = ("left", "right")
"""The slots of both operands."""

_BARRIERS = ("filled", "emptied", "turns")
"""The barriers: of each slot, and of the turn of each group."""

_TILES = ("arrived", "vacant")
"""The barriers of the memory in which a group's tiles arrive and its results leave: the tile is there, it is free."""

_NAMES = (*_RINGS, "out", *_BARRIERS, *_TILES, _SUMS, _ROWS, _STAGED, GROUP)
_VARIABLES = ("slot", "phase", "first", "turn", "steps", "arrival")
_MODULES = ("gl", "gluon", "hopper")


def functions(kernel: Kernel, layouts: Sequence[Layout], writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
    """Return the functions of a kernel that is one product, or several of the same rows; the last one is launched.

    The descriptors that it takes are added to `hosted`.
    """
    params = [*map(argument, kernel.params), *(size.name for size in kernel.sizes)]
    constants = list(layouts[0].constants)
    names = [*params, *constants, *_NAMES, *_VARIABLES, *_MODULES, *prelude.FUNCTIONS, kernel.name]

    def values(*further: str) -> Values:
        return writer.values(layouts[0], Identifiers([*names, *further]))

    launched = values()
    launched.hosted = hosted
    described = descriptors.Descriptors(launched)
    products = [_described(described, layout) for layout in layouts]
    hosted.update({name: _with_layout(kernel, each) for name, each in hosted.items()})
    program = AlternatingProgram(kernel.name, products, (*params, *hosted), constants)
    program.start(launched)
    head = signature(kernel, kernel.name, descriptor_comments(hosted), constants)
    return [
        program.fetch(values(*hosted)).text(kernel.name),
        program.compute(values(*hosted)).text(kernel.name),
        launched_function(head, launched.scopes[0].lines, writer.device, "gluon.jit"),
    ]


@dataclass(frozen=True, slots=True)
class Product:
    """One product of a kernel: its matrices, each with its descriptor."""

    layout: Layout
    moved: Moved
    left: Transfer
    right: Transfer
    results: dict[str, Transfer]
    tiles: list[Transfer]

    @property
    def pointers(self) -> list[str]:
        """Return the parameters that its epilogue accesses by pointers."""
        described = {*self.results, *(load.buffer for load in self.moved.tiles)}
        return [param for param in epilogue_params(self.layout.blocked) if param not in described]

    @property
    def over(self) -> Dim:
        """Return the dimension that is summed."""
        (dot,) = self.layout.blocked.dots
        return self.layout.blocked.sides(dot)[2]

    @property
    def sides(self) -> tuple[Dim, Dim]:
        """Return the dimensions of rows and of columns."""
        return self.layout.blocked.named("m"), self.layout.blocked.named("n")

    @property
    def uses_out(self) -> bool:
        """Whether tiles arrive or results leave through shared memory."""
        return bool(leaving(self.layout.blocked) or self.tiles)

    @property
    def slot_bytes(self) -> Code:
        """Return the bytes of a slot: a block of each operand."""
        size: Operand = self.layout.blocked.kernel.param(self.moved.left.param).dtype.itemsize
        m, n = (side.constant for side in self.sides)
        return compose("({} + {}) * {} * {}", m, n, self.over.constant, size, binds=PRODUCT)


def _described(described: descriptors.Descriptors, layout: Layout) -> Product:
    moved = moved_by(layout.blocked)
    left, right = (described.of(matrix, layout) for matrix in (moved.left, moved.right))
    tiles = [described.of(matrix, layout) for matrix in moved.tiles.values()]
    results = {param: replace(described.of(matrix, layout), staged=_STAGED) for param, matrix in moved.results.items()}
    return Product(layout, moved, left, right, results, tiles)


def _with_layout(kernel: Kernel, hosted: Hosted) -> Hosted:
    """Return a descriptor with the layout of its blocks in shared memory."""
    element = TYPES[kernel.param(hosted.param).dtype].replace("tl.", "gl.")
    return replace(hosted, layout=f"gl.NVMMASharedLayout.get_default_for({hosted.block}, {element})")


@dataclass(frozen=True)
class AlternatingProgram:
    """Writes the functions of one kernel.

    Attributes:
        name: the name of the kernel.
        products: its products; expressions are written for the first one, and the others differ in what they load and
            store alone.
        params: the parameters of all functions, descriptors included; then follow the `constants`.
    """

    name: str
    products: Sequence[Product]
    params: Sequence[str]
    constants: list[str]

    @property
    def own(self) -> Product:
        """Return the product for which expressions are written."""
        return self.products[0]

    @property
    def layout(self) -> Layout:
        """Return the layout of that product."""
        return self.own.layout

    @property
    def fetch_takes(self) -> list[str]:
        """Return the parameters of the loading function."""
        tiles = ["out", *_TILES] if self.own.tiles else []
        return [*self.params, *self.constants, *_RINGS, "filled", "emptied", *tiles]

    @property
    def compute_takes(self) -> list[str]:
        """Return the parameters of the computing function, after the group."""
        out = ["out"] if self.own.uses_out else []
        return [*self.params, *self.constants, *_RINGS, *out, *_BARRIERS, *self._tiles]

    @property
    def reserved(self) -> list[str]:
        """Return the other names that the generated lines use."""
        return [*_NAMES, *_VARIABLES, *_MODULES]

    def start(self, values: Values) -> None:
        """Add the lines of the launched function, which allocates memory and barriers and starts the groups."""
        depth, moved = self.layout.config.num_stages, self.own.moved
        element = TYPES[self.layout.blocked.kernel.param(moved.left.param).dtype]
        for name, transfer in zip(_RINGS, (self.own.left, self.own.right), strict=True):
            shape = values.layout.shape((transfer.rows, transfer.columns), depth)
            values.line("{} = gl.allocate_shared_memory({}, {}, {}.layout)", name, element, shape, transfer.name)
        if self.own.uses_out:
            self._allocate_out(values)
        counts = [*zip(_BARRIERS, (depth, depth, GROUPS), strict=True), *((name, GROUPS) for name in self._tiles)]
        for name, count in counts:
            values.line("{} = {}({}, 1)", name, "_barriers", count)
        groups.start(values, self.name, self, GROUPS)

    def _allocate_out(self, values: Values) -> None:
        """Add the line that allocates the blocks in which tiles arrive and results leave."""
        moved, dims = self.own.moved, self.own.sides
        described = [*self.own.results.values(), *self.own.tiles]
        (dtype,) = {each.dtype for each in (*moved.tiles, *(stmt.value for stmt in leaving(self.layout.blocked)))}
        element = TYPES[dtype]
        if described:
            layout = compose("{}.layout", described[0].name)
        else:
            layout = compose("gl.NVMMASharedLayout.get_default_for({}, {})", values.layout.shape(dims), element)
        shape = values.layout.shape(dims, BLOCKS)
        values.line("out = gl.allocate_shared_memory({}, {}, {})", element, shape, layout)

    def fetch(self, values: Values) -> Function:
        """Return the function of the loading warp."""
        over = self.own.over
        values.line("slot, phase = 0, 1")
        if self.own.tiles:
            values.line("group, turn = 0, 1")
        choices = [[each.right.name, *(tile.name for tile in each.tiles)] for each in self.products]
        block, blocks, (columns, *tiles) = self._open(values, choices, ["columns", *("tile" for _ in self.own.tiles)])
        k0 = values.open("k0")
        values.starts[over] = k0
        values.line("hopper.mbarrier.wait(emptied.index(slot), phase)")
        values.line("hopper.mbarrier.expect(filled.index(slot), {})", self.own.slot_bytes)
        for ring, transfer in zip(_RINGS, (self.own.left, replace(self.own.right, name=columns)), strict=True):
            _, corner, _ = values.block_corner(transfer)
            values.line("{}({}, {}, filled.index(slot), {}.index(slot))", LOAD, transfer.name, corner, ring)
        values.line("slot, phase = {}(slot, phase, {})", "_next_slot", self.layout.config.num_stages)
        values.close("for {} in range(0, {}, {}):", k0, values.index_tile(over.size).code, over.constant)
        if tiles:
            self._fetch_tiles(values, tiles)
        values.close("for {} in range(tl.program_id(0), {}, tl.num_programs(0)):", block, blocks)
        return Function("fetch", self.fetch_takes, values.scopes[0].lines, self.constants)

    def _fetch_tiles(self, values: Values, names: Sequence[str]) -> None:
        """Load the tiles of a block behind its operands, when the results of the group's last block have left."""
        m, n = (side.constant for side in self.own.sides)
        before = compose("1 - {}", GROUP, binds=SUM) if self._takes_turns else as_code(GROUP)
        values.line("hopper.mbarrier.wait(vacant.index({}), turn)", before)
        values.line("hopper.mbarrier.expect(arrived.index(group), {} * {} * {})", m, n, HALF * len(names))
        for number, (name, transfer) in enumerate(zip(names, self.own.tiles, strict=True)):
            _, corner, _ = values.block_corner(transfer)
            memory = self._memory(number, "group")
            values.line("{}({}, {}, arrived.index(group), {})", LOAD, name, corner, memory)
        values.line("turn ^= {}", before)
        values.line("group ^= 1")

    def compute(self, values: Values) -> Function:
        """Return the function of a group."""
        over, (dot,), moved = self.own.over, self.layout.blocked.dots, self.own.moved
        m, n = self.own.sides
        warps = self.layout.config.num_warps
        instruction = compose("[16, {}, 16]", n.constant)
        values.line("{}: tl.constexpr = gl.NVMMADistributedLayout([3, 0], [{}, 1], {})", _SUMS, warps, instruction)
        if self.own.uses_out:
            values.line("{} = {}", _STAGED, self._memory(0, GROUP))
        if moved.by_rows:
            width = min(moved.by_rows.values())
            layout = "{}: tl.constexpr = gl.BlockedLayout([1, {}], [1, 32], [{}, 1], [1, 0])"
            values.line(layout, _ROWS, width, warps)
        values.line("steps = tl.cdiv({}, {})", values.index_tile(over.size).code, over.constant)
        values.line("first, turn = {0} * steps, 1 - {0}", GROUP)
        if self.own.tiles:
            values.line("arrival = 0")
        block, blocks = self._open_results(values)
        body = Body(values)
        result = values.fresh(dot.name, values.depth)
        turned = [Code(str(each)) for each in (moved.left.rows is over, moved.right.rows is not over)]
        arguments = listed([*_RINGS, *_BARRIERS, GROUP, "turn", "first", "steps", *turned])
        values.line("{} = {}({}, {}, {})", result, "_multiply_in_turn", arguments, self.layout.config.num_stages, _SUMS)
        values.line("turn ^= 1")
        values.line("first += {} * steps", GROUPS)
        sums = Tile(as_code(result), (m, n), values.depth)
        values.bind(dot.ref, replace(sums, code=cast(sums.code, torch.float32, dot.dtype)))
        if moved.tiles:
            self._await_tiles(values)
        self._store(values, body)
        if moved.tiles:
            self._release(values)
        begin = compose("tl.program_id(0) + {} * tl.num_programs(0)", GROUP)
        values.close("for {} in range({}, {}, {} * tl.num_programs(0)):", block, begin, blocks, GROUPS)
        if moved.results:
            values.line("hopper.tma.store_wait(0)")
        return Function("compute", [GROUP, *self.compute_takes], values.scopes[0].lines, [GROUP, *self.constants])

    def _await_tiles(self, values: Values) -> None:
        """Read the tiles of the block, the first one before results leave from its memory."""
        values.line("hopper.mbarrier.wait(arrived.index({}), arrival)", GROUP)
        values.line("arrival ^= 1")
        first, *others = self.own.moved.tiles
        for number, load in enumerate(others, start=1):
            values.emitters[load] = partial(self._read, values, self._memory(number, GROUP))
        values.emitters[first] = partial(self._read, values, as_code(_STAGED))
        values.load_now(first)

    def _read(self, values: Values, memory: Code) -> Tile:
        """Return the tile that lies in shared memory, in the layout of sums."""
        return Tile(compose("{}.load({})", memory, _SUMS), self.own.sides, values.depth)

    def _release(self, values: Values) -> None:
        """Add the lines that let the next tile arrive, once the result has been read."""
        if self.own.results:
            values.line("hopper.tma.store_wait(0)")
        values.line("hopper.mbarrier.arrive(vacant.index({}), count=1)", GROUP)

    def _open_results(self, values: Values) -> tuple[Code, Code]:
        """Open the loop over blocks, for a group; return its variable, and the number of blocks."""
        own = self.own
        choices = [
            [*(transfer.name for transfer in each.results.values()), *map(values.pointer_name, each.pointers)]
            for each in self.products
        ]
        wishes = [*("result" for _ in own.results), *map(values.pointer_name, own.pointers)]
        block, blocks, names = self._open(values, choices, wishes)
        for (param, transfer), name in zip(own.results.items(), names, strict=False):
            values.store_through[param] = replace(transfer, name=name)
        values.chosen = dict(zip(own.pointers, names[len(own.results) :], strict=True))
        return block, blocks

    def _store(self, values: Values, body: Body) -> None:
        """Add the lines of the epilogue."""
        dims = self.own.sides
        stores = [stmt for stmt in values.layout.blocked.body if isinstance(stmt, Store)]
        for stmt in stores if len(stores) > 1 and not self.own.moved.by_rows else ():
            # All before the first one leaves: what they share is not held until then.
            values.bind(stmt.value, values.name(stmt.param, values.value(stmt.value)))
        for stmt in stores:
            if stmt.param not in self.own.moved.by_rows:
                body.store(stmt)
                continue
            values.line("{}.store({})", _STAGED, values.value(stmt.value).code)
            for dim in dims:  # threads have other elements from here on
                values.forget(dim)
            read = Tile(compose("{}.load({})", _STAGED, _ROWS), dims, values.depth)
            values.bind(stmt.value, values.name(stmt.param, read))
            body.store(stmt)
            for dim in dims:
                values.forget(dim)

    @property
    def _takes_turns(self) -> bool:
        """Whether the groups use the same memory of tiles and results in turn."""
        return len(self.own.tiles) > 1

    def _memory(self, number: int, group: str) -> Code:
        """Return the memory of a tile; results leave from that of the first one."""
        return compose("out.index({})", number if self._takes_turns else group)

    @property
    def _tiles(self) -> Sequence[str]:
        """Return the barriers of the memory of tiles, if tiles arrive."""
        return _TILES if self.own.tiles else ()

    def _open(
        self, values: Values, choices: Sequence[Sequence[str]], wishes: Sequence[str]
    ) -> tuple[Code, Code, Sequence[str]]:
        """Open the loop over blocks and define the start of each.

        Args:
            choices: the names in which products differ, for each product.

        Returns:
            The loop variable, the number of blocks, and the names that the product of the block has.
        """
        if len(self.products) == 1:
            blocks = count_blocks(values)
            number = values.open("block")
            assign_block(values, number)
            return number, blocks, choices[0]
        m, n = self.own.sides
        rows, ends = blocks_of(values, m), column_ends(values, [each.layout for each in self.products])
        blocks = values.name("blocks", Tile(compose("{} * {}", rows, ends[-1]))).code
        number = values.open("block")
        m_block, n_block = swizzled(values, number, rows, ends[-1])
        described = [[as_code(name) for name in names] for names in choices]
        *names, first = select(values, wishes, described, n_block, ends)
        start_block(values, m, m_block)
        start_block(values, n, compose("{} - {}", n_block, first, binds=SUM))
        return number, blocks, names
