"""Defines the configuration of alternating products, and computes the shared memory of their results."""

from __future__ import annotations

from dataclasses import dataclass

from fusion.codegen.triton.blocks import Blocked, Config
from fusion.codegen.triton.devices import Device, PersistentShape, speeds
from fusion.codegen.triton.expressions.matrices import Matrix
from fusion.codegen.triton.forms.warp_groups import groups
from fusion.codegen.triton.products.descriptors import loaded_tiles
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.kernel import Store

GROUPS = 2
"""The groups of warps that compute; one more warp loads."""

BLOCKS = GROUPS
"""The blocks in which tiles arrive and results leave: one of each group, or if there are two tiles, one of each tile,
which the groups use in turn.  Beside more of them there is memory for three stages of operands.
(measured: docs/performance.md, `BLOCKS`)"""

HALF = 2
"""Bytes of an element of a result that leaves through shared memory."""


@dataclass(frozen=True, slots=True)
class AlternatingConfig(Config):
    """A configuration of an alternating product."""

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        return ["persistent", f"{GROUPS} groups in turn"]


def configurations(device: Device) -> dict[AlternatingConfig, PersistentShape]:
    """Return the configurations of a device, each with its speed; none where it has no groups of warps."""
    return {_config(shape): shape for shape in speeds(device).persistent.alternating}


def _config(shape: PersistentShape) -> AlternatingConfig:
    blocks = (("m", shape.m), ("k", shape.k), ("n", shape.n))
    return AlternatingConfig(blocks, shape.warps, shape.stages, registers=groups.registers(GROUPS, shape.warps))


def columns(device: Device) -> int:
    """Return the columns of a block, of which there are as many in each configuration."""
    (width,) = {config.block("n") for config in configurations(device)}
    return width


def staged(blocked: Blocked, config: Config) -> int:
    """Return the bytes of the blocks of both groups in which tiles arrive and results leave."""
    used = bool(leaving(blocked) or arriving(blocked))
    return BLOCKS * config.block("m") * config.block("n") * HALF * used


def leaving(blocked: Blocked) -> list[Store]:
    """Return the results that leave through shared memory: of 16 bits, and all of the type of the first one.

    Wider ones leave from the registers: the threads that hold a row of a block fill a sector of memory.
    """
    narrow = [stmt for stmt in blocked.body if isinstance(stmt, Store) and stmt.value.dtype.itemsize == HALF]
    return [stmt for stmt in narrow if stmt.value.dtype is narrow[0].value.dtype]


def arriving(blocked: Blocked) -> dict[Load, Matrix]:
    """Return the tiles of the epilogue that arrive while its block is multiplied, at most `BLOCKS`.

    Results leave from the memory of the first one; all are of one type.
    """
    stores = leaving(blocked)
    tiles = loaded_tiles(blocked)
    inside = [load for load, matrix in tiles.items() if matrix.rows.name == "m" and matrix.base == 0]
    dtypes = [value.dtype for value in (*(stmt.value for stmt in stores), *inside)][:1]
    alike = [load for load in inside if load.dtype in dtypes]
    return {load: tiles[load] for load in alike[:BLOCKS]}
