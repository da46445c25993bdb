"""The persistent form of products: which configuration is chosen, and that each fits its device."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("triton")

import sympy
import torch

from fusion.codegen.triton import TritonTarget
from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.forms.persistent_product import PersistentConfig
from fusion.codegen.triton.forms.persistent_product.speed import of_config, reached, work_of
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.load import load as imported
from fusion.lowering.ir.expr import Cast, Expr, IndexValue, const
from fusion.lowering.ir.expr import make_op as op
from fusion.lowering.ir.kernel import Fold, Kernel, Loop, Role, Store
from tests.codegen.kernels.making import BF16, F32, GRID, LOOP, i, j, kernel, load, param, r
from tests.codegen.kernels.products import gated, matmul, residual
from tests.codegen.triton.blocking import block

TARGET = TritonTarget("sm_90")
PROCESSOR, RESERVED = 233_472, 1024
"""Bytes of shared memory of a multiprocessor of sm_90, and the bytes that the system reserves for each program."""


def gelu(value: Expr) -> Expr:
    half = op("mul", value, const(0.5, F32))
    bent = op("erf", op("mul", value, const(0.5**0.5, F32)))
    return op("mul", half, op("add", bent, const(1.0, F32)))


def relu(value: Expr) -> Expr:
    return op("maximum", value, const(0.0, F32))


def activated(m: int | sympy.Expr, n: int, k: int, *, smooth: bool) -> Kernel:
    dot = Fold("acc", "dot", (load("a", k * i + r, BF16), load("b", k * j + r, BF16)), (r,), F32, (i,), (j,))
    value = op("add", dot.ref, Cast(load("bias", j, BF16), F32))
    params = (param("a", BF16, m, k), param("b", BF16, n, k), param("bias", BF16, n))
    axes: dict[sympy.Symbol, tuple[object, Role]] = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", n * i + j, Cast((gelu if smooth else relu)(value), BF16))
    out = param("out", BF16, m, n, written=True)
    return kernel("activated", (*params, out), axes, Loop((r,), (dot,)), store)


def graded(m: int, n: int, k: int, factor: Expr) -> Kernel:
    """(a · bᵀ) · factor, as in the gradient of an activation"""
    dot = Fold("acc", "dot", (load("a", k * i + r, BF16), load("b", k * j + r, BF16)), (r,), F32, (i,), (j,))
    params = (param("a", BF16, m, k), param("b", BF16, n, k), param("bias", BF16, n), param("c", BF16, m, n))
    axes: dict[sympy.Symbol, tuple[object, Role]] = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    store = Store("out", n * i + j, Cast(op("mul", dot.ref, factor), BF16))
    return kernel("graded", (*params, param("out", BF16, m, n, written=True)), axes, Loop((r,), (dot,)), store)


def best(example: Kernel) -> PersistentConfig:
    """The best configuration of one group of warps."""
    return next(config for config in TARGET.configs(example) if isinstance(config, PersistentConfig))


def chosen(example: Kernel) -> tuple[int, int, int, int]:
    config = best(example)
    return config.block("m"), config.block("n"), config.per_processor, config.parts


def test_cheap_epilogues_use_the_largest_blocks() -> None:
    assert chosen(activated(8192, 8192, 2048, smooth=False)) == (128, 256, 1, 1)


def test_two_small_programs_hide_even_the_ends_of_short_sums() -> None:
    """H200, with ReLU: 62.8 and 189.7 µs, in the largest blocks 66.0 and 188.0."""
    config = best(activated(8192, 3072, 768, smooth=False))
    assert (config.block("n"), config.num_warps, config.per_processor) == (128, 4, 2)
    assert chosen(activated(8192, 4096, 2048, smooth=False)) == (128, 256, 1, 1)


def test_two_programs_hide_expensive_epilogues() -> None:
    assert chosen(activated(8192, 4096, 1024, smooth=True)) == (128, 128, 2, 2)


def test_the_end_is_priced_once() -> None:
    """In the persistent form by the share of the library's speed, through pointers separately."""
    assert not TARGET.exposes_epilogue(activated(8192, 8192, 1024, smooth=True))
    assert TARGET.exposes_epilogue(activated(8192, 8192, 96, smooth=True))


