"""The Triton target without a GPU: what the text says, and what Triton makes of it ahead of time."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch

pytest.importorskip("triton")

import codegen.triton
from codegen.numerics import Numerics
from codegen.triton import Config, TritonTarget
from codegen.triton.aot import compile_for, target_of
from codegen.triton.build import unaligned
from codegen.triton.load import load
from lowering.errors import BuildError, Unsupported
from lowering.expr import Cast, Op, const
from lowering.kernel import Fold, Kernel, Loop, Role, Store
from lowering.scalar_ops import FOLD_OPS, SCALAR_OPS
from tests.codegen.triton_kernels import (
    BF16,
    F16,
    F32,
    F64,
    I8,
    SMALL,
    add,
    attention_dkv,
    attention_dq,
    b,
    bias_gelu,
    causal,
    column_softmax,
    column_totals,
    convert,
    fold,
    gated,
    gather,
    i,
    in_place,
    j,
    kernel,
    layernorm,
    linear,
    matmul,
    online_attention,
    packed,
    padded,
    param,
    permuted,
    r,
    scalar,
    softmax,
    special,
    total,
    transposed_add,
)
from tests.codegen.triton_kernels import (
    load as load_expr,
)

TARGET = TritonTarget("sm_90")

# Compiling needs a Triton that does not interpret.
compiles = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets")


def body(kernel: Kernel, config: Config | None = None) -> str:
    """The lines of the kernel's function."""
    source = TARGET.emit(kernel, config)
    return source[source.index(f"def {kernel.name}(") :].partition("\n):\n")[2].partition("\n\n")[0]


def stages(kernel: Kernel, arch: str = "sm_90", config: Config | None = None) -> dict[str, str]:
    target = TritonTarget(arch)
    return dict(target.stages(kernel, target.emit(kernel, config), arch))


def instructions(kernel: Kernel, arch: str = "sm_90", config: Config | None = None) -> set[str]:
    """The names of all PTX instructions."""
    ptx = stages(kernel, arch, config)["ptx"]
    return set(re.findall(r"^\s+(?:@!?%p\d+ )?([a-z][\w.:]+)", ptx, re.MULTILINE))


def has(found: set[str], *beginnings: str) -> bool:
    return all(any(name.startswith(beginning) for name in found) for beginning in beginnings)


# Text -----------------------------------------------------------------------------------------------------------------


