"""Describes chained products (attention) and how fast a target's own kernels and the library's compute them.

A device has a table of `ChainSpeed`, by the name of the form or of the library's kernel and the size of an element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from fusion.lowering.errors import Unsupported
from fusion.lowering.ir.expr import Cast, Expr
from fusion.lowering.ir.kernel import Fold, Stmt, map_statements
from fusion.lowering.ir.scalar_ops import HALVES

FORWARD = 2
"""The number of products in forward attention."""

GENERATED = "generated"
"""The form of a chained kernel that every target generates; other forms have target-specific names."""

Shares: TypeAlias = Mapping[int, tuple[float, float]]
"""Width of a head, at most → (forward, backward) efficiency, relative to the library's GEMMs of the same dtype.  Wider
heads run as fast as the widest.
"""

Loop: TypeAlias = Literal["plain", "skipping", "masked"]
"""A loop over all tiles; a loop that skips tiles, so that programs differ (`is_causal`, a window); a loop that reads a
mask for every score.
"""


@dataclass(frozen=True, slots=True)
class ChainShape:
    """The properties of chained products that decide their efficiency.

    Attributes:
        dtype: of the operands.
        width: of a head.
        loops: the properties of their loop; the least efficient one counts.
        columns: the columns that a row loops over, without skipped ones.
        backward: whether these are the products of backward.
        fetched: blocks that a step of the loop loads for each operand.
    """

    dtype: torch.dtype
    width: int
    loops: tuple[Loop, ...]
    columns: float
    backward: bool
    fetched: float = 1.0


@dataclass(frozen=True, slots=True)
class ChainSpeed:
    """The efficiency of a chained kernel, in the arithmetic of the tiles that it does not skip.

    Attributes:
        plain: of a loop over all tiles.
        skipping: of a loop that skips tiles.
        masked: of a loop that reads a mask.
        begins: the prologue and epilogue of a tile of rows in forward, in columns of its loop that take as long.
        begins_backward: the same in backward, with the kernels before and after it.
    """

    plain: Shares
    skipping: Shares
    masked: Shares
    begins: float = 0.0
    begins_backward: float = 0.0

    def scaled(self, factor: float) -> ChainSpeed:
        """Return the efficiencies relative to GEMMs that are slower by `factor`."""
        kinds = (self.plain, self.skipping, self.masked)
        plain, skipping, masked = ({w: (f * factor, b * factor) for w, (f, b) in kind.items()} for kind in kinds)
        return ChainSpeed(plain, skipping, masked, self.begins, self.begins_backward)

    def share(self, chain: ChainShape) -> float:
        """Return the efficiency of a chain; forward with few columns spends part of its time outside its loop.

        An operand that is computed in the loop from several blocks takes the room of these, each in flight: as many
        fewer programs share a multiprocessor, and hide less of each other's waiting.

        >>> speed = ChainSpeed({64: (0.9, 0.6)}, {64: (0.8, 0.5)}, {}, begins=256.0)
        >>> speed.share(ChainShape(torch.float32, 48, ("plain",), columns=256.0, backward=False))
        0.45
        >>> speed.share(ChainShape(torch.float32, 48, ("plain",), columns=256.0, backward=False, fetched=1.5))
        0.3
        >>> speed.share(ChainShape(torch.float32, 80, ("plain", "skipping"), columns=256.0, backward=True))
        0.5
        """
        tables: Mapping[Loop, Shares] = {"plain": self.plain, "skipping": self.skipping, "masked": self.masked}
        share = min(at_width(tables[loop], chain.width)[chain.backward] for loop in chain.loops)
        begins = self.begins_backward if chain.backward else self.begins
        return share / (1 + begins / chain.columns) / chain.fetched


def narrow_factors(factors: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return the factors of a product before they are widened, if both are 16-bit floats of one type; else as they are.

    Matrix units compute their product in float32, where it is exact.

    >>> from fusion.lowering.ir.expr import const
    >>> half = const(0.5, torch.bfloat16)
    >>> [factor.dtype for factor in narrow_factors([Cast(half, torch.float32)] * 2)]
    [torch.bfloat16, torch.bfloat16]
    """
    narrow = tuple(factor.arg for factor in factors if isinstance(factor, Cast) and factor.dtype is torch.float32)
    dtypes = {factor.dtype for factor in narrow}
    return narrow if len(narrow) == 2 and len(dtypes) == 1 and dtypes <= set(HALVES) else tuple(factors)


def with_narrow_factors(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return `body` with `narrow_factors` of its products."""

    def narrowed(stmt: Stmt) -> Stmt:
        if not isinstance(stmt, Fold) or stmt.op != "dot":
            return stmt
        return replace(stmt, args=narrow_factors(stmt.args))

    return map_statements(body, narrowed)


def at_width(shares: Shares, width: int) -> tuple[float, float]:
    """Look up the shares for heads of this width, or the next larger known one.

    >>> at_width({64: (0.5, 0.6), 128: (0.7, 0.7)}, 80)
    (0.7, 0.7)
    """
    return shares[min((limit for limit in shares if limit >= width), default=max(shares))]


def fastest(speeds: Mapping[tuple[str, int], ChainSpeed], names: Sequence[str], chain: ChainShape) -> float:
    """Return the highest efficiency at which kernels of these names compute a chain.

    Raises:
        Unsupported: none of them was measured with elements of this size.
    """
    size = chain.dtype.itemsize
    known = [speeds[name, size].share(chain) for name in names if (name, size) in speeds]
    if not known:
        raise Unsupported(f"nothing is known of the speed of {names[0]} attention in {chain.dtype}")
    return max(known)
