"""The text of Triton kernels: masks, indices, values computed once, and refusals."""

from __future__ import annotations

import ast
import builtins
import re
from dataclasses import replace

import pytest
import sympy
import torch

pytest.importorskip("triton")

from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.arguments import POINTERS
from fusion.codegen.triton.expressions import prelude
from fusion.codegen.triton.expressions.scalar_code import EMITTERS
from fusion.lowering.builder import GENERATED_DTYPES
from fusion.lowering.errors import BuildError
from fusion.lowering.indexing import FloorDiv, Mod
from fusion.lowering.ir.expr import Cast, Op, const
from fusion.lowering.ir.kernel import Kernel, Role, Store, rename
from fusion.lowering.ir.scalar_ops import FOLD_OPS, SCALAR_OPS
from tests.codegen.kernels.making import BF16, F16, F32, I8, i, j, kernel, param, r
from tests.codegen.kernels.making import load as load_expr
from tests.codegen.kernels.pointwise import (
    add,
    bias_gelu,
    causal,
    convert,
    drawn,
    in_place,
    padded,
    permuted,
    transposed_add,
)
from tests.codegen.kernels.products import linear, matmul
from tests.codegen.kernels.rows import (
    column_softmax,
    dropped,
    fold,
    layernorm,
    online_logsumexp,
    online_softmax,
    softmax,
)
from tests.codegen.kernels.small import SMALL
from tests.codegen.triton.texts import TARGET, body, compiles

# Text -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "shared"),
    [
        (drawn(300, "uniform", 8), True),
        (drawn(300, "uniform", 5), False),
        (drawn(300, "normal", 2), True),
        (dropped(6, 60, Role.WHOLE), True),
        (dropped(6, 60, Role.LOOP), True),
        (dropped(6, 61, Role.WHOLE), False),
    ],
)
def test_neighbours_share_an_evaluation_of_the_generator_where_rows_are_aligned(example: Kernel, shared: bool) -> None:
    assert ("_by_" in body(example)) is shared


def test_a_source_reads_like_this() -> None:
    example = softmax(1823, 781, Role.WHOLE)
    source = TARGET.emit(
        Kernel(example.name, example.params, (), example.axes, example.body, origins=("softmax (head, model.py:7)",))
    )
    assert (
        source
        == '''"""softmax computes

    softmax (head, model.py:7)
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_wait


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def softmax(
    x_ptr,  # float32[1823, 781] strides [781, 1]
    out_ptr,  # float32[1823, 781] strides [781, 1], written
    RBLOCK: tl.constexpr,
):
    gdc_wait()
    xi = tl.program_id(0)
    ri = tl.arange(0, RBLOCK)
    r_mask = ri < 781
    x = tl.load(x_ptr + xi * 781 + ri, mask=r_mask)
    top = tl.reduce(tl.where(r_mask, x, -float("inf")), 0, _maximum)
    exp = libdevice.exp(x - top)
    total = tl.sum(tl.where(r_mask, exp, 0.0), 0)
    tl.store(out_ptr + xi * 781 + ri, tl.div_rn(exp, total), mask=r_mask)


CONFIG = {"RBLOCK": 1024, "num_warps": 2, "num_stages": 1, "launch_pdl": True}


def grid():
    """How many programs to launch."""
    return (1823,)


def launch(*args):
    """Launch on the tensors and sizes of the signature, in order."""
    softmax[grid()](*args, **CONFIG)
'''
    )


@pytest.mark.parametrize("name", SMALL)
def test_text_is_python_and_always_the_same(name: str) -> None:
    source = TARGET.emit(SMALL[name])
    ast.parse(source)
    assert source == TritonTarget("sm_90").emit(SMALL[name])
    assert max(map(len, source.splitlines())) < 160


@pytest.mark.parametrize("name", SMALL)
def test_a_file_defines_all_names_that_its_functions_read(name: str) -> None:
    tree = ast.parse(TARGET.emit(SMALL[name]))
    defined = {each for node in tree.body for each in _defined(node)} | {*dir(builtins)}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            own = {each for node in ast.walk(function) for each in _defined(node)}
            assert _read(function) <= own | defined, function.name


def test_functions_of_the_prelude_state_what_they_call() -> None:
    for name, text in prelude.FUNCTIONS.items():
        tree = ast.parse(text)
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = {ast.unparse(part) for node in calls for part in (node.func, *node.args)}  # some are passed
        stated = {each for each in called if each in prelude.FUNCTIONS or each.startswith("libdevice.")}
        assert stated == {*prelude.READS.get(name, ())}, name