def test_a_source_reads_like_this() -> None:
    made = softmax(1823, 781, Role.WHOLE)
    source = TARGET.emit(
        Kernel(made.name, made.params, (), made.axes, made.body, origins=("softmax (head, model.py:7)",))
    )
    assert (
        source
        == '''"""softmax computes

    softmax (head, model.py:7)
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def softmax(
    x_ptr,  # float32[1823, 781] strides [781, 1]
    out_ptr,  # float32[1823, 781] strides [781, 1], written
    RBLOCK: tl.constexpr,
):
    xi = tl.program_id(0)
    ri = tl.arange(0, RBLOCK)
    r_mask = ri < 781
    x = tl.load(x_ptr + xi * 781 + ri, mask=r_mask)
    top = tl.reduce(tl.where(r_mask, x, -float("inf")), 0, _maximum)
    exp = libdevice.exp(x - top)
    total = tl.sum(tl.where(r_mask, exp, 0.0), 0)
    tl.store(out_ptr + xi * 781 + ri, tl.div_rn(exp, total), mask=r_mask)


CONFIG = {"RBLOCK": 1024, "num_warps": 2, "num_stages": 1}


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
    assert "int64" in body(add(sympy.Symbol("s0", integer=True, positive=True)))


def test_positions_are_compared_in_int32() -> None:
    assert "int64" not in body(causal(128))
    assert "int64" not in body(padded(128, 3, 3))
    assert "int64" in body(causal(1 << 16))


def test_what_a_loop_does_not_change_stands_before_it() -> None:
    lines = body(linear(64, 96, 4096, BF16)).splitlines()
    start = next(k for k, line in enumerate(lines) if line.strip().startswith("for "))
    before, inside = "\n".join(lines[:start]), "\n".join(lines[start:])
    assert "scale = tl.load(scale_ptr + mi" in before
    assert "x_at = x_ptr + mi * 4096" in before
    assert "tl.load(x_at[:, None] + ki[None, :]" in inside


def test_rows_walked_again_are_kept_in_the_cache() -> None:
    text = body(softmax(64, 65536, Role.LOOP))
    assert re.findall('eviction_policy="(.*?)"', text) == ["evict_last", "evict_last", "evict_first"]
    assert "eviction_policy" not in body(fold("sum", 64, 65536, Role.LOOP))


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


def test_tall_columns_are_walked_and_short_ones_held() -> None:
    assert body(column_softmax(1000, 512)).count("for ") == 0
    assert body(column_softmax(5000, 512)).count("for ") == 3
    assert body(fold("max", 5000, 512, Role.WHOLE, along=0)).count("for ") == 1
    assert "for " not in body(softmax(512, 5000, Role.WHOLE))


def test_a_value_is_loaded_again_after_it_was_stored() -> None:
    text = body(in_place(100))
    assert text.count("tl.load(x_ptr") == 2
    assert text.index("tl.store(x_ptr") < text.index("tl.debug_barrier()") < text.rindex("tl.load(x_ptr")


def test_results_that_are_rounded_to_16_bits_use_the_quick_forms() -> None:
    assert "libdevice.exp" in TARGET.emit(softmax(64, 4096, Role.WHOLE, F32))
    quick = TARGET.emit(softmax(64, 4096, Role.WHOLE, F16))
    assert "tl.exp(" in quick
    assert "div_rn" not in quick


def test_names_that_mean_something_to_python_are_not_taken() -> None:
    params = [param("lambda", F32, 64), param("tl", F32, 64), param("abs", F32, 64, written=True)]
    value = Op("abs", (Op("add", (load_expr("lambda", i), load_expr("tl", i)), F32),), F32)
    ast.parse(TARGET.emit(kernel("names", params, {i: (64, Role.GRID)}, Store("abs", i, value))))


def test_products_of_widened_operands_stay_narrow() -> None:
    made = matmul(64, 64, 64, BF16)
    loop, store = made.body
    assert isinstance(loop, Loop)
    (dot,) = loop.body
    assert isinstance(dot, Fold)
    wide = replace(dot, args=tuple(Cast(arg, F32) for arg in dot.args))
    text = body(replace(made, body=(replace(loop, body=(wide,)), store)))
    assert "ieee" not in text
    assert "tl.dot(a, b, acc)" in text


def test_contractions_over_other_axes_of_the_grid_are_refused() -> None:
    x, y = load_expr("x", 64 * i + r), load_expr("y", 64 * r + j)
    first, second = (Fold(name, "dot", (x, y), (r,), F32, rows, (j,)) for name, rows in (("p", (i,)), ("q", (b,))))
    params = [param("x", F32, 64, 64), param("y", F32, 64, 64), param("out", F32, 64, 64, 64, written=True)]
    axes = {i: (64, Role.GRID), b: (64, Role.GRID), j: (64, Role.GRID), r: (64, Role.LOOP)}
    store = Store("out", 4096 * b + 64 * i + j, Op("add", (first.ref, second.ref), F32))
    with pytest.raises(Unsupported, match="other axes"):
        TARGET.emit(kernel("unequal", params, axes, Loop((r,), (first, second)), store))


HELD = (("m", 128), ("k", 64), ("n", 64), ("r", 64))


def test_attention_is_one_walk_with_running_values() -> None:
    text = body(online_attention(8, 1024, 1024, 64, dtype=BF16, scale=0.125), Config(HELD, num_warps=8))
    assert (
        text.partition("    for ")[2] == """n0 in range(0, 1024, NBLOCK):
        ni = n0 + tl.arange(0, NBLOCK)
        k = tl.load(k_at[:, None] + (ni * 64)[None, :])
        scores = tl.dot(q, k)
        top_now = _maximum(top, tl.reduce(scores, 1, _maximum))
        mul = top_now * 0.125
        mul_1 = tl.where(mul == -float("inf"), 0.0, mul) * 1.4426950408889634
        exp2 = tl.exp2(scores * 0.18033688011112042 - mul_1[:, None])
        sub = top * 0.18033688011112042 - top_now * 0.18033688011112042
        where = tl.where(top * 0.125 == mul, 1.0, tl.exp2(sub))
        whole = whole * where + tl.sum(exp2, 1)
        lhs = exp2.to(tl.bfloat16)
        v = tl.load(v_at[None, :] + (ni * 64)[:, None])
        mixed = tl.dot(lhs, v, mixed * where[:, None])
        top = top_now
    tl.store(out_ptr + bi * 65536 + (mi[:, None] * 64 + ri[None, :]), """
        "(mixed * (1.0 / whole)[:, None]).to(tl.bfloat16))"
    )


def test_exponentials_of_exact_kernels_stay_as_they_are() -> None:
    text = body(online_attention(8, 128, 128, 64, dtype=F32))
    assert "libdevice.exp(" in text and "exp2" not in text


@pytest.mark.parametrize(
    ("made", "ranges", "computed"),
    [
        (online_attention(2, 512, 512, 64, causal=True), ["0, n_middle", "n_middle, n_end"], [False, True]),
        (online_attention(2, 512, 512, 64, causal=True, window=100), ["n_start, n_end"], [True]),
        (online_attention(2, 512, 512, 64, causal=True, window=100, prefix=20), ["0, n_end"], [True]),
        (online_attention(2, 512, 512, 64), ["0, 512"], [False]),
        (attention_dkv(2, 512, 512, 64, causal=True), ["n_start, n_middle", "n_middle, 512"], [True, False]),
        (attention_dq(2, 512, 512, 64, causal=True), ["0, n_middle", "n_middle, n_end"], [False, True]),
    ],
    ids=["causal", "window", "prefix", "full", "dkv", "dq"],
)
def test_blocks_in_which_a_condition_is_false_are_skipped(
    made: Kernel, ranges: list[str], computed: list[bool]
) -> None:
    text = body(made, Config(HELD, split=True))
    assert re.findall(r"in range\((.*), NBLOCK\)", text) == ranges
    conditions = [" <= " in part for part in text.split("    for ")[1:]]
    assert conditions == computed


def test_the_longest_blocks_of_rows_come_first() -> None:
    assert "m_block = m_blocks - 1 - block" in body(online_attention(2, 512, 512, 64, causal=True))
    assert "- 1 - " not in body(online_attention(2, 512, 512, 64))
    assert "- 1 - block" not in body(attention_dkv(2, 512, 512, 64, causal=True))


def test_operands_of_attention_come_through_descriptors_where_rows_are_aligned() -> None:
    described = Config(HELD, descriptors=True)
    text = body(online_attention(8, 512, 512, 40, dtype=BF16, group=2), described)
    assert "k_ptr + bi // 2 * 20480, [512, 40], [40, 1], [NBLOCK, KBLOCK])" in text
    assert "tl.load(" not in text
    assert "make_tensor_descriptor" not in body(online_attention(8, 512, 512, 36, dtype=BF16), described)
    assert "make_tensor_descriptor" not in TritonTarget("sm_80").emit(online_attention(8, 512, 512, 64), described)


def test_attention_is_priced_by_how_its_operands_come() -> None:
    aligned, odd = (TARGET.efficiency(online_attention(8, 512, 512, width, dtype=BF16)) for width in (64, 36))
    assert 0.25 < odd < aligned < TARGET.efficiency(matmul(4096, 4096, 4096, BF16))


@pytest.mark.parametrize("width", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("made", [online_attention, attention_dkv, attention_dq])
def test_defaults_of_attention_give_each_group_of_warps_at_most_64_rows(
    made: Callable[..., Kernel], width: int
) -> None:
    config = TARGET.configs(made(32, 4096, 4096, width, dtype=BF16))[0]
    assert config.block("m") <= 16 * config.num_warps


def test_a_limit_on_registers_is_passed_on() -> None:
    made = online_attention(8, 512, 512, 64, dtype=BF16)
    assert '"maxnreg": 128' in TARGET.emit(made, Config(HELD, num_warps=8, registers=128))
    assert "maxnreg" not in TARGET.emit(made, Config(HELD, num_warps=8))


def test_capabilities_name_only_what_is_spelled() -> None:
    assert TARGET.capabilities.scalar_ops == set(SCALAR_OPS)
    assert TARGET.capabilities.fold_ops == set(FOLD_OPS)


@pytest.mark.parametrize("module", [m.name for m in pkgutil.iter_modules(codegen.triton.__path__)])
def test_examples_in_docstrings(module: str) -> None:
    assert doctest.testmod(importlib.import_module(f"codegen.triton.{module}")).failed == 0


def test_two_persistent_programs_may_share_a_multiprocessor() -> None:
    made = matmul(4096, 4096, 1024, BF16)
    assert {config.per_processor for config in TARGET.configs(made) if config.persistent} == {1, 2}
    single = Config((("m", 128), ("k", 64), ("n", 128)), num_warps=8, num_stages=3, persistent=True)
    sources = [load(made, TARGET.emit(made, replace(single, per_processor=count))) for count in (1, 2)]
    assert [source.grid() for source in sources] == [132, 264]
    assert [source.grid(processors=1000) for source in sources] == [1000, 1024]  # there are 1024 blocks


# Ahead of time --------------------------------------------------------------------------------------------------------


@compiles
@pytest.mark.parametrize(
    "name", [name for name in SMALL if not re.match(r"matmul \w+\d+ \d|\w+ \w+ (whole|loop)$", name)]
)
def test_every_kind_compiles(name: str) -> None:
    found = stages(SMALL[name])
    assert list(found)[:5] == ["ttir", "ttgir", "llir", "ptx", "cubin"]


@compiles
@pytest.mark.parametrize("role", [Role.WHOLE, Role.LOOP])
@pytest.mark.parametrize("name", sorted(set(FOLD_OPS) - {"dot"}))
def test_every_fold_compiles(name: str, role: Role) -> None:
    dtype = torch.bool if name in ("any", "all") else F32
    assert stages(fold(name, 64, 4096, role, dtype))["cubin"]


@compiles
@pytest.mark.parametrize("dtype", [F32, F64, torch.int64, torch.uint8], ids=str)
def test_every_scalar_op_compiles(dtype: torch.dtype) -> None:
    """All in one kernel, which is much quicker than one by one."""
    names = [name for name in SCALAR_OPS if name != "where" and special(name, dtype, 4) is not None]
    stores, params = [], {}
    for name in names:
        single = scalar(name, dtype, 1024)
        (store,) = single.body
        assert isinstance(store, Store)
        stores.append(Store(f"out_{name}", store.offset, store.value))
        params |= {p.name: p for p in single.params[:-1]}
        params[f"out_{name}"] = param(f"out_{name}", single.params[-1].dtype, 1024, written=True)
    assert len(names) > 20
    # A block of one element per thread keeps the code, which is long, short.
    joint = kernel("ops", list(params.values()), {i: (1024, Role.GRID)}, *stores)
    for arch in ("sm_90", "gfx942") if dtype is F32 else ("sm_90",):
        assert len(stages(joint, arch, Config((("x", 128),), num_warps=4))) == 5


@compiles
@pytest.mark.parametrize("dtype", [F32, F16, BF16, I8], ids=str)
def test_aligned_memory_moves_16_bytes_at_a_time(dtype: torch.dtype) -> None:
    assert has(instructions(add(1 << 24, dtype)), "ld.global.v4.b32", "st.global.v4.b32")


@compiles
def test_rows_and_tiles_move_16_bytes_at_a_time() -> None:
    for made in (
        *(softmax(1024, 4096, Role.WHOLE), softmax(1024, 4096, Role.WHOLE, F16), softmax(64, 65536, Role.LOOP)),
        *(layernorm(1024, 768, BF16), transposed_add(1024, 1024), gather(1024, 768), bias_gelu(1024, 3072, BF16)),
    ):
        found = {name for name in instructions(made) if name.startswith(("ld.global", "st.global"))}
        assert any(name.startswith("ld.global") and name.endswith("v4.b32") for name in found), (made.name, found)
        assert has(found, "st.global.v4.b32"), (made.name, found)


@compiles
def test_unaligned_memory_does_not() -> None:
    made = kernel(
        "copy",
        [param("x", F32, 1 << 20, aligned=False), param("out", F32, 1 << 20, written=True)],
        {i: (1 << 20, Role.GRID)},
        Store("out", i, Op("add", (load_expr("x", i), const(1.0, F32)), F32)),
    )
    assert not has(instructions(made), "ld.global.v4")


@compiles
def test_without_the_promise_accesses_are_narrow() -> None:
    made = add(1 << 20)
    ptx = compile_for(load(made, TARGET.emit(made)), target_of("sm_90"), aligned=False).asm["ptx"]
    assert "ld.global.b32" in ptx and ".v4" not in ptx and ".v2" not in ptx


@compiles
def test_symbolic_sizes_that_are_multiples_of_16_move_16_bytes_at_a_time() -> None:
    rows, columns = sympy.symbols("s0 s1", integer=True, positive=True)
    made = softmax(rows, columns, Role.LOOP)
    generated = load(made, TARGET.emit(made))
    for multiples, wide in (((True, True), True), ((True, False), False)):
        ptx = compile_for(generated, target_of("sm_90"), multiples).asm["ptx"]
        assert ("v4.b32" in ptx) is wide


@compiles
@pytest.mark.parametrize(
    ("made", "arch", "wanted"),
    [
        (matmul(2048, 2048, 2048, BF16, turned=(False, True)), "sm_90", ("wgmma.mma_async", "cp.async.bulk.tensor.2d")),
        (matmul(2048, 2048, 2048, F16), "sm_90", ("wgmma.mma_async", "cp.async.bulk.tensor.2d.global")),
        (matmul(512, 512, 512, F16, batch=16), "sm_90", ("wgmma.mma_async", "cp.async.bulk.tensor.3d")),
        (matmul(96, 512, 512, F16, batch=16), "sm_90", ("wgmma.mma_async", "cp.async.cg")),
        (linear(2048, 2048, 2048, BF16), "sm_90", ("wgmma.mma_async",)),
        (matmul(2048, 2048, 2048, BF16, turned=(True, False)), "sm_80", ("mma.sync.aligned.m16n8k16", "cp.async.cg")),
        (
            matmul(512, 512, 512, I8, turned=(False, True)),
            "sm_90",
            ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8",),
        ),
        (matmul(128, 128, 128, F64), "sm_90", ("mma.sync.aligned.m16n8k16.row.col.f64",)),
        (matmul(16, 4096, 4096, BF16, turned=(False, True)), "sm_90", ("mma.sync.aligned.m16n8k16",)),
    ],
    ids=lambda value: value.name if isinstance(value, Kernel) else None,
)
def test_contractions_run_on_the_matrix_units(made: Kernel, arch: str, wanted: tuple[str, ...]) -> None:
    found = instructions(made, arch)
    assert has(found, *wanted), sorted(name for name in found if "mma" in name or "async" in name)


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_float32_products_keep_their_precision_unless_asked_otherwise(arch: str) -> None:
    made = matmul(256, 256, 256, F32)
    found = stages(made, arch)
    assert found["ttgir"].count("cvt.rna.tf32.f32") == 2  # the upper parts of both operands
    # A correction that is not a number, because an operand is infinite, is dropped.
    (test,) = re.findall(r"(%\w+) = arith.cmpf uno, ", found["ttgir"].split("for ")[1].split("scf.yield")[0])
    assert f"arith.select {test}, " in found["ttgir"]
    rounded = TritonTarget(arch, Numerics(tf32=True))
    ptx = dict(rounded.stages(made, rounded.emit(made)))["ptx"]
    assert "tf32" in ptx and "cvt.rna.tf32" not in ptx


def test_float32_products_are_multiplied_as_they_are_where_they_cannot_be_split() -> None:
    made = matmul(256, 256, 256, F32)
    for arch in ("sm_75", "gfx942"):
        assert 'input_precision="ieee"' in TritonTarget(arch).emit(made)


@compiles
@pytest.mark.parametrize(
    "name",
    [
        *("add bf16", "softmax loop", "linear", "matmul float64 01", "argmax float32 whole", "normal"),
        *(name for name in SMALL if re.match("online|attention_d|linear_log|running", name)),
    ],
)
def test_amd(name: str) -> None:
    assert list(stages(SMALL[name], "gfx942")) == ["ttir", "ttgir", "llir", "amdgcn", "hsaco"]


@compiles
@pytest.mark.parametrize("made", [total(1 << 20, 2048), column_totals(512, 40, 64)], ids=lambda made: made.name)
def test_the_last_program_goes_on(made: Kernel) -> None:
    found = stages(made)
    assert found["ttir"].count("tt.func public") == 1
    before, after = found["ptx"].split("atom.global.gpu.acq_rel.add.u32")
    assert before.rindex("st.global") < before.rindex("bar.sync")
    assert "ld.global.cg" in after and "ld.global.cg" not in before
    assert stages(made, "gfx942")["hsaco"]


@compiles
def test_two_products_of_the_same_rows_are_one() -> None:
    """The matrix units take the columns of both at a time, and no thread moves an operand."""
    found = stages(gated(4096, 5632, 2048, turned=True))
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m\d+n\d+)", found["ptx"])) == {"m64n256"}
    assert "ldmatrix" not in found["ptx"]
    text = TARGET.emit(gated(4096, 5632, 2048))
    assert text.count("tl.dot(") == 2  # stored the other way round, they stay two


@compiles
def test_independent_kernels_are_one_function_on_ranges_of_programs() -> None:
    made = packed("packed", add(5000), bias_gelu(7, 40, F16), add(3))
    text = TARGET.emit(made)
    assert re.search(r"return \(\d+ \+ \d+ \+ \d+,\)", text)
    assert stages(made)["ttir"].count("tt.func public") == 1
    assert stages(made, "gfx942")["hsaco"]


@compiles
def test_persistent_parts_share_warps_and_stages() -> None:
    made = packed("packed", matmul(4096, 4096, 512, BF16, out=BF16), gated(4096, 1024, 512, turned=True))
    text = TARGET.emit(made)
    assert text.count("tl.range(program, ") == 2 and "if program" not in text
    assert set(re.findall(r"\.(m\d+n\d+)k16", stages(made)["ptx"])) == {"m64n256"}


def test_parts_without_promises_are_emitted_anew() -> None:
    made = packed("packed", matmul(4096, 4096, 512, BF16), gated(4096, 1024, 512, turned=True))
    text = TARGET.emit(unaligned(made))
    assert "tl.make_tensor_descriptor(" not in text and text.count("tl.dot(") == 3


def test_only_kernels_of_like_needs_share_a_launch() -> None:
    products = [matmul(4096, 4096, 512, BF16), matmul(4096, 1024, 512, BF16), matmul(40, 35, 33, BF16)]
    assert TARGET.packs(products[0], products[1])
    assert not TARGET.packs(products[0], products[2]) and not TARGET.packs(products[0], add(1 << 20))
    assert TARGET.packs(add(1 << 20), add(70)) and not TARGET.packs(add(70), softmax(50, 300, Role.WHOLE))
    assert TARGET.packs(softmax(5000, 300, Role.WHOLE), softmax(5000, 500, Role.WHOLE))
    assert not TARGET.packs(softmax(5000, 300, Role.WHOLE), softmax(5000, 16384, Role.WHOLE))


def test_what_follows_is_walked_where_its_warps_cannot_hold_it() -> None:
    long = TARGET.emit(total(1 << 20, 8192))
    assert '"num_warps": 4' in long and "for r0 in" in long
    assert "for r0 in" not in TARGET.emit(total(1 << 20, 1024))
    columns = TARGET.emit(column_totals(1 << 12, 40, 512))
    assert re.findall(r"for \w+ in", columns) == ["for r0 in"]


@compiles
def test_a_pipeline_too_deep_for_the_shared_memory_is_shortened() -> None:
    made = matmul(1024, 1024, 1024, BF16)
    deep = Config((("m", 128), ("k", 128), ("n", 256)), num_warps=8, num_stages=6)
    assert stages(made, config=deep)["cubin"]
    with pytest.raises(BuildError, match="shared memory"):
        stages(made, config=Config((("m", 64), ("k", 1024), ("n", 64)), num_warps=8))


# Refusals -------------------------------------------------------------------------------------------------------------


def test_sources_that_do_not_fit_the_kernel_are_refused() -> None:
    made = add(64)
    source = TARGET.emit(made)
    for broken in ("def", source.replace("CONFIG =", "SETTINGS ="), source.replace("    y_ptr,", "    z_ptr,", 1)):
        with pytest.raises(BuildError, match="cannot be used"):
            list(TARGET.stages(made, broken))


@compiles
def test_errors_of_the_compiler_are_passed_on() -> None:
    made = add(64)
    with pytest.raises(BuildError, match=r"cannot compile add[\s\S]*nonsense"):
        list(TARGET.stages(made, TARGET.emit(made).replace("x + y", "nonsense")))


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
