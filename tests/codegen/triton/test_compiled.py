"""Kernels compiled ahead of time, without a GPU: that each compiles, and to which instructions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sympy
import torch

pytest.importorskip("triton")

from fusion.codegen.numerics import Numerics
from fusion.codegen.triton import Config, TritonTarget
from fusion.codegen.triton.devices import H200
from fusion.codegen.triton.launch.aot import compile_for
from fusion.codegen.triton.launch.load import load
from fusion.lowering.errors import BuildError
from fusion.lowering.ir.expr import Op, const
from fusion.lowering.ir.kernel import Kernel, Role, Store
from fusion.lowering.ir.scalar_ops import FOLD_OPS, SCALAR_OPS
from tests.codegen.kernels.making import BF16, F16, F32, F64, I8, i, kernel, param, special
from tests.codegen.kernels.making import load as load_expr
from tests.codegen.kernels.pointwise import add, bias_gelu, gather, normalised, scalar, transposed_add
from tests.codegen.kernels.products import linear, matmul
from tests.codegen.kernels.rows import fold, layernorm, online_softmax, shifted_softmax, softmax
from tests.codegen.kernels.small import SMALL
from tests.codegen.triton.texts import TARGET, compiles, has, instructions, stages


@compiles
@pytest.mark.parametrize(
    "name", [name for name in SMALL if not re.match(r"matmul \w+\d+ \d|\w+ \w+ (whole|loop)$", name)]
)
def test_every_kind_compiles(name: str) -> None:
    artefacts = stages(SMALL[name])
    assert list(artefacts)[:5] == ["ttir", "ttgir", "llir", "ptx", "cubin"]


@compiles
def test_a_cubin_is_disassembled_with_the_lines_of_the_source() -> None:
    example = SMALL[next(iter(SMALL))]
    source = TARGET.emit(example)
    artefacts = dict(TARGET.stages(example, source, "sm_90"))
    assert list(artefacts) == ["ttir", "ttgir", "llir", "ptx", "cubin", "sass"]
    lines = [int(line) for line in re.findall(r"//## File \S+, line (\d+)", artefacts["sass"])]
    assert "EXIT" in artefacts["sass"] and any("tl.store" in source.splitlines()[line - 1] for line in lines)


@compiles
@pytest.mark.parametrize("role", [Role.WHOLE, Role.LOOP])
@pytest.mark.parametrize("name", sorted(set(FOLD_OPS) - {"dot"}))
def test_every_fold_compiles(name: str, role: Role) -> None:
    dtype = torch.bool if name in ("any", "all") else F32
    assert stages(fold(name, 64, 4096, role, dtype))["cubin"]


@compiles
@pytest.mark.parametrize("dtype", [F32, F64, torch.int64, torch.uint8], ids=str)
def test_every_scalar_op_compiles(dtype: torch.dtype) -> None:
    """All in one kernel, which is much faster than one by one."""
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
    for result in (
        *(softmax(1024, 4096, Role.WHOLE), softmax(1024, 4096, Role.WHOLE, F16), softmax(64, 65536, Role.LOOP)),
        shifted_softmax(64, 50257, 50304, 50304, 0, BF16),  # whose end alone is masked
        *(layernorm(1024, 768, BF16), transposed_add(1024, 1024), gather(1024, 768), bias_gelu(1024, 3072, BF16)),
    ):
        results = {name for name in instructions(result) if name.startswith(("ld.global", "st.global"))}
        assert any(name.startswith("ld.global") and name.endswith("v4.b32") for name in results), (result.name, results)
        assert has(results, "st.global.v4.b32"), (result.name, results)


@compiles
@pytest.mark.parametrize("apart", [50257, 50304])
def test_rows_that_end_within_16_bytes_are_loaded_by_as_many(apart: int) -> None:
    result = instructions(shifted_softmax(64, 50257, apart, apart, 0, BF16))
    assert not any(name.startswith("ld.global") and name.endswith("b16") for name in result), result
    assert has(result, "st.global.v4.b32", "st.global.b16")  # elements of the next row stay as they are


@compiles
def test_rows_of_a_few_large_blocks_that_end_within_16_bytes_are_stored_by_as_many_before_their_end() -> None:
    example = online_softmax(4096, 50257, apart=50304)
    assert TARGET.configs(example)[0].block("r") * 4 > 50257
    results = {name for name in instructions(example) if name.startswith("st.global")}
    assert any(name.endswith(".v4.b32") for name in results), results


@compiles
def test_numbers_of_a_row_are_read_once_and_nothing_is_divided_for_each_element() -> None:
    ptx = stages(normalised(2048, 128256, BF16))["ptx"]
    assert len(re.findall(r"ld\.global[.\w]*\.b32 ", ptx)) == 2 + ptx.count("ld.global.v4.b32")
    assert "st.global.v4.b32" in ptx and ptx.count("mul.hi") <= 1


def test_unaligned_memory_does_not() -> None:
    example = kernel(
        "copy",
        [param("x", F32, 1 << 20, aligned=False), param("out", F32, 1 << 20, written=True)],
        {i: (1 << 20, Role.GRID)},
        Store("out", i, Op("add", (load_expr("x", i), const(1.0, F32)), F32)),
    )
    assert not has(instructions(example), "ld.global.v4")


@compiles
def test_a_binary_without_its_ptx_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whether it has additions that `ptxas` assembles wrongly."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    example = add(1 << 10)
    with pytest.raises(BuildError, match="binaries only"):
        compile_for(load(example, TARGET.emit(example)), H200)


@compiles
def test_without_the_promise_accesses_are_narrow() -> None:
    example = add(1 << 20)
    ptx = compile_for(load(example, TARGET.emit(example)), H200, aligned=False).asm["ptx"]
    assert "ld.global.b32" in ptx and ".v4" not in ptx and ".v2" not in ptx


@compiles
def test_symbolic_sizes_that_are_multiples_of_16_move_16_bytes_at_a_time() -> None:
    rows, columns = sympy.symbols("s0 s1", integer=True, positive=True)
    example = softmax(rows, columns, Role.LOOP)
    generated = load(example, TARGET.emit(example))
    for multiples, wide in (((True, True), True), ((True, False), False)):
        ptx = compile_for(generated, H200, multiples).asm["ptx"]
        assert ("v4.b32" in ptx) is wide


@compiles
@pytest.mark.parametrize(
    ("example", "arch", "wanted"),
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
        (matmul(128, 128, 128, F64), "sm_90", ("mma.sync.aligned.",)),
        (matmul(16, 4096, 4096, BF16, turned=(False, True)), "sm_90", ("mma.sync.aligned.m16n8k16",)),
    ],
    ids=lambda value: value.name if isinstance(value, Kernel) else None,
)
def test_contractions_run_on_the_matrix_units(example: Kernel, arch: str, wanted: tuple[str, ...]) -> None:
    actual = instructions(example, arch)
    assert has(actual, *wanted), sorted(name for name in actual if "mma" in name or "async" in name)


@compiles
def test_float32_epilogue_tiles_of_a_product_fit_into_shared_memory() -> None:
    """Their stores take shared memory for all elements of a block, and no shorter pipeline helps."""
    example = matmul(4096, 4099, 515, BF16, out=torch.int64)  # rows of odd length: through pointers
    default = TARGET.configs(example)[0]
    room = H200.shared_per_program
    assert type(default) is Config and 8 * default.block("m") * default.block("n") <= room
    assert compile_for(load(example, TARGET.emit(example)), H200).metadata.shared <= room
    narrow = TARGET.configs(matmul(4096, 4099, 515, BF16))[0]
    assert 8 * narrow.block("m") * narrow.block("n") > room


@compiles
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_float32_products_keep_their_precision_unless_asked_otherwise(arch: str) -> None:
    example = matmul(256, 256, 256, F32)
    artefacts = stages(example, arch)
    assert artefacts["ttgir"].count("cvt.rna.tf32.f32") == 2  # the upper parts of both operands
    # A correction that is not a number, because an operand is infinite, is dropped.
    (test,) = re.findall(r"(%\w+) = arith.cmpf uno, ", artefacts["ttgir"].split("for ")[1].split("scf.yield")[0])
    assert f"arith.select {test}, " in artefacts["ttgir"]
    rounded = TritonTarget(arch, Numerics(tf32=True))
    ptx = dict(rounded.stages(example, rounded.emit(example)))["ptx"]
    assert "tf32" in ptx and "cvt.rna.tf32" not in ptx


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
@pytest.mark.parametrize("same", [True, False])
def test_a_product_minus_itself_is_no_fused_multiply_add(same: bool) -> None:
    """Which would subtract the rounded product from the exact one; the difference of two products may be one."""
    x, y, z = (load_expr(name, i) for name in ("x", "y", "z"))
    product = Op("mul", (x, y), F32)
    taken = product if same else Op("mul", (x, z), F32)
    params = [*(param(name, F32, 64) for name in ("x", "y", "z")), param("out", F32, 64, written=True)]
    example = kernel("difference", params, {i: (64, Role.GRID)}, Store("out", i, Op("sub", (product, taken), F32)))
    assert has(instructions(example), "fma.rn.f32") == (not same)
