"""Names: folds under names that follow from their order alone: what is found for a layer holds for those like it.

Input: folds; output: the same ones over buffers `in0, in1, …` and tiles `t0, t1, …`, and the way back.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion.lowering.expr import Expr, Load, TileRef, postorder, rewrite
from fusion.lowering.kernel import Fold, values_of


@dataclass(frozen=True, slots=True)
class Names:
    """Names of buffers and of tiles, each with the one that takes its place."""

    buffers: Mapping[str, str]
    tiles: Mapping[str, str]

    @classmethod
    def plain(cls, folds: Sequence[Fold]) -> Names:
        """Names by order of appearance for what `folds` are called and made of."""
        values = postorder(*(value for fold in folds for value in values_of(fold)))
        buffers = dict.fromkeys(node.buffer for node in values if isinstance(node, Load))
        tiles = dict.fromkeys(node.name for node in values if isinstance(node, TileRef))
        tiles.update(dict.fromkeys(fold.name for fold in folds))
        return cls({name: f"in{k}" for k, name in enumerate(buffers)}, {name: f"t{k}" for k, name in enumerate(tiles)})

    def back(self, made: Mapping[str, str]) -> Names:
        """The way back.

        Args:
            made: names of tiles that were added, each with what it is called there.
        """
        buffers, tiles = ({new: old for old, new in names.items()} for names in (self.buffers, self.tiles))
        return Names(buffers, {**tiles, **made})

    def text(self, sentence: str) -> str:
        """A sentence about tiles, with these names of them."""
        return re.sub(r"\bt\d+(?=_|\b)", lambda found: self.tiles.get(found[0], found[0]), sentence)

    def values(self, values: Sequence[Expr]) -> tuple[Expr, ...]:
        """Expressions under these names."""

        def rule(node: Expr) -> Expr | None:
            if isinstance(node, Load):
                return Load(self.buffers[node.buffer], node.index, node.dtype, node.mask)
            return TileRef(self.tiles[node.name], node.dtype, node.before) if isinstance(node, TileRef) else None

        return tuple(rewrite(values, rule))

    def fold(self, fold: Fold) -> Fold:
        """A fold under these names."""
        *args, carry = self.values((*fold.args, fold.ref if fold.carry is None else fold.carry))
        name = self.tiles[fold.name]
        return replace(fold, name=name, args=tuple(args), carry=None if fold.carry is None else carry)
