"""Decides which kernels can be persistent products."""

from __future__ import annotations

from collections.abc import Iterator

from fusion.codegen.triton.blocks import Blocked, Dim
from fusion.codegen.triton.devices import Feature
from fusion.codegen.triton.products.descriptors import has_even_strides, matrix_of
from fusion.lowering.ir.expr import Expr, Load
from fusion.lowering.ir.kernel import Fold, Loop, Role
from fusion.lowering.ir.scalar_ops import HALVES


def refusal(blocked: Blocked) -> str:
    """Return why a kernel cannot be a persistent product; empty if it can."""
    if not blocked.contraction or blocked.chained or any(dim.name == "s" for dim in blocked.dims):
        return "it is no product, folds products, or its warps share lines"
    if not blocked.device.has(Feature.TENSOR_COPIES):
        return f"{blocked.device.arch} has no tensor memory accelerator"
    if blocked.kernel.awaited:
        return "its tiles are awaited, and what goes through tensor memory is stored later"
    shape = _shape(blocked)
    if shape:
        return shape
    if not all(_is_described(blocked, *factor) for factor in factors(blocked)):
        return "an operand is no matrix of 16 bits that a descriptor holds"
    return ""


def _shape(blocked: Blocked) -> str:
    """Return why a kernel is not one loop along one axis, of products that share an operand; else empty."""
    grid = {dim.name for dim in blocked.grid()}
    contracted = [dim for dim in blocked.dims if dim.role is not Role.GRID]
    if grid - {"b"} != {"m", "n"} or len(contracted) != 1 or contracted[0].role is not Role.LOOP:
        return "it is not rows by columns, with one sum in a loop"
    loops = [stmt for stmt in blocked.body if isinstance(stmt, Loop)]
    folds = [stmt for loop in loops for stmt in loop.body]
    if len(loops) != 1 or not all(isinstance(fold, Fold) and fold.carry is None for fold in folds):
        return "it is more than one loop of sums"
    operands = {factor for dot in blocked.dots for factor in dot.args}
    if set(folds) != set(blocked.dots) or len(operands) != 1 + len(folds):
        return "its products share no operand, and would need larger tiles than fit"
    return "" if "b" not in grid or len(folds) == 1 else "it has several products and a batch"


def _is_described(blocked: Blocked, factor: Expr, sides: tuple[Dim, Dim]) -> bool:
    """Return whether an operand is loaded through a descriptor, for all matrices of a batch."""
    if factor.dtype not in HALVES or not isinstance(factor, Load):
        return False
    matrix = matrix_of(blocked, factor, *sides)
    return matrix is not None and has_even_strides(blocked, matrix)


def factors(blocked: Blocked) -> Iterator[tuple[Expr, tuple[Dim, Dim]]]:
    """Yield the operands of the contractions, each with its dimensions."""
    for dot in blocked.dots:
        rows, columns, over = blocked.sides(dot)
        yield from zip(dot.args, ((rows, over), (over, columns)), strict=True)
