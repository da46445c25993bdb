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
    used = bool(leaving(blocked)) or arriving(blocked) is not None
    return GROUPS * config.block("m") * config.block("n") * HALF * used


def leaving(blocked: Blocked) -> list[Store]:
    """Return the results that leave through shared memory: of 16 bits, and all of the type of the first one.

    Wider ones leave from the registers: the threads that hold a row of a block fill a sector of memory.
    """
    narrow = [stmt for stmt in blocked.body if isinstance(stmt, Store) and stmt.value.dtype.itemsize == HALF]
    return [stmt for stmt in narrow if stmt.value.dtype is narrow[0].value.dtype]


def arriving(blocked: Blocked) -> tuple[Load, Matrix] | None:
    """Return the tile of the epilogue that arrives while its block is multiplied, where results leave afterwards."""
    stores = leaving(blocked)
    for load, matrix in loaded_tiles(blocked).items():
        alike = not stores or load.dtype is stores[0].value.dtype
        if alike and matrix.rows.name == "m" and matrix.base == 0:
            return load, matrix
    return None
