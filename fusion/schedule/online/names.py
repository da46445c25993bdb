"""Gives folds canonical names, by order alone, so that a result for one layer holds for equal ones.

Input: folds; output: the same folds over buffers `in0, in1, …` and tiles `t0, t1, …`, and the inverse renaming.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.lowering.ir.expr import Expr, Load, TileRef, postorder, rewrite
from fusion.lowering.ir.kernel import Fold, values_of


@dataclass(frozen=True, slots=True)
class Renaming:
    """A renaming of buffers and of tiles."""

    buffers: Mapping[str, str]
    tiles: Mapping[str, str]

    @classmethod
    def plain(cls, folds: Sequence[Fold]) -> Renaming:
        """Return canonical names by order of appearance in `folds`."""
        values = postorder(*(value for fold in folds for value in values_of(fold)))
        buffers = dict.fromkeys(node.buffer for node in values if isinstance(node, Load))
        tiles = dict.fromkeys(node.name for node in values if isinstance(node, TileRef))
        tiles.update(dict.fromkeys(fold.name for fold in folds))
        return cls({name: f"in{k}" for k, name in enumerate(buffers)}, {name: f"t{k}" for k, name in enumerate(tiles)})

    def back(self, added: Mapping[str, str]) -> Renaming:
        """Return the inverse renaming.

        Args:
            added: added tiles → their names.
        """
        buffers, tiles = ({new: old for old, new in names.items()} for names in (self.buffers, self.tiles))
        return Renaming(buffers, {**tiles, **added})

    def text(self, sentence: str) -> str:
        """Rename the tiles in a sentence."""
        return re.sub(r"\bt\d+(?=_|\b)", lambda match: self.tiles.get(match[0], match[0]), sentence)

    def values(self, values: Sequence[Expr]) -> tuple[Expr, ...]:
        """Rename expressions."""

        def rule(node: Expr) -> Expr | None:
            if isinstance(node, Load):
                return Load(self.buffers[node.buffer], node.index, node.dtype, node.mask)
            return TileRef(self.tiles[node.name], node.dtype, node.before) if isinstance(node, TileRef) else None

        return tuple(rewrite(values, rule))

    def fold(self, fold: Fold) -> Fold:
        """Rename a fold."""
        *args, carry = self.values((*fold.args, fold.ref if fold.carry is None else fold.carry))
        name = self.tiles[fold.name]
        return replace(fold, name=name, args=tuple(args), carry=None if fold.carry is None else carry)
