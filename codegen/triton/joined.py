"""Joined: products of the same rows are one walk over the blocks of all their columns.

What enters are the kernels of a launch, to all of which the persistent form applies (`descriptors`); what leaves are
the lines of one function.  A block of columns belongs to one product, which says where it is fetched from and stored:

    columns = in1_desc
    result = out0_desc
    first = 0
    if n_block >= 8:
        columns = in2_desc
        result = out1_desc
        first = 8
    n0 = (n_block - first) * NBLOCK
    …
        in1 = columns.load([n0, k0]).T
        dot0 = tl.dot(in0, in1, dot0)
    result.store([m0, n0], dot0.to(tl.bfloat16))

Kernels that take their blocks one after the other (`beside`) wait for the last block of one before they fetch for the
next, and make the descriptor of the rows again.  (H200, three products of one operand, 3072 columns in all: 79.1 µs for
4096 × 2048 instead of 82.0, 83.0 for 8192 × 1024 instead of 84.7.)

A branch behind the sum instead of these names would have each step of the sum wait for the one before it.

The rule, all of it in `products_of`: the products have the rows, the sum and the way in which matrices lie in common;
each has one result, computed in the same way of what comes through descriptors alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.codegen.triton.blocks import Blocked, block
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.devices import Device
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Matrix
from fusion.codegen.triton.expressions.scopes import Tile, Transfer
from fusion.codegen.triton.expressions.spell import SUM, Code
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.products import descriptors
from fusion.codegen.triton.products.place import begin, blocks_of, swizzled
from fusion.lowering.expr import Cast, Const, Expr, Load, Op, TileRef, loads, postorder, rewrite
from fusion.lowering.kernel import Fold, Kernel, Loop, Store, loaded, stored, values_of

# The rule -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Moves:
    """What one product moves through descriptors: its operands, tiles loaded for its end, its result."""

    rows: Load
    columns: Load
    tiles: tuple[Load, ...]
    store: Store
    of_rows: Matrix
    of_columns: Matrix
    of_tiles: tuple[Matrix, ...]
    of_result: Matrix


def products_of(kernels: Sequence[Kernel], device: Device) -> tuple[Kernel, ...]:
    """The products of several kernels of one launch, each as a kernel, if they are one walk; else none."""
    if not all(descriptors.applies(block(kernel, device)) for kernel in kernels):
        return ()
    products = tuple(product for kernel in kernels for product in _apart(kernel))
    found = [block(product, device) for product in products]
    if not all(len(each.dots) == 1 and descriptors.allows(each) for each in found):
        return ()
    common = {_common(each) for each in found}
    return products if len(common) == 1 and None not in common else ()


def _apart(kernel: Kernel) -> tuple[Kernel, ...]:
    """The products of a kernel, each with the results that it leads to; the kernel, where these need several."""
    (loop,) = (stmt for stmt in kernel.body if isinstance(stmt, Loop))
    stores = [stmt for stmt in kernel.body if isinstance(stmt, Store)]
    leading = [{node for node in postorder(*values_of(store)) if isinstance(node, TileRef)} for store in stores]
    folds = [fold for fold in loop.body if isinstance(fold, Fold)]
    if loaded(kernel) & stored(kernel) or {frozenset(refs) for refs in leading} != {frozenset({f.ref}) for f in folds}:
        return (kernel,)
    found = []
    for fold in folds:
        own = [store for store, refs in zip(stores, leading, strict=True) if fold.ref in refs]
        product = replace(kernel, body=(replace(loop, body=(fold,)), *own))
        touched = loaded(product) | stored(product)
        found.append(replace(product, params=tuple(param for param in kernel.params if param.name in touched)))
    return tuple(found)


def _moves(blocked: Blocked) -> _Moves | None:
    """What a product moves, where it has one result, for which nothing is loaded otherwise."""
    operands: dict[str, tuple[Load, Matrix]] = {}
    for factor, (first, second) in descriptors.factors(blocked):
        matrix = descriptors.matrix_of(blocked, factor, first, second) if isinstance(factor, Load) else None
        assert isinstance(factor, Load) and matrix is not None, "asked of a kernel that `allows` refuses"
        operands["n" if "n" in (first.name, second.name) else "m"] = factor, matrix
    stores = [stmt for stmt in blocked.body if isinstance(stmt, Store)]
    target = descriptors.target_of(blocked, stores[0]) if len(stores) == 1 else None
    described = descriptors.loaded_tiles(blocked)
    tiles = tuple(dict.fromkeys(loads(*values_of(stores[0]))))
    if target is None or not all(tile in described for tile in tiles):
        return None
    matrices = tuple(described[tile] for tile in tiles)
    (rows, of_rows), (columns, of_columns) = operands["m"], operands["n"]
    return _Moves(rows, columns, tiles, stores[0], of_rows, of_columns, matrices, target)


def _common(blocked: Blocked) -> object:
    """What the products of one walk have in common; None for one that is walked alone."""
    moves, (dot,) = _moves(blocked), blocked.dots
    if moves is None or any(dim.name == "b" for dim in blocked.dims):
        return None
    numbers: dict[Expr, Expr] = {tile: TileRef(f"tile{number}", tile.dtype) for number, tile in enumerate(moves.tiles)}
    numbers[dot.ref] = TileRef("sum", dot.dtype)
    (value,) = rewrite((moves.store.value,), numbers.get)
    if not all(isinstance(node, TileRef | Const | Cast | Op) for node in postorder(value)):
        return None
    rows = moves.of_rows
    lying = tuple(matrix.rows.name for matrix in (rows, moves.of_columns, *moves.of_tiles, moves.of_result))
    sizes = tuple(dim.size for dim in blocked.dims if dim.name in ("m", "k"))
    dtypes = (moves.rows.dtype, moves.columns.dtype, blocked.kernel.param(moves.store.param).dtype)
    return value, rows.param, rows.stride, rows.base, lying, sizes, dtypes


# Lines ----------------------------------------------------------------------------------------------------------------


def lines(values: Values, layouts: Sequence[Layout]) -> list[str]:
    """The lines of one function that computes these products; `values` writes the expressions of the first."""
    products = [moves for layout in layouts if (moves := _moves(layout.blocked)) is not None]
    assert len(products) == len(layouts), "asked of products that `products_of` refuses"
    own = products[0]
    m, n = map(layouts[0].blocked.named, ("m", "n"))
    values.load_through[own.rows] = descriptors.describe(values, own.of_rows, layouts[0])
    m_blocks = blocks_of(values, m)
    choices: list[list[Transfer]] = []
    limits: list[str] = []
    for layout, moves in zip(layouts, products, strict=True):
        end = layout.in_parts(layout.blocked.named("n"))
        choices.append([descriptors.describe(values, moves.of_columns, layout)])
        choices[-1] += [descriptors.describe(values, matrix, end) for matrix in (*moves.of_tiles, moves.of_result)]
        count = blocks_of(values, layout.blocked.named("n"))
        limits.append(values.name("n_end", Tile(Code(f"{limits[-1]} + {count}"))).code.text if limits else count)
    number = values.open("block")
    m_block, n_block = swizzled(values, number, m_blocks, limits[-1])
    columns, *tiles, result, first = _select(values, choices, n_block, limits)
    for load, transfer, name in zip((own.columns, *own.tiles), choices[0], (columns, *tiles), strict=False):
        values.load_through[load] = replace(transfer, name=name)
    values.store_through[own.store.param] = replace(choices[0][-1], name=result)
    begin(values, m, Code(m_block))
    begin(values, n, Code(f"{n_block} - {first}", SUM))
    Body(values).block()
    values.close(descriptors.walk_over(values, number, f"{m_blocks} * {limits[-1]}"))
    return values.scopes[0].lines


def _select(
    values: Values, choices: Sequence[Sequence[Transfer]], n_block: str, limits: Sequence[str]
) -> tuple[str, ...]:
    """Add the lines that find the product of a block of columns; names of its descriptors, and of its first block."""
    tiles = ["tile"] * (len(choices[0]) - 2)
    names = tuple(values.fresh(wish, values.depth) for wish in ("columns", *tiles, "result", "first"))
    values.line("# The product that this block of columns belongs to.")
    for transfers, start in zip(choices, ("0", *limits[:-1]), strict=True):
        indent = "" if transfers is choices[0] else "    "
        if indent:
            values.line(f"if {n_block} >= {start}:")
        for name, chosen in zip(names, (*(transfer.name for transfer in transfers), start), strict=True):
            values.line(f"{indent}{name} = {chosen}")
    return names