def test_columns_fill_their_blocks() -> None:
    """For 384 columns two blocks of 256 compute 512.  H200, with a residual: 41 µs, in blocks of 64 by 256 68 µs."""
    assert chosen(residual(12544, 384, 1536, BF16)) == (128, 128, 1, 1)


def test_tiles_that_are_loaded_come_in_parts() -> None:
    assert chosen(residual(16384, 768, 3072, BF16)) == (128, 256, 1, 2)


def test_wide_tiles_take_the_memory_of_a_stage() -> None:
    """A tile of 32 bits beside a result of 16: one of 128 columns leaves memory for all stages, one of 256 for two."""
    tile = load("c", 3072 * i + j, F32)
    example = graded(8192, 3072, 768, tile)
    params = tuple(replace(each, dtype=F32) if each.name == "c" else each for each in example.params)
    wide = replace(example, params=params)
    assert chosen(wide) == (128, 128, 1, 1)
    found = [each for each in TARGET.configs(wide) if isinstance(each, PersistentConfig) and each.block("n") == 256]
    assert {each.num_stages for each in found if each.block("m") == 128} == {2}


def test_rows_that_are_gathered_come_in_parts() -> None:
    """H200, 8192 × 1024 × 1024 with rows of an embedding added: 44 µs in two parts, 64 in one."""
    m, n, k = 8192, 1024, 1024
    dot = Fold("acc", "dot", (load("a", k * i + r, BF16), load("b", k * j + r, BF16)), (r,), F32, (i,), (j,))
    row = op("mul", load("ids", i, torch.int64), const(n, torch.int64))
    gathered = load("table", op("add", row, IndexValue(j)), BF16)
    total = Cast(op("add", dot.ref, Cast(gathered, F32)), BF16)
    params = [
        param("a", BF16, m, k),
        param("b", BF16, n, k),
        param("ids", torch.int64, m),
        param("table", BF16, 32000, n),
    ]
    axes = {i: (m, GRID), j: (n, GRID), r: (k, LOOP)}
    out = param("out", BF16, m, n, written=True)
    example = kernel("embedded", [*params, out], axes, Loop((r,), (dot,)), Store("out", n * i + j, total))
    assert chosen(example) == (128, 256, 1, 2)


def test_long_sums_leave_little_to_hide() -> None:
    short, long = (block(activated(8192, 8192, k, smooth=True)) for k in (1024, 16384))
    assert reached(short) < 0.8 < 0.9 < reached(long)
    assert work_of(block(activated(8192, 8192, 1024, smooth=False))) == 0


@pytest.mark.parametrize(("m", "n", "k", "measured"), [(8192, 3072, 768, 0.80), (8192, 2048, 2048, 0.89)])
def test_gelu_is_priced_as_it_was_measured(m: int, n: int, k: int, measured: float) -> None:
    """Relative to the library's product alone, on an H200."""
    assert reached(block(activated(m, n, k, smooth=True))) == pytest.approx(measured, abs=0.05)


def test_large_results_of_short_sums_are_left_to_the_library() -> None:
    words, layer = (reached(block(activated(8192, columns, 768, smooth=False))) for columns in (50304, 3072))
    assert words < 0.98 < 1.0 < layer
    few, long = (reached(block(activated(rows, 50304, 4096, smooth=False))) for rows in (256, 8192))
    assert few == long > 0.97  # long sums hide it


def test_epilogue_work_counts_functions_of_tiles_but_not_of_rows() -> None:
    tile, row = Cast(load("c", 3072 * i + j, BF16), F32), Cast(load("bias", j, BF16), F32)
    of_tile, of_row, plain = (work_of(block(graded(8192, 3072, 768, f))) for f in (gelu(tile), gelu(row), tile))
    assert of_tile > 30 > of_row == plain == 0


def test_every_configuration_is_priced() -> None:
    example = residual(16384, 1024, 1024, BF16)
    shares = [of_config(block(example), each) for each in TARGET.configs(example) if isinstance(each, PersistentConfig)]
    assert shares == sorted(shares, reverse=True) and all(0.0 < share < 1.1 for share in shares)


