"""Defines `Config`: the tile sizes and launch parameters of a kernel.

Input: block dimensions and a `Config`; output: the number of blocks of the result, and the share of the device that
they keep busy.  A form (`forms`) lists the configurations it supports and adds parameters of its own in a subclass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import sympy

from fusion.codegen.triton.blocks.dims import Blocked
from fusion.lowering.ir.sizes import with_values

_UNKNOWN = 1 << 20  # assumed for a symbolic size: most are large


@dataclass(frozen=True, slots=True)
class Config:
    """One way to launch a kernel: the parameters that all forms share.

    Attributes:
        blocks: (dimension name, elements per program or loop step); powers of two.  Others have blocks of 1.
        num_warps: warps per program.
        num_stages: stages of the software pipeline of a loop; 1: no pipeline.
        group: contractions only: blocks of rows that run together and share the columns they load in the L2 cache.
        tf32: contractions only: float32 operands may be rounded to 19 bits.
        split: a loop becomes two, one of them over the blocks in which its condition holds and nothing is masked.
        registers: the most per thread, for higher occupancy; 0: the compiler decides.
        unrolled: contractions only: blocks of the summed axis in one step of the loop.
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int = 4
    num_stages: int = 1
    group: int = 8
    tf32: bool = False
    split: bool = False
    registers: int = 0
    unrolled: int = 1

    def block(self, name: str) -> int:
        """Return the length of a block of the dimension `name`; 1 where the configuration does not name it."""
        return dict(self.blocks).get(name, 1)

    def parameters(self) -> list[str]:
        """Describe the parameters that only this form has, one string each."""
        return []


def describe(config: Config) -> str:
    """Describe a configuration in words.

    >>> describe(Config((("x", 1), ("r", 4096)), num_warps=8))
    'r 4096, 8 warps'
    """
    words = [f"{name} {size}" for name, size in config.blocks if size > 1]
    words.append("1 warp" if config.num_warps == 1 else f"{config.num_warps} warps")
    words += [f"{config.num_stages} stages"] if config.num_stages > 1 else []
    words += config.parameters()
    words += [f"{config.unrolled} steps at once"] if config.unrolled > 1 else []
    words += ["split"] if config.split else []
    words += [f"{config.registers} registers"] if config.registers else []
    return ", ".join(words)


def extent(size: sympy.Expr) -> int:
    """Return a size as a number; a symbolic size is assumed to be large."""
    return int(size) if size.is_Integer else _UNKNOWN


def power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`.

    >>> power_of_two(0), power_of_two(5), power_of_two(8)
    (1, 8, 8)
    """
    return 1 << max(0, size - 1).bit_length()


def full_rounds(blocks: int, slots: int) -> float:
    """Return the share of the device that `blocks` keep busy, of which `slots` run at once.

    >>> full_rounds(264, 132), full_rounds(198, 132)
    (1.0, 0.75)
    """
    return blocks / (slots * -(-blocks // slots)) if blocks else 1.0


def keeps_busy(blocked: Blocked, config: Config) -> bool:
    """Return whether there are blocks for at least seven of ten multiprocessors."""
    return programs(blocked, config) * 10 >= blocked.device.multiprocessors * 7


def programs(blocked: Blocked, config: Config, known: Mapping[sympy.Symbol, int] = MappingProxyType({})) -> int:
    """Return the number of blocks of the result; symbolic sizes that are not `known` are assumed to be large."""
    count = 1
    for dim in blocked.grid():
        count *= -(-extent(with_values(dim.size, known)) // config.block(dim.name))
    return count
