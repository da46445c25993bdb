"""Joins products of the same rows into one loop over the blocks of all their columns.

All of them are persistent products.  A block of columns belongs to one product, which determines its descriptors:

    columns = in1_desc
    result = out0_desc
    first_block = 0
    if n_block >= 8:
        columns = in2_desc
        result = out1_desc
        first_block = 8
    n0 = (n_block - first_block) * NBLOCK
    …
        in1 = columns.load([n0, k0]).T
        dot0 = tl.dot(in0, in1, dot0)
    result.store([m0, n0], dot0.to(tl.bfloat16))

Kernels that compute their blocks in sequence (`side_by_side`) wait for the last block of one before they load for the
next, and create the descriptor of the rows again.  (measured: docs/performance.md, `joined`)

A branch after the sum instead of these names would make each step of the sum wait for the one before it.

The rule, all of it in `products_of`: the products have the rows, the sum and the layout of their matrices in common;
each has one result, computed in the same way from values that come through descriptors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from typing_extensions import Self

from fusion.codegen.triton.arguments import argument
from fusion.codegen.triton.blocks import Blocked, Config, block
from fusion.codegen.triton.body import Body
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.code import SUM, Code, as_code, compose
from fusion.codegen.triton.expressions.indices import Layout
from fusion.codegen.triton.expressions.matrices import Hosted, Matrix
from fusion.codegen.triton.expressions.scopes import Identifiers, Transfer
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.file import Launch, descriptor_comments, file_of, launched_function, signature
from fusion.codegen.triton.file import blocks_of as count_blocks
from fusion.codegen.triton.forms.form import Form, Refused, Task
from fusion.codegen.triton.forms.persistent_product import PersistentProduct
from fusion.codegen.triton.forms.persistent_product.config import PersistentConfig
from fusion.codegen.triton.forms.persistent_product.program import one_block, over_blocks
from fusion.codegen.triton.forms.persistent_product.rule import factors, refusal
from fusion.codegen.triton.forms.side_by_side.parts import parts_of
from fusion.codegen.triton.products import descriptors
from fusion.codegen.triton.products.block_order import blocks_of, start_block, swizzled
from fusion.codegen.triton.products.selection import column_ends, select
from fusion.codegen.triton.writer import Writer
from fusion.lowering.ir.expr import Cast, Const, Expr, Load, Op, TileRef, loads, postorder, rewrite
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Store, loaded, stored, values_of

# The rule -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JoinedProducts(Form):
    """The plan for products that are one loop over blocks.

    Attributes:
        products: the products, each as a kernel.
    """

    products: tuple[Kernel, ...]

    name = "joined products"
    takes: ClassVar[tuple[type[Config], ...]] = (PersistentConfig,)

    @classmethod
    def applies(cls, task: Task) -> Self | Refused:
        """Accept kernels that `products_of` decomposes."""
        products = products_of(task, task.kernel.parts) if task.kernel.beside else ()
        return cls(task, products) if products else Refused("it is not several products of the same rows")

    def configs(self) -> tuple[Config, ...]:
        """Return the best configuration common to all products."""
        writer = Writer(self.task.device, self.task.numerics, within_limit=False)
        return (self.layouts(writer)[0].config,)

    def layouts(self, writer: Writer) -> list[Layout]:
        """Return the layout of each product."""
        parts = parts_of(self.products, self.task.kernel.name, writer, joined=True)
        return [part.layout for part in parts]

    def emit(self, config: Config, writer: Writer) -> str | None:
        """Return a file whose launched function computes all products; descriptors are passed to it."""
        kernel, layouts = self.task.kernel, self.layouts(writer)
        limit = writer.limit(layouts)
        if writer.within_limit and limit is None:
            return None
        hosted: dict[str, Hosted] = {}
        functions = self.functions_of(layouts, writer, hosted)

        def blocks(name: str) -> list[str]:
            dims = ((layout, dim) for layout in layouts for dim in layout.blocked.grid() if dim.name == name)
            return [count_blocks(layout, dim) for layout, dim in dims]

        count = f"{blocks('m')[0]} * ({' + '.join(blocks('n'))})"
        constants, config = layouts[0].constants, layouts[0].config
        each = self.per_multiprocessor(config)
        launch = Launch(kernel, writer.device, config, constants, count, limit, hosted=hosted, per_multiprocessor=each)
        return file_of(launch, functions, strict=writer.numerics.strict)

    def functions_of(self, layouts: Sequence[Layout], writer: Writer, hosted: dict[str, Hosted]) -> list[Code]:
        """Return the functions of the file, of which the last is launched; add the descriptors it takes to `hosted`."""
        kernel, constants = self.task.kernel, list(layouts[0].constants)
        names = [*map(argument, kernel.params), *(size.name for size in kernel.sizes), *constants]
        values = writer.values(layouts[0], Identifiers([*names, kernel.name, *prelude.FUNCTIONS]))
        values.hosted = hosted
        lines = _lines(values, layouts)
        head = signature(kernel, kernel.name, descriptor_comments(hosted), constants)
        return [launched_function(head, lines, writer.device)]

    def per_multiprocessor(self, config: Config) -> int:
        """Return the number of programs per multiprocessor that the configuration states."""
        assert isinstance(config, PersistentConfig)
        return config.per_processor


@dataclass(frozen=True, slots=True)
class _Moves:
    """The transfers of one product through descriptors: its operands, tiles loaded by its epilogue, its result."""

    rows: Load
    columns: Load
    tiles: tuple[Load, ...]
    store: Store
    of_rows: Matrix
    of_columns: Matrix
    of_tiles: tuple[Matrix, ...]
    of_result: Matrix


def products_of(task: Task, kernels: Sequence[Kernel]) -> tuple[Kernel, ...]:
    """Return the products of several kernels of one launch, each as a kernel, if they can be one loop; else none."""
    tasks = [replace(task, kernel=kernel) for kernel in kernels]
    plans = [PersistentProduct.applies(each) for each in tasks]
    if any(isinstance(plan, Refused) or plan.slower for plan in plans):
        return ()
    products = tuple(product for each in tasks for product in single_products(each.kernel))
    blocked = [block(product, task.device) for product in products]
    if not all(len(each.dots) == 1 and not refusal(each) for each in blocked):
        return ()
    common = {_common(each) for each in blocked}
    return products if len(common) == 1 and None not in common else ()


def single_products(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return the products of a kernel, each with the results that use it; the kernel if a result uses several."""
    (loop,) = (stmt for stmt in kernel.body if isinstance(stmt, Loop))
    stores = [stmt for stmt in kernel.body if isinstance(stmt, Store)]
    leading = [{node for node in postorder(*values_of(store)) if isinstance(node, TileRef)} for store in stores]
    folds = [fold for fold in loop.body if isinstance(fold, Fold)]
    if loaded(kernel) & stored(kernel) or {frozenset(refs) for refs in leading} != {frozenset({f.ref}) for f in folds}:
        return (kernel,)
    products = []
    for fold in folds:
        own = [store for store, refs in zip(stores, leading, strict=True) if fold.ref in refs]
        product = replace(kernel, body=(replace(loop, body=(fold,)), *own))
        touched = loaded(product) | stored(product)
        products.append(replace(product, params=tuple(param for param in kernel.params if param.name in touched)))
    return tuple(products)


