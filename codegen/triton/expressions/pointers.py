"""Writes the addresses of elements and the corners of blocks, as lines of Triton.

Input: a parameter with an offset over linear indices, or a transfer through a descriptor; output: a tile of addresses,
or the coordinates of the block.
"""

from __future__ import annotations

from abc import abstractmethod

import sympy

from fusion.codegen.triton.blocks import Dim
from fusion.codegen.triton.expressions.code import ATOM, SUM, Code, as_code, compose, listed
from fusion.codegen.triton.expressions.indices import Layout, expand
from fusion.codegen.triton.expressions.points import Points
from fusion.codegen.triton.expressions.scopes import Identifiers, Tile, Transfer
from fusion.lowering.ir.expr import Expr


class Pointers(Points):
    """Emits addresses as lines of a kernel."""

    def __init__(self, layout: Layout, names: Identifiers) -> None:
        super().__init__(layout, names)
        self.chosen: dict[str, str] = {}  # parameter → the pointer that a branch has chosen in its place

    @abstractmethod
    def value(self, root: Expr) -> Tile:
        """Return the value of an expression, such as an offset that is loaded."""

    def pointer_name(self, param: str) -> str:
        """Return the name of the pointer to a parameter."""
        return self.chosen.get(param, f"{param}_ptr")

    def pointer(self, param: str, offset: sympy.Expr | Expr) -> Tile:
        """Return the addresses `param + offset`; loop-invariant terms are added before the loop."""
        pointer = Tile(as_code(self.pointer_name(param)))
        if isinstance(offset, Expr):
            return self._advance(pointer, self.value(offset))
        for part in self.layout.summands(offset):
            if part == 0:
                continue
            step = self.index_tile(part)
            if step.depth > pointer.depth and pointer.code.binds != ATOM:
                key = ("pointer", pointer.code.text)
                pointer = self.find(key) or self.bind(key, self.name(f"{param}_at", pointer))
            pointer = self._advance(pointer, step)
        return pointer

    def block_corner(self, transfer: Transfer) -> tuple[tuple[Dim, ...], Code, str]:
        """Return the dimensions of a transfer in tile order, its corner, and the template that transposes its block."""
        rows, columns = transfer.rows, transfer.columns
        dims = self.join(((rows,), (columns,)))
        coordinates = [dim for dim in (transfer.batch, rows, columns) if dim is not None]
        corner = transfer.corner or compose("[{}]", listed(self._coordinate(dim) for dim in coordinates))
        return dims, corner, "{}" if dims[0] is rows else "{}.T"

    def _coordinate(self, dim: Dim) -> Code:
        """Return the start of a transfer along `dim`: an int32, whatever type offsets have."""
        start = self.starts.get(dim, Code("0"))
        return compose("tl.cast({}, tl.int32)", start) if dim in self.layout.wide and start.is_name else start

    def _advance(self, pointer: Tile, step: Tile) -> Tile:
        dims = self.join((pointer.dims, step.dims))
        base, added = expand(pointer.code, pointer.dims, dims).at(SUM), expand(step.code, step.dims, dims).at(SUM + 1)
        code = listed([base, added.negated or added], " - " if added.negated else " + ", SUM)
        return Tile(code, dims, max(pointer.depth, step.depth))
