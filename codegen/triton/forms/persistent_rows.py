"""Generates persistent kernels that fold long rows, each held in registers while the next ones are prefetched.

Where the registers of a multiprocessor hold one row, nothing else runs there while it is folded: memory waits for
arithmetic, and arithmetic for memory.  A persistent program prefetches the next rows into shared memory meanwhile.

Rows with little arithmetic are faster with a program each, which copies nothing through shared memory: the stores of
one overlap the loads of another.  (measured: docs/performance.md, `persistent_rows`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from typing_extensions import Self

from fusion.codegen.price import additions_of
from fusion.codegen.triton.blocks import Config, extent, power_of_two
from fusion.codegen.triton.blocks.rows import starts_at_words
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.devices import speeds
from fusion.codegen.triton.expressions.code import compose
from fusion.codegen.triton.expressions.indices import Layout, lay_out
from fusion.codegen.triton.forms.form import Refused, Task
from fusion.codegen.triton.forms.rows import Rows
from fusion.codegen.triton.forms.traffic import streams
from fusion.codegen.triton.writer import Writer, loads_of_the_row
from fusion.lowering.indexing import coefficient
from fusion.lowering.ir.expr import Expr, Load, index_symbols, loads, postorder
from fusion.lowering.ir.kernel import Fold, Role, Stmt, Store, statements, values_of

_STAGES = 3
"""Rows that a program has at once: one in registers, the others on their way into shared memory."""

_LEAST_ROWS = 4
"""The fewest rows per multiprocessor that are worth a pipeline."""

_ELEMENTS = 32
"""Elements of a row per thread of the largest program from which on a multiprocessor holds one row."""


@dataclass(frozen=True, slots=True)
class PersistentRowsConfig(Config):
    """A configuration of persistent rows."""

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        return ["persistent"]


@dataclass(frozen=True)
class PersistentRows(Rows):
    """The plan for rows of which a multiprocessor holds one."""

    name = "persistent rows"
    takes = (PersistentRowsConfig,)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept many rows that fill the registers of a multiprocessor, alone in their launch, at aligned addresses."""
        plan = super().applies(task)
        if isinstance(plan, Refused):
            return plan
        kernel, dims = task.kernel, task.blocked.dims
        if [(dim.name, dim.role) for dim in dims] != [("x", Role.GRID), ("r", Role.WHOLE)]:
            return Refused("it does not hold one row")
        if kernel.beside or kernel.then is not None:
            return Refused("it is launched with others")
        rows, length = (extent(dim.size) for dim in dims)
        if power_of_two(length) < _ELEMENTS * task.device.threads_per_program:
            return Refused("a multiprocessor holds several rows")
        if rows < _LEAST_ROWS * task.device.multiprocessors:
            return Refused("there are too few rows")
        if plan._tiles_kept() > 1:
            return Refused("more than one tile waits for the folds, which leaves too few registers")
        if plan.room(plan.default()) > task.device.shared_per_program:
            return Refused("its rows exceed shared memory")
        return plan if plan._are_copied() else Refused("its rows start off words of 16 bytes")

    def _are_copied(self) -> bool:
        """Return whether each loaded row is contiguous at a multiple of 16 bytes, as asynchronous copies require."""
        (x, r), kernel, rows = self.blocked.dims, self.blocked.kernel, self._rows_read()
        offsets = [(load.buffer, load.index[0]) for load in rows]
        return bool(rows) and all(
            not isinstance(offset, Expr)
            and coefficient(offset, r.symbol) == 1
            and starts_at_words(kernel, name, offset, (x.symbol,))
            for name, offset in offsets
        )

    def _rows_read(self) -> list[Load]:
        """Return the loads from large tensors that depend on the row and on the position in it."""
        x, r = (dim.symbol for dim in self.blocked.dims)
        large = {param.name for param in streams(self.blocked)}
        every = loads(*(value for stmt in statements(self.blocked.body) for value in values_of(stmt)))
        return [load for load in dict.fromkeys(every) if load.buffer in large and {x, r} <= index_symbols(load)]

    def _tiles_kept(self) -> int:
        """Return the number of tiles that both folds and stores read, and that are therefore kept in registers.

        Two such tiles spill (measured: docs/performance.md, `persistent_rows`).
        """
        (_, r), held, seen = self.blocked.dims, set[Expr](), set[Expr]()
        folded = {node for fold in statements(self.blocked.body, Fold) for node in postorder(*fold.args)}
        along = _varying(self.blocked.body, r.symbol)
        pending = [stmt.value for stmt in statements(self.blocked.body, Store)]
        while pending:
            node = pending.pop()
            if node in folded and node in along:
                held.add(node)
            elif node not in seen:
                seen.add(node)
                pending.extend(node.children())
        return len(held)

    @property
    def slower(self) -> str:
        """Return why a program for each row is likely to be faster; empty if it is not."""
        (_, r), device = self.blocked.dims, self.blocked.device
        length, measured = extent(r.size), speeds(device)
        moved = sum(extent(param.extent) * param.dtype.itemsize for param in streams(self.blocked))
        arithmetic = 2 * self._additions() * length * extent(self.blocked.dims[0].size) / measured.flops
        return "" if arithmetic > measured.exposed * moved / measured.bandwidth else "other rows hide its arithmetic"

    def _additions(self) -> float:
        """Return the cost of an element of a row, in additions."""
        _, r = self.blocked.dims
        folds = sum(1 for _ in statements(self.blocked.body, Fold))
        return folds + sum(additions_of(node) for node in _varying(self.blocked.body, r.symbol))

    def default(self) -> Config:
        """Return the default configuration."""
        held = super().default()
        return PersistentRowsConfig(held.blocks, num_warps=held.num_warps, num_stages=_STAGES)

    def configs(self) -> tuple[Config, ...]:
        """Return the default configuration, and one with half as many warps."""
        default = self.default()
        return default, replace(default, num_warps=default.num_warps // 2)

    def fit(self, config: Config) -> Config | None:
        """Return the configuration if the device has room for its stages."""
        return config if self.room(config) <= self.blocked.device.shared_per_program else None

    def room(self, config: Config) -> int:
        """Return the bytes of the rows that are in flight."""
        waiting = max(1, config.num_stages - 1)
        return waiting * sum(load.dtype.itemsize * config.block("r") for load in self._rows_read())

    def lay_out(self, config: Config, writer: Writer) -> Layout:
        """Return the layout of the kernel, whose programs compute several rows.

        No address or mask of a row is kept from one row to the next: the registers hold the row.
        """
        layout = lay_out(self.blocked, config, within_limit=writer.within_limit, grid_depth=1)
        return replace(layout, depth=dict.fromkeys(layout.depth, 1))

    def open(self, body: Body) -> None:
        """Add the lines of a program: a loop over rows, in steps of the number of programs."""
        values, (x, _) = body.values, self.blocked.dims
        rows = values.index_tile(x.size).code
        first, number = values.program, values.open("xi")
        values.starts[x] = compose("tl.cast({}, tl.int64)", number) if x in values.layout.wide else number
        for load in loads_of_the_row(values):  # the row itself is on its way already
            values.load_now(load)
        body.statements()
        stages = values.layout.config.num_stages
        values.close("for {} in tl.range({}, {}, tl.num_programs(0), num_stages={}):", number, first, rows, stages)

    def per_multiprocessor(self, config: Config) -> int:
        """Return the number of persistent programs per multiprocessor."""
        return 1


def _varying(body: Sequence[Stmt], along: sympy.Symbol) -> set[Expr]:
    """Return the expressions in a body that vary along a dimension."""
    varies: dict[Expr, bool] = {}
    for node in postorder(*(value for stmt in statements(body) for value in values_of(stmt))):
        varies[node] = along in index_symbols(node) or any(varies[child] for child in node.children())
    return {node for node, does in varies.items() if does}
