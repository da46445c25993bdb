"""Generates kernels that hold long rows in shared memory, between the folds of a row and the pass that stores it.

    copy the row to shared memory | fold it | fold it again | read it, and store its results

A row of a language model's logits has 32,000 to 150,000 numbers.  The registers of a multiprocessor hold one such row
at most, with nothing left to hide its loads; read once more for each pass, rows come from memory again.  Shared memory
has room for two: while one program waits for its row, another one computes.  A row that begins within a word is copied
from the start of the word (`blocks/aligned_rows.py`).

The text is Gluon, in which a program decides what is in shared memory.  Threads read the numbers that they have copied,
so that nothing is exchanged.  (measured: docs/performance.md, `shared_rows`)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from typing_extensions import Self

from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.blocks import Blocked, Config, Dim, block, extent
from fusion.codegen.triton.blocks.aligned_rows import starts_with_word, word_load
from fusion.codegen.triton.blocks.dims import WORD
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.code import Code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Hosted
from fusion.codegen.triton.expressions.scopes import Identifiers, Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import launched_function, signature
from fusion.codegen.triton.forms.form import Refused, Task
from fusion.codegen.triton.forms.rows import Rows
from fusion.codegen.triton.rewrites.apart import apart
from fusion.codegen.triton.rewrites.blocked_loops import in_blocks
from fusion.codegen.triton.writer import Writer, loads_of_the_row
from fusion.lowering.ir.expr import Expr, Load, Random, index_symbols, loads, postorder
from fusion.lowering.ir.kernel import Loop, Role, Store, folds, statements, values_of

_LAYOUT = "ROW"
_WARPS, _MORE_WARPS = 8, 16
"""Warps of a program; and of one whose blocks wait for numbers from memory, such as the gains of a norm.
(measured: docs/performance.md, `shared_rows`)
"""

_PROGRAMS = 2
"""Programs per multiprocessor: one computes while the other one waits for its row."""

_RESERVED = 4 << 10
"""Bytes of shared memory per program beside its rows: of the system, and for sums of threads."""

_HELD = (torch.float16, torch.bfloat16, torch.float32)

_IN_REGISTERS, _FOLDED_ONCE = 8192, 20480
"""The longest rows, in elements, that are as fast in registers: of several folds, and of one, which leaves more time to
load the next row.  (measured: docs/performance.md, `shared_rows`)
"""


@dataclass(frozen=True, slots=True)
class SharedRowsConfig(Config):
    """A configuration of rows in shared memory."""

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        return ["rows in shared memory"]


@dataclass(frozen=True)
class SharedRows(Rows):
    """The plan for rows of which a multiprocessor holds two, in its shared memory.

    Attributes:
        looped: the kernel as loops over blocks of a row.
        held: the loads that are read from shared memory.
    """

    looped: Blocked
    held: tuple[Load, ...]

    name = "rows in shared memory"
    takes = (SharedRowsConfig,)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept many long rows that are alone in their launch, and read more than once."""
        device, kernel = task.device, task.kernel
        if not device.has(Feature.ASYNC_COPIES) or triton.knobs.runtime.interpret:
            return Refused(f"{device.arch} does not copy to shared memory in the background")
        if kernel.beside or kernel.then is not None or task.numerics.invariant:
            return Refused("it is launched with others, or adds in a fixed order")
        roles = [dim.role for dim in task.blocked.dims]
        if task.blocked.contraction or roles not in ([Role.GRID, Role.WHOLE], [Role.GRID, Role.LOOP]):
            return Refused("it does not fold one row")
        length = task.blocked.dims[1].size
        if not length.is_Integer or length <= (_IN_REGISTERS if len(folds(kernel)) > 1 else _FOLDED_ONCE):
            return Refused("its rows are short, or of unknown length")
        looped = _in_loops(task)
        if isinstance(looped, Refused):
            return looped
        if not any(isinstance(stmt, Store) for loop in statements(looped.body, Loop) for stmt in loop.body):
            return Refused("running values read its rows once")
        if any(isinstance(node, Random) for node in postorder(*_values(looped))):
            return Refused("it draws random numbers, by functions that create tiles without a layout")
        plan = cls(task, looped, _read_again(looped))
        if not plan.held:
            return Refused("no row is read again")
        if extent(looped.dims[0].size) < _PROGRAMS * device.multiprocessors:
            return Refused("there are too few rows")
        return plan if plan.room(plan.default()) <= plan._room() else Refused("two rows exceed shared memory")

    @property
    def blocked(self) -> Blocked:
        """Return the kernel over block dimensions, as loops."""
        return self.looped

    @property
    def _row(self) -> Dim:
        return self.looped.dims[1]

    @property
    def _word(self) -> int:
        """The elements that a thread copies at once."""
        return WORD // min(load.dtype.itemsize for load in self.held)

    def default(self) -> Config:
        """Return the default configuration: a block is a word of each thread."""
        return self._config(_MORE_WARPS if self._waits() else _WARPS)

    def configs(self) -> tuple[Config, ...]:
        """Return the default configuration, then the other number of warps."""
        default = self.default()
        return default, self._config(_WARPS + _MORE_WARPS - default.num_warps)

    def _config(self, warps: int) -> Config:
        return SharedRowsConfig((("r", warps * 32 * self._word),), num_warps=warps, split=True)

    def _room(self) -> int:
        """Return the bytes of shared memory that a program has for its rows."""
        return self.task.device.shared_per_multiprocessor // _PROGRAMS - _RESERVED

    def _waits(self) -> bool:
        """Return whether blocks of a row wait for numbers from memory, such as the gains of a norm."""
        every = loads(*_values(self.looped))
        return any(self._row.symbol in index_symbols(load) for load in every if load not in self.held)

    def fit(self, config: Config) -> Config | None:
        """Return the configuration if the device has room for its rows."""
        return config if self.room(config) <= self.blocked.device.shared_per_program else None

    def room(self, config: Config) -> int:
        """Return the bytes of the rows that a program holds."""
        return self._blocks(config) * config.block("r") * sum(load.dtype.itemsize for load in self.held)

    def _blocks(self, config: Config) -> int:
        """Return the number of blocks of a row, wherever it begins within a word."""
        return -(-int(self._row.reach) // config.block("r"))

    def functions(self, layout: Layout, writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
        """Return the function of the kernel."""
        kernel, constants = layout.blocked.kernel, list(layout.constants)
        reserved = [kernel.name, *constants, _LAYOUT, "gl", "gluon", "hopper", *prelude.FUNCTIONS]
        names = [*map(argument, kernel.params), *(size.name for size in kernel.sizes)]
        values = writer.values(layout, Identifiers([*names, *reserved]))
        self.open(Body(values))
        head = signature(kernel, kernel.name, {}, constants)
        return [launched_function(head, _in_gluon(values.scopes[0].lines), writer.device, "gluon.jit")]

    def open(self, body: Body) -> None:
        """Add the lines of a program: it copies its rows, then computes them block by block."""
        values = body.values
        body.assign_block()
        layout = compose("gl.BlockedLayout([{}], [32], [{}], [0])", self._word, values.layout.config.num_warps)
        values.line("{}: tl.constexpr = {}", _LAYOUT, layout)
        for load in self.held:
            self._copy(values, load)
        values.line("hopper.async_copy.commit_group()")
        for load in loads_of_the_row(values):  # while the row is on its way
            values.load_now(load)
        values.line("hopper.async_copy.wait_group(0)")
        body.statements()

    def _copy(self, values: Values, load: Load) -> None:
        """Add the lines that begin to copy a row; from now on its blocks are read there."""
        row, config = self._row, values.layout.config
        name = values.fresh(f"{load.buffer}_row", values.depth)
        of_type = str(load.dtype).removeprefix("torch.")
        shape = compose("[{}, {}]", self._blocks(config), row.constant)
        allocated = "{} = gl.allocate_shared_memory(gl.{}, {}, gl.SwizzledSharedLayout(1, 1, 1, [0]))"
        values.line(allocated, name, of_type, shape)
        start = values.open("r0")
        values.starts[row] = start
        values.emitters[load] = lambda: self._block_of(values, name)
        pointer, word = values.pointer(load.buffer, load.index[0]), word_load(values.layout.blocked, load)
        mask = values.masks(pointer.dims) if word is None else values.mask(*word)
        masked = [] if mask is None else [compose("mask={}", mask.code)]
        arguments = listed([self._block(values, name), pointer.code, *masked])
        values.line("hopper.async_copy.async_copy_global_to_shared({})", arguments)
        values.close("for {} in range(0, {}, {}):", start, int(row.reach), row.constant)

    def _block(self, values: Values, name: str) -> Code:
        return compose("{}.index({} // {})", name, values.starts[self._row], self._row.constant)

    def _block_of(self, values: Values, name: str) -> Tile:
        """Return the current block of a row."""
        return Tile(compose("{}.load({})", self._block(values, name), _LAYOUT), (self._row,), values.depth)


def _in_loops(task: Task) -> Blocked | Refused:
    """Return a kernel as loops over blocks of a row, without running values."""
    held = task.blocked.dims[1].role is Role.WHOLE
    kernel = apart(in_blocks(task.kernel) if held else task.kernel)
    if kernel is None:
        return Refused("its running values depend on earlier ones")
    looped = block(kernel, task.device)
    if [(dim.name, dim.role) for dim in looped.dims] != [("x", Role.GRID), ("r", Role.LOOP)]:
        return Refused("its rows are not contiguous")
    return looped


def _values(blocked: Blocked) -> list[Expr]:
    """Return all expressions of a kernel."""
    return [value for stmt in statements(blocked.body) for value in values_of(stmt)]


def _read_again(blocked: Blocked) -> tuple[Load, ...]:
    """Return the loads of rows that are contiguous from the start of a word, and read by several loops."""
    stored, counts = {stmt.param for stmt in statements(blocked.body, Store)}, Counter[Load]()
    for loop in (stmt for stmt in blocked.body if isinstance(stmt, Loop)):
        counts.update(set(loads(*(value for stmt in loop.body for value in values_of(stmt)))))
    again = (load for load, count in counts.items() if count > 1 and load.buffer not in stored)
    return tuple(load for load in again if _is_row(blocked, load))


def _is_row(blocked: Blocked, load: Load) -> bool:
    """Return whether a load is of a row of its own for each program, of whole words."""
    x, r = (dim.symbol for dim in blocked.dims)
    index = load.index[0]
    if isinstance(index, Expr) or load.mask is not None or not {x, r} <= index_symbols(load):
        return False
    if load.dtype not in _HELD:
        return False
    return starts_with_word(blocked.kernel.param(load.buffer), index, blocked.dims[1])


_ARANGE = re.compile(r"tl\.arange\((0, \w+)\)")
_NUMBER = re.compile(r"tl\.full\(\[\], ")
_FULL = re.compile(r"tl\.full\((\[\w+\], (?:[^()]|\([^()]*\))*)\)")


def _in_gluon(lines: Sequence[Code]) -> list[Code]:
    """Return lines of Triton as lines of Gluon, in which tiles are created with a layout."""

    def converted(text: str) -> str:
        text = _NUMBER.sub("tl.cast(", _ARANGE.sub(rf"gl.arange(\1, {_LAYOUT})", text))
        return _FULL.sub(rf"gl.full(\1, {_LAYOUT})", text)

    return [replace(line, text=converted(line.text)) for line in lines]