def _moves(blocked: Blocked) -> _Moves | None:
    """Return the transfers of a product that has one result and loads nothing else; else None."""
    operands: dict[str, tuple[Load, Matrix]] = {}
    for factor, (first, second) in factors(blocked):
        matrix = descriptors.matrix_of(blocked, factor, first, second) if isinstance(factor, Load) else None
        assert isinstance(factor, Load) and matrix is not None, "called for a kernel that is refused"
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
    """Return the properties that the products of one loop must share; None for a product that must be alone."""
    moves, (dot,) = _moves(blocked), blocked.dots
    if moves is None or any(dim.name == "b" for dim in blocked.dims):
        return None
    numbers: dict[Expr, Expr] = {tile: TileRef(f"tile{number}", tile.dtype) for number, tile in enumerate(moves.tiles)}
    numbers[dot.ref] = TileRef("sum", dot.dtype)
    (value,) = rewrite((moves.store.value,), numbers.get)
    if not all(isinstance(node, TileRef | Const | Cast | Op) for node in postorder(value)):
        return None
    rows = moves.of_rows
    row_dims = tuple(matrix.rows.name for matrix in (rows, moves.of_columns, *moves.of_tiles, moves.of_result))
    sizes = tuple(dim.size for dim in blocked.dims if dim.name in ("m", "k"))
    dtypes = (moves.rows.dtype, moves.columns.dtype, blocked.kernel.param(moves.store.param).dtype)
    return value, rows.param, rows.stride, rows.base, row_dims, sizes, dtypes


# Lines ----------------------------------------------------------------------------------------------------------------


def _lines(values: Values, layouts: Sequence[Layout]) -> list[Code]:
    """Return the lines of one function that computes these products; `values` emits the expressions of the first."""
    products = [moves for layout in layouts if (moves := _moves(layout.blocked)) is not None]
    assert len(products) == len(layouts), "called for products that `products_of` refuses"
    own = products[0]
    m, n = map(layouts[0].blocked.named, ("m", "n"))
    values.load_through[own.rows] = descriptors.describe(values, own.of_rows, layouts[0])
    m_blocks = blocks_of(values, m)
    choices: list[list[Transfer]] = []
    for layout, moves in zip(layouts, products, strict=True):
        end = layout.with_parts(layout.blocked.named("n"))
        choices.append([descriptors.describe(values, moves.of_columns, layout)])
        choices[-1] += [descriptors.describe(values, matrix, end) for matrix in (*moves.of_tiles, moves.of_result)]
    ends = column_ends(values, layouts)
    number = values.open("block")
    m_block, n_block = swizzled(values, number, m_blocks, ends[-1])
    wishes = ("columns", *["tile"] * len(own.tiles), "result")
    described = [[as_code(transfer.name) for transfer in transfers] for transfers in choices]
    columns, *tiles, result, first = select(values, wishes, described, n_block, ends)
    for load, transfer, name in zip((own.columns, *own.tiles), choices[0], (columns, *tiles), strict=False):
        values.load_through[load] = replace(transfer, name=name)
    values.store_through[own.store.param] = replace(choices[0][-1], name=result)
    start_block(values, m, m_block)
    start_block(values, n, compose("{} - {}", n_block, first, binds=SUM))
    one_block(Body(values))
    values.close("{}", over_blocks(values, number, compose("{} * {}", m_blocks, ends[-1])))
    return values.scopes[0].lines
