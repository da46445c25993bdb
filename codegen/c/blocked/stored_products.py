"""Decides which streamed products are accumulated in the tensor that they are stored to, without a tile.

A store copies the tile of a product (measured: docs/performance.md, `stored_products`).  Where it stores exactly the
product, row by row, to a tensor that the kernel does not read, the multiply-adds write their sums there themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from fusion.codegen.c.blocked.factors import ProductFactors
from fusion.codegen.c.blocked.scope import TileScope
from fusion.codegen.c.text.indices import index_text
from fusion.lowering.indexing import ONE, coefficient
from fusion.lowering.ir.expr import Expr, postorder
from fusion.lowering.ir.kernel import Fold, Kernel, Store, loaded, statements, values_of


@dataclass(frozen=True, slots=True)
class StoredProduct:
    """A product and its only reader, which stores it.

    Attributes:
        place: the C text of the first element of the current block in the tensor, and of the distance between its rows.
    """

    store: Store
    place: str


def stored_products(kernel: Kernel, scope: TileScope, products: ProductFactors) -> Mapping[str, StoredProduct]:
    """Return the products that need no tile, by name."""
    if not scope.blocks.streamed:
        return {}
    stores = list(statements(kernel.body, Store))
    targets = [store.param for store in stores]
    read = [node for stmt in statements(kernel.body) for root in values_of(stmt) for node in postorder(root)]
    found: dict[str, StoredProduct] = {}
    for fold in statements(kernel.body, Fold):
        own = [store for store in stores if store.value == fold.ref]
        if len(own) != 1 or read.count(fold.ref) != 1 or not products.begins(fold):
            continue
        (store,) = own
        if targets.count(store.param) > 1 or store.param in loaded(kernel):
            continue
        place = _place(fold, store, kernel, scope, products)
        if place is not None:
            found[fold.name] = StoredProduct(store, place)
    return found


def multiplied_there(fold: Fold, stored: StoredProduct, products: ProductFactors) -> list[str]:
    """Return the lines that accumulate a product in its tensor."""
    product = products.product(fold)
    lines, left = products.left(product)
    packed = products.packed_right(product)
    multiplied = products.multiply_into(product, stored.place, left, packed, fresh=products.begins(fold))
    return [*lines, *packed.lines, *multiplied]


def _place(fold: Fold, store: Store, kernel: Kernel, scope: TileScope, products: ProductFactors) -> str | None:
    """Return where the current block of a product is stored, if it is as it is and row by row."""
    product, offset = products.product(fold), store.offset
    plain = store.axes is None and store.where is None and kernel.param(store.param).dtype is fold.dtype
    if not plain or isinstance(offset, Expr) or product.deeper or product.others:
        return None
    if product.row is None or product.column is None:
        return None
    row, column = (coefficient(offset, symbol) for symbol in (product.row, product.column))
    if row is None or column != ONE:
        return None
    starts = {symbol: scope.blocks.of[symbol].extent.first for symbol in (product.row, product.column)}
    names = {**scope.names, **{start: start.name for start in starts.values() if isinstance(start, sympy.Symbol)}}
    position = index_text(sympy.expand_mul(offset.xreplace(starts)), names)
    return f"{scope.params[store.param]} + {position}, {index_text(row, names)}"


__all__ = ["StoredProduct", "multiplied_there", "stored_products"]
