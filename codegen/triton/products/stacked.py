"""Merges two products that share the operand of their rows into one product of twice the columns.

Input: a contraction of the persistent form with two `dot` folds, whose other operands are matrices of one layout;
output: the lines of a single `tl.dot`.  The two matrices come through one descriptor of three dimensions, of which the
first steps from one tensor to the other, wherever they are in memory:

    gap = (tl.maximum(a, b) - tl.minimum(a, b)) // 2
    both = tl.make_tensor_descriptor(lower, [2, 5632, 2048], [gap, 2048, 1], [2, NBLOCK, KBLOCK])

The matrix units process 256 columns at a time, and read the shared operand from shared memory once for both; two
products of 128 columns each are slower (measured: docs/performance.md, `stacked`).  The result is split in registers.

Strides of descriptors have 40 bits: a launch whose tensors are `DESCRIPTOR_REACH` bytes apart uses the form without
assumptions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fusion.codegen.triton.blocks import Blocked
from fusion.codegen.triton.expressions.code import compose
from fusion.codegen.triton.expressions.matrices import Stack
from fusion.codegen.triton.expressions.scalar_code import TYPES, cast
from fusion.codegen.triton.expressions.scopes import Tile, Transfer
from fusion.codegen.triton.expressions.values import Values
from fusion.codegen.triton.products.contract import operand
from fusion.codegen.triton.products.descriptors import matrix_of
from fusion.lowering.ir.expr import Load

DESCRIPTOR_REACH = 1 << 40
"""Bytes between two tensors from which on one descriptor cannot hold both."""


def stack_of(blocked: Blocked) -> Stack | None:
    """Return the two products of a kernel as one; None if they are not two, or differ in layout."""
    if len(blocked.dots) != 2:
        return None
    first, second = blocked.dots
    sides = {dim.name: dim for dim in blocked.sides(first)}
    shared = [arg for arg in first.args if arg in second.args]
    others = [arg for dot in blocked.dots for arg in dot.args if arg not in shared]
    if len(shared) != 1 or len(others) != 2 or set(sides) != {"m", "n", "k"}:
        return None
    rows, columns, over = sides["m"], sides["n"], sides["k"]
    candidates = [matrix_of(blocked, arg, columns, over) for arg in others if isinstance(arg, Load)]
    matrices = [matrix for matrix in candidates if matrix is not None and matrix.rows is columns]
    if len(matrices) != 2 or matrices[0].stride != matrices[1].stride or others[0].dtype is not others[1].dtype:
        return None
    return Stack((first, second), shared[0], (matrices[0], matrices[1]), rows, columns, over)


def describe(values: Values) -> None:
    """Add the descriptor of two products computed as one, if the kernel has such, and load operands through it."""
    stack = stack_of(values.layout.blocked)
    if stack is None:
        return
    first = stack.matrices[0]
    element = values.layout.blocked.kernel.param(first.param).dtype
    addresses = [compose("({}).to(tl.int64)", values.pointer(m.param, m.base).code) for m in stack.matrices]
    a, b = (values.name("address", Tile(address)).code for address in addresses)
    lower = compose("tl.minimum({}, {}).to(tl.pointer_type({}))", a, b, TYPES[element])
    lower = values.name("lower", Tile(lower)).code
    size = element.itemsize
    distance = compose("(tl.maximum({0}, {1}) - tl.minimum({0}, {1})) // {2}", a, b, size)
    gap = values.name("gap", Tile(compose("tl.multiple_of({}, {})", distance, 16 // size))).code
    sizes = (values.index_tile(dim.size).code for dim in (first.rows, first.columns))
    shape = compose("[2, {}, {}], [{}, {}, 1]", *sizes, gap, int(first.stride))
    block = compose("[2, {}, {}]", first.rows.constant, first.columns.constant)
    described = compose("{}({}, {}, {})", "tl.make_tensor_descriptor", lower, shape, block)
    both = values.name("both_desc", Tile(described)).code.text
    swapped = values.name("swapped", Tile(compose("{} < {}", b, a))).code.text
    values.stack = replace(stack, descriptor=both, swapped=swapped)
    for dot in stack.folds:
        for arg in dot.args:
            if arg is not stack.shared:
                assert isinstance(arg, Load)
                values.load_through[arg] = Transfer(both, first.rows, first.columns)


def dot_in_loop(values: Values, stack: Stack) -> Callable[[], None]:
    """Accumulate both products in the current loop; return a function that binds both results after it."""
    rows, columns, over = stack.rows, stack.columns, stack.over
    lhs = operand(values, stack.shared, (rows, over), over, "lhs")
    wide = compose("2 * {}", columns.constant)
    zeros = Tile(compose("tl.zeros([{}, {}], tl.float32)", rows.constant, wide), (rows, columns), values.depth - 1)
    name = values.accumulator("dots", zeros).code
    corner = compose("[0, {}, {}]", values.starts[columns], values.starts[over])
    loaded = compose("tl.reshape({}.load({}), [{}, {}])", stack.descriptor, corner, wide, over.constant)
    both = values.name("both", Tile(loaded, (columns, over), values.depth)).code
    values.line("{0} = tl.dot({1}, {2}.T, {0})", name, lhs, both)

    def finish() -> None:
        depth = values.depth
        lower, upper = (values.fresh(wish, depth) for wish in ("lower_part", "upper_part"))
        apart = compose("tl.permute(tl.reshape({}, [{}, 2, {}]), (0, 2, 1))", name, rows.constant, columns.constant)
        values.line("{}, {} = tl.split({})", lower, upper, apart)
        for fold, (this, other) in zip(stack.folds, ((lower, upper), (upper, lower)), strict=True):
            picked = Tile(compose("tl.where({}, {}, {})", stack.swapped, other, this), (rows, columns), depth)
            result = values.name(fold.name, picked)
            values.bind(fold.ref, replace(result, code=cast(result.code, torch.float32, fold.dtype)))

    return finish
