"""Rewrites a kernel over block dimensions: each axis becomes a digit of the linear index of one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import sympy

from fusion.codegen.chained import with_narrow_factors
from fusion.codegen.triton.blocks.aligned_rows import shifted
from fusion.codegen.triton.blocks.config import extent
from fusion.codegen.triton.blocks.contraction import contraction_dims, only_matrices
from fusion.codegen.triton.blocks.dims import Blocked, Dim, dots_of
from fusion.codegen.triton.blocks.rows import row_dims, row_values, too_tall
from fusion.codegen.triton.devices import Device, Feature
from fusion.codegen.triton.rewrites.absolute_errors import with_absolute_errors
from fusion.codegen.triton.rewrites.batches import batched, substitute_axes
from fusion.codegen.triton.rewrites.blocked_loops import in_blocks
from fusion.codegen.triton.rewrites.exponentials import in_powers_of_two
from fusion.codegen.triton.rewrites.group_per_warp import group_per_warp
from fusion.codegen.triton.rewrites.groups import grouped
from fusion.codegen.triton.rewrites.moments import without_means, without_means_in_loops
from fusion.codegen.triton.rewrites.packed import unpacked
from fusion.codegen.triton.rewrites.rounding import is_rounded
from fusion.codegen.triton.rewrites.single_terms import load_single_terms
from fusion.codegen.triton.rewrites.vectors import unrolled
from fusion.lowering.indexing import ZERO, simplify
from fusion.lowering.ir.kernel import Kernel, Role

BUSY_ROWS = 4
"""Rows per multiprocessor that keep it busy when each row has a program of its own."""


def block(kernel: Kernel, device: Device, *, invariant: bool = False) -> Blocked:
    """Lay a kernel out over block dimensions for `device`; `invariant`: in a fixed order of additions."""
    if invariant:
        return _as_it_stands(kernel, device)
    sums = unrolled(kernel, device)
    kernel = unpacked(kernel) if sums is kernel else grouped(unpacked(sums))
    kernel = (
        group_per_warp(kernel) if device.has(Feature.PTX) else kernel
    )  # Triton 3.6 fails to compile such products for AMD
    kernel = batched(kernel, dots_of(kernel.body))
    dots = dots_of(kernel.body)
    if not dots:
        kernel = without_means_in_loops(kernel)
    dims = contraction_dims(kernel, dots) if dots else row_dims(kernel)
    if not dots and too_tall(kernel, dims):
        kernel = in_blocks(without_means(kernel))
        dims = row_dims(kernel)
    if not dots:
        kernel, dims = shifted(*_looped_along_rows(load_single_terms(kernel), dims, device))
    digits, sizes = _digits(kernel, dims)
    dims = tuple(replace(dim, shift=simplify(dim.shift.xreplace(digits), sizes)) for dim in dims)
    body = substitute_axes(with_narrow_factors(kernel.body), digits, sizes)
    if not dots:
        return Blocked(kernel, dims, body, device)
    if is_rounded(kernel):
        body = in_powers_of_two(with_absolute_errors(body))
    return only_matrices(Blocked(kernel, dims, body, device))


def _as_it_stands(kernel: Kernel, device: Device) -> Blocked:
    """Return a kernel over block dimensions that depend neither on the number of rows nor on its other results."""
    dots = dots_of(kernel.body)
    dims = contraction_dims(kernel, dots, turns=False) if dots else row_dims(kernel, reorders=False)
    body = substitute_axes(kernel.body, *_digits(kernel, dims))
    blocked = Blocked(kernel, dims, body, device, invariant=True)
    return only_matrices(blocked) if dots else blocked


def _digits(
    kernel: Kernel, dims: Sequence[Dim]
) -> tuple[dict[sympy.Symbol, sympy.Expr], dict[sympy.Symbol, sympy.Expr]]:
    """Return each axis as a digit of the linear index of its dimension, and the bounds of these indices."""
    digits: dict[sympy.Symbol, sympy.Expr] = {axis.symbol: ZERO for axis in kernel.axes}  # of size 1, if in no dim
    for dim in dims:
        digits.update(dim.digits())
    return digits, {dim.symbol: dim.reach for dim in dims}


def block_as(kernel: Kernel, dims: Sequence[Dim], device: Device) -> Blocked:
    """Lay `kernel`, without reduced axes, out over the dimensions of another kernel, which hold all of its axes."""
    body = substitute_axes(with_narrow_factors(kernel.body), *_digits(kernel, dims))
    return Blocked(kernel, tuple(dims), body, device)


def _looped_along_rows(kernel: Kernel, dims: tuple[Dim, ...], device: Device) -> tuple[Kernel, tuple[Dim, ...]]:
    """Turn a map over many long rows that loads values per row into a loop per row, if that loop is then shifted; else
    no change.
    """
    axes = [axis for dim in dims for axis in dim.axes]
    rows = sympy.Mul(*(axis.size for axis in axes[:-1]))
    if len(axes) < 2 or any(dim.role is not Role.GRID or dim.name == "y" for dim in dims):
        return kernel, dims
    if extent(rows) < BUSY_ROWS * device.multiprocessors or not row_values(kernel, axes):
        return kernel, dims
    looped = in_blocks(kernel, (axes[-1].symbol,))
    looped_dims = row_dims(looped)
    _, after = shifted(looped, looped_dims)
    return (looped, looped_dims) if any(dim.shift != 0 for dim in after) else (kernel, dims)