def _defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):  # `import a.b as c` binds c, `import a.b` binds a
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.Assign):
        return {each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    return {node.arg} if isinstance(node, ast.arg) else set()


def _read(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}


def test_masks_only_where_a_block_can_reach_past_the_end() -> None:
    assert "mask" not in body(add(1 << 20))
    assert "x_mask = xi < 1048577" in body(add((1 << 20) + 1))
    assert "mask" not in body(softmax(64, 4096, Role.WHOLE))
    assert "mask" not in body(softmax(64, 65536, Role.LOOP))
    assert body(matmul(1024, 1024, 1001, BF16, batch=2)).count("k_mask") > 1
    assert "k_mask" not in body(matmul(1000, 1024, 1024, F32))


def test_indices_are_int64_only_where_they_must_be() -> None:
    assert "int64" not in body(add((1 << 31) - 4096))
    assert "tl.program_id(0).to(tl.int64) * XBLOCK" in body(add((1 << 31) + 16))
    # The row is widened, the position in it is not.
    wide = body(softmax(100_000, 30_000, Role.WHOLE))
    assert "xi = tl.program_id(0).to(tl.int64)" in wide
    assert "ri = tl.arange(0, RBLOCK)\n" in wide
    # Along the reduction it is the other way round.
    wide = body(fold("sum", 600_000, 4096, Role.LOOP, along=0))
    assert "ri = (r0 + tl.arange(0, RBLOCK)).to(tl.int64)" in wide
    assert "xi = tl.program_id(0) * XBLOCK" in wide


def test_indices_of_sizes_that_are_not_known_are_within_a_limit() -> None:
    n = sympy.Symbol("s0", integer=True, positive=True)
    assert "int64" not in body(add(n)) and "xi = tl.program_id(0).to(tl.int64)" in TARGET.emit(add(n), wide=True)
    text = TARGET.emit(add(n))
    assert "return 1024 + s0 < 2**31" in text and "assert fits(*args[3:])" in text
    params = [param("x", I8, n), param("out", I8, n, written=True)]
    rolled = load_expr("x", Mod(i + n - 3, n), I8)  # the dividend of (a % n + n) % n exceeds n
    assert " + 3 * s0 < 2**31" in TARGET.emit(kernel("roll", params, {i: (n, Role.GRID)}, Store("out", i, rolled)))
    parts = FloorDiv(n + 87, 88)  # 88 of these are no more than all
    params = [param("x", I8, n + 87), param("out", I8, n + 87, written=True)]
    at = i * parts + j
    axes = {i: (88, Role.GRID), j: (parts, Role.GRID)}
    assert "88 * s0" not in TARGET.emit(kernel("cut", params, axes, Store("out", at, load_expr("x", at, I8))))
    m = sympy.Symbol("m", integer=True)  # the argument may be negative
    moved = load_expr("x", Mod(i + m, n), I8)
    params = [param("x", I8, n), param("out", I8, n, written=True)]
    moving = replace(kernel("move", params, {i: (n, Role.GRID)}, Store("out", i, moved)), sizes=(m, n))
    text = TARGET.emit(moving)
    assert "abs(m) + 3 * s0 < 2**31" in text
    params = [param("x", I8, n + 2**31), param("out", I8, n, written=True)]  # never within a limit
    shifted = load_expr("x", i + 2**31, I8)
    assert "fits" not in TARGET.emit(kernel("shift", params, {i: (n, Role.GRID)}, Store("out", i, shifted)))


@pytest.mark.parametrize(("size", "wide"), [(1 << 30, False), ((1 << 30) + 16, True)])
def test_the_dividend_of_a_remainder_may_need_64_bits(size: int, wide: bool) -> None:
    params = [param("x", I8, size), param("out", I8, size, written=True)]
    rolled = load_expr("x", Mod(i + size - 3, size), I8)
    text = body(kernel("roll", params, {i: (size, Role.GRID)}, Store("out", i, rolled)))
    assert ("tl.program_id(0).to(tl.int64)" in text) is wide


def test_positions_are_compared_in_int32() -> None:
    assert "int64" not in body(causal(128))
    assert "int64" not in body(padded(128, 3, 3))
    assert "int64" in body(causal(1 << 16))


def test_loop_invariants_are_computed_before_the_loop() -> None:
    lines = body(linear(64, 96, 4096, BF16)).splitlines()
    start = next(k for k, line in enumerate(lines) if line.strip().startswith("for "))
    before, inside = "\n".join(lines[:start]), "\n".join(lines[start:])
    assert "scale = tl.load(scale_ptr + mi" in before
    assert "x_at = x_ptr + mi * 4096" in before
    assert "tl.load(x_at[:, None] + ki[None, :]" in inside


def test_rows_that_are_read_again_are_kept_in_the_cache() -> None:
    text = body(softmax(64, 65536, Role.LOOP))
    assert re.findall('eviction_policy="(.*?)"', text) == ["evict_last", "evict_last", "evict_first"]
    assert "eviction_policy" not in body(fold("sum", 64, 65536, Role.LOOP))
    large = body(softmax(4096, 65536, Role.LOOP))
    assert re.findall('eviction_policy="(.*?)"', large)[2:] == ["evict_first", "evict_first"]  # stores, too


def test_long_rows_that_are_read_twice_have_a_multiprocessor_each() -> None:
    """The second loop starts with the data that the first one read last."""
    assert TARGET.configs(online_softmax(2048, 128256))[0].num_warps == 32
    assert TARGET.configs(online_softmax(64, 128256))[0].num_warps == 32
    assert TARGET.configs(online_logsumexp(2048, 128256))[0].num_warps == 4
    text = body(online_softmax(2048, 128256))
    assert "r0 = r_middle_1 - RBLOCK - r_step" in text


def test_overwritten_rows_of_16_bit_floats_share_a_multiprocessor() -> None:
    warps = {
        dtype: [TARGET.configs(result)[0].num_warps for result in (apart, _in_place(apart))]
        for dtype in (F32, BF16)
        for apart in [online_softmax(2048, 128256, dtype=dtype)]
    }
    assert warps == {F32: [32, 32], BF16: [32, 16]}


def _in_place(example: Kernel) -> Kernel:
    """A kernel from x to out that overwrites x."""
    x = replace(example.params[0], written=True)
    return replace(example, params=(x,), body=rename(example.body, {"x": "x", "out": "x"}))


def test_parts_of_a_loop_need_no_barrier_between_them() -> None:
    text = body(_in_place(online_softmax(2048, 128256)))
    assert text.count("tl.store(") == 2 and "tl.debug_barrier()" not in text


def test_each_thread_keeps_its_own_running_values_of_a_row() -> None:
    text = body(online_logsumexp(2048, 128256))
    assert "top = tl.full([128]" in text and "_by_lane(" in text
    assert "_by_lane(" not in TritonTarget("gfx942").emit(online_logsumexp(2048, 128256))


def test_shared_expressions_are_computed_once() -> None:
    text = body(layernorm(512, 768, F32))
    assert text.count("tl.load(x_ptr") == 1
    assert text.count("tl.rsqrt") == 1


def test_linear_indices_lose_their_digits_where_memory_is_contiguous() -> None:
    text = body(add(1 << 20))
    assert "//" not in text and "%" not in text
    assert "xi % 1024" in body(bias_gelu(512, 1024, F32))
    assert "//" not in body(bias_gelu(512, 1024, F32))
    assert "//" in body(permuted(8, 128, 64))


def test_a_transposition_gets_a_tile_of_two_dimensions() -> None:
    assert "YBLOCK" in TARGET.emit(transposed_add(512, 512))
    assert "YBLOCK" not in TARGET.emit(permuted(8, 128, 64))


def test_a_column_sum_has_neighbouring_columns_in_neighbouring_lanes() -> None:
    assert "[RBLOCK, XBLOCK]" in body(fold("sum", 4096, 4096, Role.LOOP, along=0))
    assert "[XBLOCK, RBLOCK]" in body(fold("sum", 4096, 4096, Role.LOOP), Config((("x", 4), ("r", 512))))


def test_tall_columns_are_looped_over_and_short_ones_held() -> None:
    assert body(column_softmax(1000, 512)).count("for ") == 0
    assert body(column_softmax(5000, 512)).count("for ") == 3
    assert body(fold("max", 5000, 512, Role.WHOLE, along=0)).count("for ") == 1
    assert "for " not in body(softmax(512, 5000, Role.WHOLE))


def test_columns_that_are_stored_before_they_are_summed_are_read_once() -> None:
    example = fold("sum", 600, 512, Role.WHOLE, along=0)
    params = (*example.params, param("map", F32, 600, 512, written=True))
    doubled = Store("map", 512 * r + i, Op("mul", (load_expr("x", 512 * r + i), const(2.0, F32)), F32))
    text = body(replace(example, params=params, body=(*example.body, doubled)))
    assert text.count("for ") == text.count("tl.load(") == 1


def test_columns_that_only_folds_read_again_are_read_twice() -> None:
    assert body(column_softmax(600, 512)).count("for ") == 0
    example = column_softmax(600, 512)
    example = replace(
        example, params=example.params[:2], body=(*example.body[:2], Store("top", i, example.body[1].ref))
    )
    assert body(example).count("for ") == 2


def test_few_columns_are_spread_over_more_processors() -> None:
    assert '"XBLOCK": 8,' in TARGET.emit(fold("sum", 500, 64, Role.WHOLE, along=0))
    assert '"XBLOCK": 32,' in TARGET.emit(fold("sum", 500, 4096, Role.WHOLE, along=0))


def test_a_value_is_loaded_again_after_it_was_stored() -> None:
    text = body(in_place(100))
    assert text.count("tl.load(x_ptr") == 2
    assert text.index("tl.store(x_ptr") < text.index("tl.debug_barrier()") < text.rindex("tl.load(x_ptr")


def test_results_that_are_rounded_to_16_bits_use_the_quick_forms() -> None:
    assert "libdevice.exp" in TARGET.emit(softmax(64, 4096, Role.WHOLE, F32))
    quick = TARGET.emit(softmax(64, 4096, Role.WHOLE, F16))
    assert "tl.exp2(" in quick  # of a distance to a maximum: it flushes denormals, where tl.exp keeps them
    assert "div_rn" not in quick


def test_only_functions_without_float32_results_use_fast_approximations() -> None:
    """Of two exponentials, the one that a float32 result needs is exact, and the other one is fast."""
    x = load_expr("x", i, F32)
    shared, own = Op("exp", (x,), F32), Op("exp", (Op("neg", (x,), F32),), F32)
    params = [param("x", F32, 64), param("wide", F32, 64, written=True), param("half", F16, 64, written=True)]
    half = Cast(Op("mul", (shared, own), F32), F16)
    example = kernel("two", params, {i: (64, Role.GRID)}, Store("wide", i, shared), Store("half", i, half))
    text = TARGET.emit(example)
    assert text.count("libdevice.exp(in") + text.count("libdevice.exp(x") == 1 and text.count("tl.exp(") == 1


def test_names_that_mean_something_to_python_are_not_taken() -> None:
    params = [param("lambda", F32, 64), param("tl", F32, 64), param("abs", F32, 64, written=True)]
    value = Op("abs", (Op("add", (load_expr("lambda", i), load_expr("tl", i)), F32),), F32)
    source = ast.parse(TARGET.emit(kernel("names", params, {i: (64, Role.GRID)}, Store("abs", i, value))))
    (function,) = (node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "names")
    taken = {argument.arg for argument in function.args.args}
    assert len(taken) >= 3 and taken.isdisjoint({"lambda", "tl", "abs"})


def test_every_operation_is_spelled_in_every_dtype() -> None:
    assert {*EMITTERS, "where"} == set(SCALAR_OPS)
    assert set(POINTERS) == GENERATED_DTYPES
    assert TARGET.capabilities.fold_ops == set(FOLD_OPS)


# Refusals -------------------------------------------------------------------------------------------------------------


def test_sources_that_do_not_fit_the_kernel_are_refused() -> None:
    example = add(64)
    source = TARGET.emit(example)
    for broken in ("def", source.replace("CONFIG =", "SETTINGS ="), source.replace("    y_ptr,", "    z_ptr,", 1)):
        with pytest.raises(BuildError, match="cannot be used"):
            list(TARGET.stages(example, broken))


@compiles
def test_errors_of_the_compiler_are_passed_on() -> None:
    example = add(64)
    with pytest.raises(BuildError, match=r"cannot compile add[\s\S]*nonsense"):
        list(TARGET.stages(example, TARGET.emit(example).replace("x + y", "nonsense")))


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(BuildError, match="unknown architecture"):
        list(TARGET.stages(add(64), TARGET.emit(add(64)), "pdp11"))


@compiles
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_launched() -> None:
    with pytest.raises(BuildError, match="no CUDA or ROCm device"):
        TARGET.build(add(64), TARGET.emit(add(64)))


def test_casts_follow_eager() -> None:
    assert "!= 0" in body(convert(F32, torch.bool, 64))
    assert ".to(tl.int64).to(tl.uint8)" in body(convert(F32, torch.uint8, 64))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_a_single_number_is_loaded_as_it_is(dtype: torch.dtype) -> None:
    """Such as the count of batches of running statistics."""
    store = Store("n", sympy.Integer(0), Op("neg", (load_expr("n", sympy.Integer(0), dtype),), dtype))
    assert "tl.load(n_ptr)" in TARGET.emit(kernel("count", [param("n", dtype, written=True)], {}, store))