@pytest.mark.parametrize(
    "example", [activated(8192, 4096, 1024, smooth=True), residual(16384, 768, 3072, BF16)], ids=["gelu", "residual"]
)
def test_chosen_configurations_fit_with_all_their_stages(example: Kernel) -> None:
    config = best(example)
    compiled = compile_for(imported(example, TARGET.emit(example, config)), H200)
    assert compiled.metadata.num_stages == config.num_stages
    assert config.per_processor * (compiled.metadata.shared + RESERVED) <= PROCESSOR
    assert "wgmma.mma_async" in compiled.asm["ptx"] and "st.local" not in compiled.asm["ptx"]


@pytest.mark.parametrize("rows", [8192, sympy.Symbol("s0", integer=True, positive=True)], ids=str)
def test_programs_are_passed_their_descriptors(rows: int | sympy.Symbol) -> None:
    """A descriptor that a program creates takes it 0.85 µs of an H200."""
    example = residual(rows, 768, 3072, BF16)
    text = TARGET.emit(example)
    generated = imported(example, text)
    assert list(generated.descriptor_types) == ["a_desc", "b_desc", "c_desc", "out_desc"]
    compiled = compile_for(generated, H200, (False,) if example.sizes else ())
    assert "tensormap" not in compiled.asm["ptx"] and compiled.metadata.global_scratch_size == 0


def test_gelu_divides_without_minding_the_ends_of_the_range() -> None:
    """The divisor is 1 or more: seven operations fewer for each element."""
    example = activated(8192, 4096, 1024, smooth=True)
    ptx = compile_for(imported(example, TARGET.emit(example)), H200).asm["ptx"]
    assert "div.approx.ftz.f32" in ptx and "div.full.f32" not in ptx


@pytest.mark.parametrize("side", ["rows", "sum"])
def test_sizes_that_are_not_known_come_through_descriptors(side: str) -> None:
    batch, length = sympy.symbols("s0 s1", integer=True, positive=True)
    rows = batch * length
    result = residual(rows, 768, 3072, BF16) if side == "rows" else matmul(768, 3072, rows, BF16, turned=(True, False))
    compiled = compile_for(imported(result, TARGET.emit(result)), H200, (False, False))
    assert "cp.async.bulk.tensor" in compiled.asm["ptx"] and "wgmma.mma_async" in compiled.asm["ptx"]
    assert compiled.metadata.num_stages == TARGET.configs(result)[0].num_stages


def test_rows_that_are_not_known_are_counted_as_traced() -> None:
    """A small number of traced rows does not bound other calls, which take longer: the rows are then assumed to be
    many.
    """
    rows = sympy.Symbol("s0", integer=True, positive=True)
    example, known = activated(rows, 768, 1024, smooth=False), activated(8192, 768, 1024, smooth=False)
    assert chosen(replace(example, traced=((rows, 8192),))) == chosen(known) != chosen(example)
    assert chosen(replace(example, traced=((rows, 40),))) == chosen(example)


def test_short_rows_that_are_not_known_do_not() -> None:
    """There may be more of them than an int32 counts."""
    rows = sympy.Symbol("s0", integer=True, positive=True)
    assert isinstance(TARGET.configs(matmul(rows, 256, 128, BF16))[0], PersistentConfig)
    assert not any(isinstance(each, PersistentConfig) for each in TARGET.configs(matmul(rows, 64, 128, BF16)))


def test_the_name_of_a_configuration_includes_its_parts() -> None:
    example = activated(8192, 4096, 1024, smooth=True)
    names = [candidate.name for candidate in TARGET.alternatives(example)]
    assert "m 128, k 64, n 128, 8 warps, 3 stages, 2 persistent, finished in 2 parts" in names


def test_epilogues_of_two_products_are_not_split() -> None:
    configs = TARGET.configs(gated(8192, 4096, 1024))
    assert {config.parts for config in configs if isinstance(config, PersistentConfig)} == {1}
