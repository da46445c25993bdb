"""Emits a persistent program, which computes blocks of a product in sequence."""

from __future__ import annotations

from fusion.codegen.triton.body import Body
from fusion.codegen.triton.expressions.code import PRODUCT, Code, compose, listed
from fusion.codegen.triton.expressions.scopes import Tile
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.forms.persistent_product.column_parts import in_parts
from fusion.codegen.triton.forms.persistent_product.rule import factors
from fusion.codegen.triton.products import stacked
from fusion.codegen.triton.products.block_order import as_int32, assign_block
from fusion.codegen.triton.products.descriptors import Descriptors, loaded_tiles, matrix_of, target_of
from fusion.lowering.ir.expr import Load
from fusion.lowering.ir.kernel import Store


def write(body: Body) -> None:
    """Add the descriptors, and the loop over blocks."""
    stacked.describe(body.values)
    header = _open(body.values)
    one_block(body)
    body.values.close("{}", header)


def one_block(body: Body) -> None:
    """Add the lines of one block, whose epilogue runs part by part of its columns."""
    body.computations()
    with in_parts(body.values):
        body.stores()


def over_blocks(values: Values, number: Code, blocks: Code) -> Code:
    """Return the header of the loop over `blocks` blocks."""
    return compose("for {} in tl.range({}, {}, tl.num_programs(0), flatten=True):", number, values.program, blocks)


def _open(values: Values) -> Code:
    """Add the descriptors, open the loop over blocks and compute the start of each; return the header of that loop."""
    _describe_all(values)
    blocks = count_blocks(values)
    number = values.open("block")
    assign_block(values, number)
    for dim in values.layout.blocked.dims:
        if dim.name == "b":
            values.starts[dim] = values.name("batch", Tile(values.starts[dim], depth=values.depth)).code
    return over_blocks(values, number, blocks)


def count_blocks(values: Values) -> Code:
    """Add the line that counts the blocks of the result; return their number."""
    blocked = values.layout.blocked
    counts = [values.index_tile(dim.size).code.at(PRODUCT) for dim in blocked.dims if dim.name == "b"]
    counts += [
        compose("tl.cdiv({}, {})", values.index_tile(dim.size).code, dim.constant)
        for dim in map(blocked.named, ("m", "n"))
    ]
    total = as_int32(listed(counts, " * ", PRODUCT), known=all(dim.size.is_Integer for dim in blocked.grid()))
    return values.name("blocks", Tile(total)).code


def _describe_all(values: Values) -> None:
    """Add the descriptors of the operands, and of the tiles that the epilogue loads and stores."""
    blocked, described = values.layout.blocked, Descriptors(values)
    end = values.layout.with_parts(blocked.named("n"))
    for factor, sides in factors(blocked):
        assert isinstance(factor, Load)
        if factor not in values.load_through:
            matrix = matrix_of(blocked, factor, *sides)
            assert matrix is not None, "called for a kernel that `applies` refuses"
            values.load_through[factor] = described.of(matrix, values.layout)
    for load, matrix in loaded_tiles(blocked).items():
        values.load_through[load] = described.of(matrix, end)
    for stmt in blocked.body:
        target = target_of(blocked, stmt) if isinstance(stmt, Store) else None
        if target is not None:
            values.store_through[target.param] = described.of(target, end)
